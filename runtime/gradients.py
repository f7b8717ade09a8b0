"""A rank's parameters and their gradients, flat: buckets of them (runtime.buckets), of which ZeRO may keep shards only.

Every trainable parameter is a leaf into a bucket's values, its `.grad` a view of the bucket's gradients, into which autograd
accumulates over the micro-batches, in FP32 (with 16-bit values in the type of their sums). Gradients are completed by plain sums:

    over dp (edp)                              every parameter: by an all-reduce (ZeRO 0) or a reduce-scatter to the shards that
                                               replicas update (ZeRO 1 to 3); over cp too
    over an axis on which the parameter is R   each rank's gradient is partial (a norm under sequence parallelism)
    over the stages that hold it               a tied parameter

With ZeRO 0 to 2 nothing is sent before the last micro-batch. In its backward each bucket's sum starts as soon as all of its
gradients are complete, and overlaps with the rest. With ZeRO 3 each micro-batch's gradients are summed so. One sum is under
way at a time; the sums over tp and stages follow at the end, on what the rank owns. Where weight gradients are put off (W of
zero-bubble schedules) they all follow at the end.

ZeRO 2 with several micro-batches adds them up in whole buckets, as Megatron-Core does: those live from the first backward to
the bucket's reduction. Losses are already divided by the global count. The global gradient norm counts every element of the
model once: each rank adds the squares of its share (Arrangement.shares), if it is first of those that hold the same.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.axes import Axis, Pending
from meshwright.runtime.buckets import Arrangement
from meshwright.runtime.flat_bucket import Amount, FlatBucket, Numbers
from meshwright.runtime.placement import LAYOUT_AXES, Parameter
from meshwright.runtime.residency import Residency

ROW = 4096
"""Elements whose squares are summed in FP32, before FP64."""
BLOCK = 1 << 22
"""Elements that one sum over tp takes, or one update of narrower gradients."""
FP32 = Numbers()
Tied = Mapping[tuple[int, ...], dist.ProcessGroup]
"""Group of this rank and its peers on other stages, by the stages that share a parameter."""


@dataclass(frozen=True)
class Chunk:
    """A run of what this rank updates whose parameters are in the same group. `start` is its place in a buffer of all the
    rank's own elements, as the optimizer's states are."""

    group: int
    values: Tensor
    gradients: Tensor
    start: int


@dataclass(frozen=True)
class TimedSum:
    """The sum of a bucket's gradients by time.perf_counter: it started, and was waited for. `name`: of its first parameter."""

    name: str
    num_bytes: int
    start_s: float
    end_s: float


