"""Choose the pipeline schedule, and the stages with it: least simulated step time within memory. Numbers in, numbers out.

    a name        the stages that passes.choose_stages finds for it
    synthesised   the best named schedule's stages with an order of their own (passes.synthesise); with `actions`, that order
    auto          the best of all these that keep the model's results (PipeDream-2BW is stale, so it is never chosen)

Of schedules that take equally long the one whose fullest rank keeps least is taken, then the simplest (the order of runtime.orders).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.compiler.hardware import Link
from meshwright.passes.choose_stages import SegmentCost, StageChoice, StageCost, busy_share, choose_stages, on_ranks, priced
from meshwright.passes.message_memory import Messages
from meshwright.passes.order_problem import Problem
from meshwright.passes.simulate import default_chunks
from meshwright.passes.step_end import FP32_BYTES
from meshwright.passes.synthesise import synthesise
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.runtime.actions import Schedule, StageRanks, split_backwards, stage_ranks
from meshwright.runtime.orders import ASYNCHRONOUS, SCHEDULES
from meshwright.runtime.schedules import insert_transfers
from meshwright.runtime.soundness import check_schedule

DEFAULT = "1f1b"
AUTO = "auto"
SYNTHESISED = "synthesised"
MOST_ACTIONS = 1000
"""Forwards and backwards of a step up to which `auto` tries to synthesise."""
SAME = 1e-6
"""Relative difference of step times that does not count."""


@dataclass(frozen=True)
class Pipeline:
    """What is known before: the mesh, the batch and what the user fixed.

    chunks    model chunks per rank; None: the schedule's own number
    pinned    segments of every stage
    link      joins neighbours along pp; None: transfers take no time
    zero      ZeRO stage
    dp_link   joins the ranks that sum gradients; None: that takes no time
    actions   the order of a synthesised schedule that a plan has
    item_bytes    of a parameter as programs read it, and of a gradient that is summed over dp
    """

    mesh: Mesh
    micro_batches: int
    schedule: str = DEFAULT
    chunks: int | None = None
    memory_limit: int | None = None
    pinned: tuple[tuple[str, ...], ...] | None = None
    link: Link | None = None
    zero: int = 0
    dp_link: Link | None = None
    actions: Schedule | None = None
    item_bytes: tuple[int, int] = (FP32_BYTES, FP32_BYTES)


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule and its stages."""

    name: str
    chunks: int
    stages: StageChoice

    @property
    def stage_ranks(self) -> StageRanks:
        """The pp coordinate of every stage."""
        return stage_ranks(self.stages.order)

    @property
    def fullest_bytes(self) -> int:
        """What the rank that holds most holds."""
        return fullest_bytes(self.stages.stages, self.stage_ranks)


def fullest_bytes(stages: Sequence[StageCost], ranks: StageRanks) -> int:
    """What the rank that holds most holds."""
    return max(sum(s.memory.total for s, at in zip(stages, ranks, strict=True) if at == rank) for rank in set(ranks))


def may_put_off(schedule: str) -> bool:
    """Whether weight gradients may wait for a W under what a schedule's name stands for."""
    if schedule not in SCHEDULES:
        return True
    named = SCHEDULES[schedule]
    return any(split_backwards(actions) for actions in named.order(2, named.chunks, 2))


def choose_schedule(segments: Sequence[SegmentCost], pipeline: Pipeline) -> ScheduleChoice:
    """The best schedule of those that are asked for. InputError when none can be had."""
    if pipeline.actions is not None:
        return given(segments, pipeline, pipeline.actions)
    if pipeline.schedule not in (AUTO, SYNTHESISED):
        return named(segments, pipeline, pipeline.schedule)
    if pipeline.mesh.pp == 1 and pipeline.chunks in (None, 1):
        return named(segments, pipeline, DEFAULT)
    best = best_named(segments, pipeline)
    if pipeline.schedule == AUTO and 2 * pipeline.micro_batches * len(best.stage_ranks) > MOST_ACTIONS:
        return best
    own = synthesised(pipeline, best)
    return own if pipeline.schedule == SYNTHESISED or own.stages.step_s < best.stages.step_s * (1 - SAME) else best


