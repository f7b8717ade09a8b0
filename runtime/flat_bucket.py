"""One bucket's tensors on a rank: values, gradients, the leaves that programs use, and what ZeRO keeps of them.

    zero  values             gradients                    own (what this rank updates)
    0     whole              whole                        whole
    1     whole              whole                        a shard, in place
    2     whole              whole while a step needs     a shard; gradients in a buffer of shards, which is freed while micro-batches
                                                          add up in whole ones
    3     whole while used   whole during a backward      a shard, both in buffers of shards

(Rajbhandari et al., arXiv 1910.02054, section 5.) A bucket of one replica is as with 0.

In a 16-bit plan `values` are the 16-bit numbers that programs read. What a rank owns it holds in FP32 too (`own_values`, the masters):
those are loaded, updated and saved, and rounded to `values` after every update, before the replicas' are gathered. Gradients are in the
type that they are summed in over the replicas, FP32 or bf16, as in Megatron-Core: a leaf's `.grad` is (torch's grad_dtype), and what
autograd brings is converted as it is added.

Leaves have storage offsets into `values` and a version counter of their own: freeing, gathering and updating do not
disturb what autograd has saved. A storage that is freed keeps its identity and gets new memory when it is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.runtime.axes import Axis, Pending
from meshwright.runtime.buckets import Bucket, Span
from meshwright.runtime.placement import Parameter


@dataclass(frozen=True)
class Numbers:
    """Types of `values`, and of gradients while they are summed over the replicas."""

    values: torch.dtype = torch.float32
    sums: torch.dtype = torch.float32

    @property
    def gradients(self) -> torch.dtype:
        """Of gradients while micro-batches add up: that of FP32 values, else that of their sums."""
        return torch.float32 if self.values == torch.float32 else self.sums


@dataclass
class Amount:
    """Bytes that come and go: now, and at their peak."""

    now: int = 0
    peak: int = 0

    def add(self, num_bytes: int) -> None:
        """Something was made (or, below 0, freed)."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


