"""The bytes that a rank will keep of parameters, gradients and optimizer state: exactly those that the engine measures at their peak.

The runtime's own buckets are laid out (runtime.buckets), with their padding, for each stage. To what is kept come the buckets that are
whole for a time, N being ranks of dp:

    ZeRO 3   parameters   while segment i runs, its buckets and the next one's; in the backward, i's, the one's before, and those
                          of a tied parameter from its last segment to its first
             gradients    of the same segments in the backward; and one bucket whose sum is under way, be it of the micro-batch before
    ZeRO 2   gradients    with one micro-batch as with 3, with buckets of many segments; with several, all of them and no shards

Two versions of the weights (pipedream-2bw) have parameters and gradients of their own. A frozen parameter is whole, once, without gradient
and state. A sum over dp that shards gradients needs room for its result while it is under way: the largest shard (ZeRO 0 sums in place).
Where weight gradients are put off, on ranks with W, all sums wait for the end of the step. Where a rank has several stages each is counted
as if it were alone, but for a tied parameter of two of them: it is counted in the first (under ZeRO 3, which gathers it for each, in both).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from meshwright.passes.step_end import OPTIMIZER_PER_PARAMETER, gradient_bytes
from meshwright.plans.document import Memory, PlanDocument
from meshwright.plans.precision import ITEM_BYTES
from meshwright.plans.signature import Signature
from meshwright.runtime.actions import split_backwards
from meshwright.runtime.buckets import ELEMENT_BYTES, Arrangement, Bucket
from meshwright.runtime.endless import VERSIONS
from meshwright.runtime.orders import ASYNCHRONOUS
from meshwright.runtime.placement import Parameter, Placement
from meshwright.runtime.schedules import plan_order

Reads = Mapping[str, Sequence[str]]
"""By segment, the parameters that it reads."""


@dataclass(frozen=True)
class StageState:
    """Elements of a stage on a rank: `frozen` ones, and buckets with the segments that use them (their places in the stage)."""

    frozen: int
    buckets: tuple[Bucket, ...]
    used_in: tuple[tuple[int, ...], ...]
    num_segments: int

    @property
    def whole(self) -> int:
        """Of all buckets."""
        return sum(b.size for b in self.buckets)

    @property
    def own(self) -> int:
        """Of a shard of each."""
        return sum(b.shard_size for b in self.buckets)

    def gathered_at_once(self) -> int:
        """Most elements of sharded buckets that are whole in a forward or a backward."""
        forward = [self._in(i) | self._in(i + 1) for i in range(self.num_segments)]
        backward = [self._around(i) | self._in(i - 1) for i in range(self.num_segments)]
        return max((self._size(places) for places in (*forward, *backward)), default=0)

    def accumulated_at_once(self, several: bool) -> int:
        """Most elements of gradients that are whole in a backward: those of segments under way, and of a sum. With `several`
        backwards in a step the last sum of one is under way when the next begins."""
        most = 0
        for i in range(self.num_segments):
            before = i + 1 if i + 1 < self.num_segments else 0
            summed = sorted(place for place in self._in(before) if self.used_in[place][0] == before)[:1]
            if before or several:
                most = max(most, self._size(self._around(i)) + self._size(set(summed)))
        return max(most, self._size(self._around(self.num_segments - 1)))

    def _in(self, segment: int) -> set[int]:
        """Sharded buckets that a segment uses, by their places."""
        return {place for place in self._sharded if segment in self.used_in[place]}

    def _around(self, segment: int) -> set[int]:
        """Those that are used in it, or both before and after."""
        return {place for place in self._sharded if self.used_in[place][0] <= segment <= self.used_in[place][-1]}

    @property
    def _sharded(self) -> list[int]:
        return [place for place, bucket in enumerate(self.buckets) if bucket.num_shards > 1]

    def _size(self, places: set[int]) -> int:
        return sum(self.buckets[place].size for place in places)


def with_state_memory(document: PlanDocument, signature: Signature, reads: Reads) -> PlanDocument:
    """The plan with the exact bytes of parameters, gradients and optimizer state in its stages."""
    held = parameters(document, signature, reads)
    stages = []
    for stage, told in enumerate(document.stages):
        memory = state_memory(stage_state(document, held, reads, stage), document, told.memory, puts_off(document, stage))
        stages.append(told.model_copy(update={"memory": memory}))
    return document.model_copy(update={"stages": tuple(stages)})


def parameters(document: PlanDocument, signature: Signature, reads: Reads) -> dict[str, Parameter]:
    """Where every parameter lies."""
    coordinates: dict[str, set[int]] = {name: set() for name in signature.parameters}
    for names, coordinate in zip(document.stage_segments, document.ranks_of_stages, strict=True):
        for name in (n for segment in names for n in reads[segment]):
            coordinates[name].add(coordinate)
    return {
        name: Parameter(name, spec.shape, document.parameter_layouts[name], tuple(sorted(coordinates[name])), spec.trainable)
        for name, spec in signature.parameters.items()
    }


def stage_state(document: PlanDocument, held: Mapping[str, Parameter], reads: Reads, stage: int) -> StageState:
    """What a rank with a stage keeps of it."""
    segments = document.stage_segments[stage]
    read = {name for segment in segments for name in reads[segment]}
    if document.zero < 3:
        same_rank = (s for s in range(stage) if document.ranks_of_stages[s] == document.ranks_of_stages[stage])
        read -= {name for other in same_rank for segment in document.stage_segments[other] for name in reads[segment]}
    rank = document.mesh.rank(pp=document.ranks_of_stages[stage])
    placement = Placement(document.mesh, rank, {name: p for name, p in held.items() if name in read})
    layers = frozenset(name for names in document.stage_segments for name in names)
    buckets = Arrangement(placement, layers, document.zero).own
    frozen = sum(prod(placement.local_shape(p)) for p in placement.held if not p.trainable)
    members = [{span.parameter.name for span in bucket.spans} for bucket in buckets]
    used = tuple(tuple(i for i, segment in enumerate(segments) if not m.isdisjoint(reads[segment])) for m in members)
    return StageState(frozen, buckets, used, len(segments))


def puts_off(document: PlanDocument, stage: int) -> bool:
    """Whether weight gradients wait for a W on the ranks of a stage."""
    return bool(split_backwards(plan_order(document, document.num_micro_batches)[document.ranks_of_stages[stage]]))


def state_memory(state: StageState, document: PlanDocument, told: Memory, late: bool) -> Memory:
    """In bytes; `told` has the rest. `late`: weight gradients wait for a W."""
    zero, whole, own = document.zero, state.whole, state.own
    versions = VERSIONS if document.schedule == ASYNCHRONOUS else 1
    open_ = whole - sum(b.size for b in state.buckets if b.num_shards == 1)
    accumulated = open_ if late else state.accumulated_at_once(document.num_micro_batches > 1)
    adds_up_whole = zero < 2 or (zero == 2 and document.num_micro_batches > 1)
    summed = max((b.shard_size for b in state.buckets if zero and b.num_shards > 1), default=0)
    value_bytes, sum_bytes = ITEM_BYTES[document.precision], ITEM_BYTES[document.reduce_dtype]
    values = state.gathered_at_once() if zero == 3 else whole
    masters = ELEMENT_BYTES * (own if zero else whole) if zero == 3 or value_bytes < ELEMENT_BYTES else 0
    kept_bytes = gradient_bytes(value_bytes, sum_bytes)
    rounded = max((b.size for b in state.buckets if b.num_shards > 1), default=0) if sum_bytes < kept_bytes else 0
    lasting = Memory(
        parameters=value_bytes * (state.frozen + versions * values) + versions * masters,
        gradients=kept_bytes * (versions * whole if adds_up_whole else own + accumulated),
        optimizer=ELEMENT_BYTES * OPTIMIZER_PER_PARAMETER * (own if zero else whole),
        activations=told.activations,
        communication=sum_bytes * (summed + rounded),
    )
    return told.model_copy(update=lasting.model_dump(include={"parameters", "gradients", "optimizer", "communication"}))