def given(segments: Sequence[SegmentCost], pipeline: Pipeline, actions: Schedule) -> ScheduleChoice:
    """The order of a plan. InputError when it is not of this mesh, batch or schedule, UnsoundError when it cannot run."""
    if pipeline.schedule != SYNTHESISED:
        raise InputError(f"actions: are those of schedule {SYNTHESISED}, found {pipeline.schedule}; leave actions out")
    micro_batches = 1 + max((a.micro_batch for row in actions for a in row), default=-1)
    try:
        chunks, left = divmod(len(stage_ranks(actions)), len(actions))
    except ValueError as error:
        raise InputError(f"actions: {error}") from None
    if (len(actions), micro_batches, left) != (pipeline.mesh.pp, pipeline.micro_batches, 0) or pipeline.chunks not in (None, chunks):
        raise InputError(
            f"actions: are for pp={len(actions)} and {micro_batches} micro-batches, "
            f"expected pp={pipeline.mesh.pp} and {pipeline.micro_batches}; leave actions out to have them synthesised"
        )
    check_schedule(insert_transfers(actions))
    return ScheduleChoice(SYNTHESISED, chunks, stages_for(segments, pipeline, DEFAULT, chunks, actions))


def synthesised(pipeline: Pipeline, best: ScheduleChoice) -> ScheduleChoice:
    """An order for the stages of the best named schedule, which it starts from: that one, where with messages no other fits."""
    stages, ranks = best.stages.stages, best.stage_ranks
    needs = tuple(s.needs for s in stages)
    room = None
    if pipeline.memory_limit is not None:
        lasting = [s.memory.total - s.memory.activations - s.memory.transient for s in stages]
        taken = [sum(size for size, at in zip(lasting, ranks, strict=True) if at == rank) for rank in range(pipeline.mesh.pp)]
        room = tuple(pipeline.memory_limit - size for size in taken)
    order = synthesise(Problem(best.stages.order, best.stages.times, needs, room))
    held = on_ranks(stages, Messages(order))
    if pipeline.memory_limit is not None and fullest_bytes(held, ranks) > pipeline.memory_limit:
        order, held = best.stages.order, stages
    found = priced(held, order, best.stages.times)
    end_s = best.stages.end_s
    step_s = found.step_s * busy_share(found, pipeline.link) + end_s
    return ScheduleChoice(SYNTHESISED, best.chunks, replace(found, step_s=step_s, end_s=end_s))


def named(segments: Sequence[SegmentCost], pipeline: Pipeline, name: str) -> ScheduleChoice:
    """The best stages for a schedule by name."""
    chunks = pipeline.chunks or default_chunks(name)
    return ScheduleChoice(name, chunks, stages_for(segments, pipeline, name, chunks))


def stages_for(
    segments: Sequence[SegmentCost], pipeline: Pipeline, name: str, chunks: int, order: Schedule | None = None
) -> StageChoice:
    """The best stages for a schedule by name, or an order."""
    return choose_stages(
        segments,
        pipeline.mesh,
        schedule=name,
        micro_batches=pipeline.micro_batches,
        memory_limit=pipeline.memory_limit,
        pinned=pipeline.pinned,
        link=pipeline.link,
        chunks=chunks,
        order=order,
        zero=pipeline.zero,
        dp_link=pipeline.dp_link,
        item_bytes=pipeline.item_bytes,
    )


def best_named(segments: Sequence[SegmentCost], pipeline: Pipeline) -> ScheduleChoice:
    """The best of the named schedules. The InputError of the default one when none can be had."""
    found = list(possible(segments, pipeline))
    if not found:
        return named(segments, pipeline, DEFAULT)
    shortest = min(choice.stages.step_s for choice in found)
    equal = [choice for choice in found if choice.stages.step_s <= shortest * (1 + SAME)]
    return min(equal, key=lambda choice: choice.fullest_bytes)


def possible(segments: Sequence[SegmentCost], pipeline: Pipeline) -> Iterator[ScheduleChoice]:
    """Every named schedule that this model, mesh and memory allow."""
    for name in SCHEDULES:
        if name == ASYNCHRONOUS:
            continue
        try:
            yield named(segments, pipeline, name)
        except InputError:
            continue
