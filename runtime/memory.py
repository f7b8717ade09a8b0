"""What a rank's memory goes to, in bytes.

On CPUs activations are what autograd saves for the backward pass: unique storages, parameters and constants left out,
summed over the stages' micro-batches in flight. Shapes never change (but those of rows that went to their experts over ep, by what the
router does), so one step is watched for each number of micro-batches.
Of recomputed layers it is what they keep; what a recomputation makes for the moment is not counted.
On GPUs they are what the allocator has beyond parameters, gradients and optimizer states.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """Bytes saved for backward, now and at their peak. `permanent` tensors do not count."""

    def __init__(self, permanent: Iterable[Tensor]) -> None:
        self._permanent = {tensor.untyped_storage()._cdata for tensor in permanent}
        self._live: dict[Hashable, int] = {}
        self._seen: set[int] = set()
        self._key: Hashable = None
        self.peak = 0

    @contextmanager
    def of(self, key: Hashable) -> Iterator[None]:
        """Counts what is saved inside for a micro-batch of a stage."""
        self._seen = set(self._permanent)
        self._key = key
        with saved_tensors_hooks(self.keep, lambda tensor: tensor):
            yield
        self.peak = max(self.peak, self.now)

    def keep(self, tensor: Tensor) -> Tensor:
        """A tensor of the micro-batch is saved."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._live[self._key] = self._live.get(self._key, 0) + storage.nbytes()
        return tensor

    def release(self, key: Hashable) -> None:
        """A micro-batch's backward is over, weight gradients included."""
        self._live.pop(key, None)

    @property
    def now(self) -> int:
        return sum(self._live.values())