class FlatBucket:
    """A bucket on this rank. `fired` is told each time that a backward has completed one parameter's gradient.

    own        [start, stop) of the bucket that this rank updates
    is_done    its gradients are summed, or under way: in this step (ZeRO 0 to 2) or this backward (3)
    num_fired  parameters that completed in the same time
    """

    def __init__(
        self,
        spec: Bucket,
        axis: Axis,
        zero: int,
        device: torch.device,
        gathered: Amount,
        fired: Callable[[FlatBucket], None],
        numbers: Numbers,
    ) -> None:
        self.spec, self.axis, self._numbers = spec, axis, numbers
        self.zero = zero if spec.num_shards > 1 else 0
        self.shard = axis.index * spec.shard_size, (axis.index + 1) * spec.shard_size
        self.own = self.shard if self.zero else (0, spec.size)
        num_own = self.own[1] - self.own[0]
        self.values = torch.zeros(spec.size, dtype=numbers.values, device=device)
        self.has_masters = numbers.values != torch.float32
        apart = self.zero == 3 or self.has_masters
        self.own_values = torch.zeros(num_own, device=device) if apart else self.values[slice(*self.own)]
        kind = numbers.gradients
        self.gradients = torch.zeros(spec.size, dtype=kind, device=device) if self.zero < 2 else None
        self.own_gradients = torch.zeros(num_own, dtype=kind, device=device) if self.gradients is None else self.gradients[slice(*self.own)]
        self._gathered = gathered
        self._arriving: Pending | None = None
        self.leaves = {span.parameter.name: self._leaf(span) for span in spec.spans}
        self._nodes = [_when_accumulated(leaf, lambda: fired(self)) for leaf in self.leaves.values()] if spec.num_shards > 1 else []
        if self.gradients is not None:
            self._point_at(self.gradients)
        self.resident = self.zero < 3
        if not self.resident:
            self.values.untyped_storage().resize_(0)
        self.num_fired = 0
        self.is_done = False

    @property
    def value_bytes(self) -> int:
        """Of values that are kept."""
        whole = self.spec.size * self.values.element_size() if self.zero < 3 else 0
        return whole + (self.own_values.nbytes if self.zero == 3 or self.has_masters else 0)

    @property
    def gradient_bytes(self) -> int:
        """Of gradients that are kept."""
        return self.own_gradients.nbytes if self.zero >= 2 else self.spec.size * self.own_gradients.element_size()

    def begin(self, num_micro_batches: int, into: Amount) -> None:
        """A step begins: gradients are zero. Several micro-batches add up in whole ones, for which shards make room."""
        self.num_fired, self.is_done = 0, False
        if self.zero == 2 and num_micro_batches > 1:
            self.own_gradients.untyped_storage().resize_(0)
            into.add(-self.own_gradients.nbytes)
            self.allocate_gradients(into)
        else:
            (self.own_gradients if self.gradients is None else self.gradients).zero_()

    def within_own(self, start: int, stop: int) -> slice:
        """Elements [start, stop) of the bucket, which this rank owns, in its own part."""
        return slice(start - self.own[0], stop - self.own[0])

    def runs(self, belongs: Callable[[Parameter], bool], low: int, high: int) -> list[tuple[int, int]]:
        """[start, stop) of the longest runs within [low, high) of the bucket whose parameters all belong, padding included."""
        found: list[tuple[int, int]] = []
        spans = self.spec.spans
        stops = [*(span.start - self.spec.start for span in spans[1:]), self.spec.size]
        for span, stop in zip(spans, stops, strict=True):
            start, stop = max(low, span.start - self.spec.start), min(high, stop)
            if start >= stop or not belongs(span.parameter):
                continue
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], stop
            else:
                found.append((start, stop))
        return found

    def start_gather(self) -> None:
        """Starts to make the values whole and current, from the replicas' own."""
        if self._arriving is not None:
            return
        if not self.resident:
            self.values.untyped_storage().resize_(self.values.nbytes)
            self._gathered.add(self.values.nbytes)
            self.resident = True
        self._arriving = self.axis.start_gather_into(self.values, self._rounded())

    def publish(self) -> None:
        """The own values were written: programs see them, where no gather follows."""
        if self.zero == 0:
            self._rounded()

    def _rounded(self) -> Tensor:
        """The own part of `values`, up to date."""
        if not self.has_masters:
            return self.own_values
        return self.values[slice(*self.own)].copy_(self.own_values)

    def require(self) -> None:
        """Waits until the values may be used."""
        if not self.resident:
            self.start_gather()
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def release(self) -> None:
        """Frees the values where ZeRO keeps them sharded."""
        if self.zero == 3 and self.resident:
            self.require()
            self.values.untyped_storage().resize_(0)
            self._gathered.add(-self.values.nbytes)
            self.resident = False

    def allocate_gradients(self, into: Amount) -> None:
        """Room for the gradients of a backward, where they are not kept."""
        if self.gradients is None:
            self.gradients = torch.zeros(self.spec.size, dtype=self._numbers.gradients, device=self.own_values.device)
            into.add(self.gradients.nbytes)
            self._point_at(self.gradients)

    @property
    def has_gradients(self) -> bool:
        """Whether there is something to reduce."""
        return self.gradients is not None or any(leaf.grad is not None for leaf in self.leaves.values())

    def start_reduce(self, into: Amount) -> Callable[[], None]:
        """Starts the sum over the replicas; what is returned waits, and has the own gradients complete."""
        self.allocate_gradients(into)
        gradients = self.gradients
        assert gradients is not None
        sent = gradients.to(self._numbers.sums)
        if self.zero == 0:
            pending = self.axis.start_all_reduce(sent, in_place=True)
            return lambda: _nothing(pending.wait() if sent is gradients else gradients.copy_(pending.wait()))
        pending = self.axis.start_reduce_scatter(sent, 0)
        if self.zero == 1:
            return lambda: _nothing(self.own_gradients.copy_(pending.wait()))
        self.gradients = None
        for leaf in self.leaves.values():
            leaf.grad = None

        def take() -> None:
            total = pending.wait()
            into.add(-gradients.nbytes)
            if self.own_gradients.untyped_storage().nbytes() == 0:
                self.own_gradients.untyped_storage().resize_(self.own_gradients.nbytes)
                into.add(self.own_gradients.nbytes)
                self.own_gradients.copy_(total)
            else:
                self.own_gradients.add_(total)

        return take

    def _leaf(self, span: Span) -> Tensor:
        place = self.values.storage_offset() + span.start - self.spec.start
        strides = torch.empty(span.shape, device="meta").stride()
        empty = torch.empty(0, dtype=self.values.dtype, device=self.values.device)
        leaf = empty.set_(self.values.untyped_storage(), place, span.shape, strides).requires_grad_()
        if self.has_masters:
            leaf.grad_dtype = self._numbers.gradients
        return leaf

    def _point_at(self, gradients: Tensor) -> None:
        """Leaves accumulate into views; what autograd made by itself before is added."""
        for span in self.spec.spans:
            leaf = self.leaves[span.parameter.name]
            start = span.start - self.spec.start
            view = gradients[start : start + span.size].view(span.shape)
            if leaf.grad is not None:
                view.add_(leaf.grad)
            leaf.grad = view


def _nothing(_: Tensor) -> None:
    pass


def _when_accumulated(leaf: Tensor, fired: Callable[[], None]) -> object:
    """Calls `fired` whenever a backward is done with a leaf's gradient, also if it was added to leaf.grad by hand (so that
    autograd got None). The node that is returned must be kept alive."""
    edge = leaf.view_as(leaf).grad_fn
    assert edge is not None
    node = edge.next_functions[0][0]
    assert node is not None
    node.register_hook(lambda *_: fired())
    return node
