"""What a rank's memory goes to, in bytes.

On CPUs activations are what autograd saves for the backward pass: unique storages, parameters and constants left out,
summed over the micro-batches in flight. Shapes never change, so one step is watched for each number of micro-batches.
On GPUs they are what the allocator has beyond parameters, gradients and optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """Bytes saved for backward, now and at their peak. `permanent` tensors do not count."""

    def __init__(self, permanent: Iterable[Tensor]) -> None:
        self._permanent = {tensor.untyped_storage().data_ptr() for tensor in permanent}
        self._live: dict[int, int] = {}
        self.peak = 0

    @contextmanager
    def of(self, micro_batch: int) -> Iterator[None]:
        """Counts what is saved inside for a micro-batch."""
        seen: set[int] = set()

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._permanent and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self._live[micro_batch] = self._live.get(micro_batch, 0) + storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.peak = max(self.peak, self.now)

    def release(self, micro_batch: int) -> None:
        """A micro-batch's backward is over."""
        self._live.pop(micro_batch, None)

    @property
    def now(self) -> int:
        return sum(self._live.values())