class FlatParameters:
    """The parameters of one rank. `tensors` are what programs get, by name. `frozen` ones may be shared with other versions."""

    def __init__(
        self,
        arrangement: Arrangement,
        axes: Mapping[str, Axis],
        device: torch.device,
        frozen: dict[str, Tensor] | None = None,
        numbers: Numbers = FP32,
    ) -> None:
        self.arrangement, self._axes = arrangement, axes
        placement = arrangement.placement
        self.gathered, self.staged = Amount(), Amount()
        self.buckets = tuple(
            FlatBucket(spec, axes[spec.axis], arrangement.zero, device, self.gathered, self._on_fired, numbers)
            for spec in arrangement.own
        )
        self._owns_frozen = frozen is None
        if frozen is None:
            held = [p for p in placement.held if not p.trainable]
            frozen = {p.name: torch.zeros(placement.local_shape(p), dtype=numbers.values, device=device) for p in held}
        self.frozen = frozen
        self.residency = Residency(self.buckets, self.frozen, self.staged)
        leaves = {name: leaf for bucket in self.buckets for name, leaf in bucket.leaves.items()}
        self.is_sharded = any(bucket.zero for bucket in self.buckets)
        self.tensors: Mapping[str, Tensor] = self.residency if self.is_sharded else {**leaves, **self.frozen}
        self._num_micro_batches = 1
        self._num_uses: Mapping[str, int] = {}
        self._overlap = False
        self._sums: list[TimedSum] | None = None
        self._reducing: Callable[[], None] | None = None

    @property
    def num_own(self) -> int:
        """Elements that this rank updates."""
        return sum(len(bucket.own_values) for bucket in self.buckets)

    @property
    def storages(self) -> list[Tensor]:
        """Tensors on the storages that programs read parameters from."""
        return [*(bucket.values for bucket in self.buckets), *self.frozen.values()]

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of parameters and gradients, now and at their peak."""
        frozen = sum(x.nbytes for x in self.frozen.values()) if self._owns_frozen else 0
        values = sum(b.value_bytes for b in self.buckets) + frozen
        gradients = sum(b.gradient_bytes for b in self.buckets)
        return {
            "now": {"parameters": values + self.gathered.now, "gradients": gradients + self.staged.now},
            "peak": {"parameters": values + self.gathered.peak, "gradients": gradients + self.staged.peak},
        }

    def parts(self, of: Tensor | None = None) -> dict[str, Tensor]:
        """By name, this rank's share of its trainable parameters, one-dimensional: the values themselves, or their places in a
        buffer of own elements."""
        return self._shares(lambda b, at: b.own_values if of is None else of[at : at + len(b.own_values)])

    def gradient_parts(self) -> dict[str, Tensor]:
        """The same of gradients, in FP32."""
        return {name: part.float() for name, part in self._shares(lambda bucket, _: bucket.own_gradients).items()}

    def _shares(self, of: Callable[[FlatBucket, int], Tensor]) -> dict[str, Tensor]:
        found = {}
        at = 0
        for bucket in self.buckets:
            own, (low, high) = of(bucket, at), bucket.shard
            for span in bucket.spec.spans:
                start = max(low, span.start - bucket.spec.start)
                stop = max(start, min(high, span.stop - bucket.spec.start))
                found[span.parameter.name] = own.detach()[bucket.within_own(start, stop)]
            at += len(own)
        return found

    def chunks(self, group_of: Callable[[str], int]) -> list[Chunk]:
        """What the optimizer updates, in runs of parameters of one group."""
        found = []
        at = 0
        for bucket in self.buckets:
            for key in sorted({group_of(name) for name in bucket.leaves}):
                for start, stop in bucket.runs(lambda p, key=key: group_of(p.name) == key, *bucket.own):  # type: ignore[misc]
                    part = bucket.within_own(start, stop)
                    found.append(Chunk(key, bucket.own_values[part], bucket.own_gradients[part], at + part.start))
            at += len(bucket.own_values)
        return found

    def used_by(self, programs: Iterable[Iterable[str]]) -> None:
        """The parameters of each of the rank's programs: how often a micro-batch's backwards come to each."""
        self._num_uses = Counter(name for names in programs for name in names)

    def begin(self, num_micro_batches: int, overlap: bool = True, sums: list[TimedSum] | None = None) -> None:
        """A step begins. Without `overlap` (gradients that are put off) all sums wait for its end. Into `sums` go their times."""
        self._num_micro_batches, self._overlap, self._sums = num_micro_batches, overlap, sums
        self._reducing = None
        for bucket in self.buckets:
            bucket.begin(num_micro_batches, self.staged)

    def before_backward(self, stage: int) -> None:
        """A backward of a stage begins."""
        for bucket in self.buckets:
            if bucket.zero == 3:
                bucket.num_fired, bucket.is_done = 0, False
        self.residency.before_backward(stage)

    def after_backward(self) -> None:
        """A backward has ended: what was not freed in it is."""
        for bucket in self.buckets:
            if bucket.zero == 3:
                if self._overlap and not bucket.is_done and bucket.has_gradients:
                    self._start_reduce(bucket)
                bucket.release()

    def finish(self, tied: Tied) -> None:
        """The last backward has ended: completes the gradients that this rank owns, so that it may be updated."""
        self.start_finish(tied)()

    def start_finish(self, tied: Tied) -> Callable[[], None]:
        """The same; what is returned waits for the sums of tied parameters, which other stages may be late for."""
        self.residency.settle()
        for bucket in self.buckets:
            if bucket.spec.num_shards > 1 and (bucket.has_gradients if bucket.zero == 3 else not bucket.is_done):
                self._start_reduce(bucket)
        self._wait_reduced()
        self._sum_over(self._axes["cp"], [bucket.own_gradients for bucket in self.buckets])
        for name in LAYOUT_AXES:
            self._sum_over(self._axes[name], self._own_runs(lambda p, name=name: p.layout.on(name).kind == "R"))  # type: ignore[misc]
        works = [
            dist.all_reduce(b.own_gradients, group=group, async_op=True)
            for stages, group in sorted(tied.items(), key=lambda item: item[0])
            for b in self.buckets
            if b.spec.stages == stages
        ]

        def wait() -> None:
            for work in works:
                if work is not None:
                    work.wait()

        return wait

    def square_sum(self, counted: Collection[str]) -> Tensor:
        """FP64 scalar: squares of the gradients of this rank's share of the parameters named."""
        total = torch.zeros((), dtype=torch.float64, device=self.buckets[0].own_gradients.device if self.buckets else None)
        for bucket in self.buckets:
            for run in bucket.runs(lambda p: p.name in counted, *bucket.shard):
                total += _square_sum(bucket.own_gradients[bucket.within_own(*run)])
        return total

    def scale_gradients(self, factor: float) -> None:
        """Multiplies what this rank owns."""
        for bucket in self.buckets:
            bucket.own_gradients.mul_(factor)

    def spread(self, of: Tensor | None = None) -> None:
        """This rank's shares were written: fetches what the other replicas were given of the values, or of a buffer of own
        elements."""
        at = 0
        for bucket in self.buckets:
            kept = bucket.own_values if of is None else of[at : at + len(bucket.own_values)]
            if bucket.zero == 0:
                bucket.axis.start_gather_into(kept, kept[slice(*bucket.shard)]).wait()
            at += len(bucket.own_values)
        if of is None:
            self.updated()
            self.residency.settle()

    def take_values(self, other: FlatParameters) -> None:
        """The values of another version of the same parameters."""
        for bucket, theirs in zip(self.buckets, other.buckets, strict=True):
            bucket.own_values.copy_(theirs.own_values)
            bucket.publish()

    def updated(self) -> None:
        """What this rank owns was updated."""
        for bucket in self.buckets:
            bucket.publish()
        self.residency.refresh(self.buckets)

    def _on_fired(self, bucket: FlatBucket) -> None:
        if bucket.is_done:
            raise RuntimeError(f"a gradient of {', '.join(bucket.leaves)} came after their sum over {bucket.axis.name}")
        bucket.num_fired += 1
        if bucket.zero == 3:
            expected = len(bucket.leaves)
        else:
            expected = self._num_micro_batches * sum(self._num_uses.get(name, 1) for name in bucket.leaves)
        if bucket.num_fired == expected:
            bucket.release()
            if self._overlap:
                self._start_reduce(bucket)

    def _start_reduce(self, bucket: FlatBucket) -> None:
        """One at a time: each needs room for what comes."""
        self._wait_reduced()
        bucket.is_done = True
        start_s, wait = time.perf_counter(), bucket.start_reduce(self.staged)

        def finish() -> None:
            wait()
            if self._sums is not None:
                size = bucket.spec.size * bucket.own_gradients.element_size()
                self._sums.append(TimedSum(bucket.spec.spans[0].parameter.name, size, start_s, time.perf_counter()))

        self._reducing = finish

    def _wait_reduced(self) -> None:
        if self._reducing is not None:
            self._reducing()
            self._reducing = None

    def _own_runs(self, belongs: Callable[[Parameter], bool]) -> list[Tensor]:
        return [b.own_gradients[b.within_own(*run)] for b in self.buckets for run in b.runs(belongs, *b.own)]

    def _sum_over(self, axis: Axis, parts: list[Tensor]) -> None:
        """In blocks, two at a time: a sum may need a buffer of its size."""
        pending: deque[Pending] = deque()
        for part in (p for whole in parts for p in whole.split(BLOCK)) if axis.size > 1 else ():
            if len(pending) == 2:
                pending.popleft().wait()
            pending.append(axis.start_all_reduce(part, in_place=True))
        for last in pending:
            last.wait()


def _square_sum(x: Tensor) -> Tensor:
    """Sum of squares: FP32 within rows, FP64 between them, in one pass over x."""
    whole = x.numel() - x.numel() % ROW
    norms = torch.linalg.vector_norm(x[:whole].view(-1, ROW), dim=1, dtype=torch.float32)
    total: Tensor = norms.double().square().sum() + torch.linalg.vector_norm(x[whole:], dtype=torch.float32).double().square()
    return total


def clip_scale(clip: float | None, norm: float) -> float:
    """What torch.nn.utils.clip_grad_norm_ multiplies gradients by."""
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
