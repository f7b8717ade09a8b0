"""What a rank's memory goes to, in bytes.

On CPUs activations are what autograd saves for the backward pass: unique storages, parameters and constants left out,
summed over the stages' micro-batches in flight. Shapes never change (but those of rows that went to their experts over ep, by what the
router does), so one step is watched for each number of micro-batches.
Of what is recomputed it is the operands; of a micro-batch whose weight gradients wait for their W, what these read. The transient is the
most that was alive in that step beside them: results and gradients on their way, what a recomputation makes for the moment, messages
(runtime.live_bytes).
On GPUs they are what the allocator has beyond parameters, gradients and optimizer states.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.runtime.live_bytes import LiveBytes


class SavedBytes:
    """Bytes saved for backward, now and at their peak. `permanent` tensors do not count. `live` counts all that is allocated within it."""

    def __init__(self, permanent: Iterable[Tensor]) -> None:
        self._permanent = {tensor.untyped_storage()._cdata for tensor in permanent}
        self._live: dict[Hashable, int] = {}
        self._seen: set[int] = set()
        self._key: Hashable = None
        self.peak = 0
        self.live = LiveBytes()

    def know(self, permanent: Iterable[Tensor]) -> None:
        """These do not count either."""
        self._permanent.update(tensor.untyped_storage()._cdata for tensor in permanent)

    @property
    def transient(self) -> int:
        """The most that was alive beside what was saved at most."""
        return max(0, self.live.peak - self.peak)

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

    def put_off(self, key: Hashable, operands: Iterable[Tensor]) -> None:
        """A micro-batch's backward is over but for weight gradients: they read these."""
        sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in operands}
        self._live[key] = sum(size for storage, size in sizes.items() if storage not in self._permanent)
        self.peak = max(self.peak, self.now)

    def release(self, key: Hashable) -> None:
        """A micro-batch's backward is over, weight gradients included."""
        self._live.pop(key, None)

    @property
    def now(self) -> int:
        return sum(self._live.values())
