"""Choose the pipeline schedule, and the stages with it: least simulated step time within memory. Numbers in, numbers out.

    a name        the stages that passes.choose_stages finds for it
    auto          the best of all named schedules that keep the model's results (PipeDream-2BW is stale, so it is never chosen)

Of schedules that take equally long the one whose fullest rank keeps least is taken, then the simplest (the order of runtime.orders).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.compiler.hardware import Link
from meshwright.passes.choose_stages import SegmentCost, StageChoice, choose_stages
from meshwright.passes.simulate import ASYNCHRONOUS, default_chunks
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.runtime.actions import StageRanks, stage_ranks
from meshwright.runtime.orders import SCHEDULES

DEFAULT = "1f1b"
AUTO = "auto"
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
        ranks = self.stage_ranks
        return max(
            sum(s.memory.total for s, at in zip(self.stages.stages, ranks, strict=True) if at == rank) for rank in set(ranks)
        )


def choose_schedule(segments: Sequence[SegmentCost], pipeline: Pipeline) -> ScheduleChoice:
    """The best schedule of those that are asked for. InputError when none can be had."""
    if pipeline.schedule != AUTO:
        return named(segments, pipeline, pipeline.schedule)
    if pipeline.mesh.pp == 1 and pipeline.chunks in (None, 1):
        return named(segments, pipeline, DEFAULT)
    return best_named(segments, pipeline)


def named(segments: Sequence[SegmentCost], pipeline: Pipeline, name: str) -> ScheduleChoice:
    """The best stages for a schedule by name."""
    chunks = pipeline.chunks or default_chunks(name)
    stages = choose_stages(
        segments,
        pipeline.mesh,
        schedule=name,
        micro_batches=pipeline.micro_batches,
        memory_limit=pipeline.memory_limit,
        pinned=pipeline.pinned,
        link=pipeline.link,
        chunks=chunks,
        zero=pipeline.zero,
        dp_link=pipeline.dp_link,
    )
    return ScheduleChoice(name, chunks, stages)


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
