"""Choose pipeline stages: consecutive segments to stages, least modelled step time, within memory. Numbers in, numbers out.

memory    of one rank: fp32 parameters and gradients (4 bytes each), AdamW's two moments (8 bytes) per local parameter, and
          the activations of as many micro-batches as the schedule keeps in flight on that stage (1F1B: p - s; GPipe: all).
          A parameter that several segments of a stage read counts once there, one that several stages read (tied) on each
pinned    the user's own stages: kept, or refused when memory does not allow them
time      passes.solver chooses; passes.simulate says what a step takes with the stages chosen
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.compiler.costs import point_to_point_s
from meshwright.compiler.hardware import Link
from meshwright.passes.simulate import compute_order, in_flight, simulate
from meshwright.passes.solver import Chain, Cuts, Infeasible, Item, solve_partition
from meshwright.plans.document import Memory
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.plans.units import format_bytes

OPTIMIZER_PER_PARAMETER = 2
"""Bytes of optimizer state per byte of an fp32 parameter: two moments."""


@dataclass(frozen=True)
class SegmentCost:
    """One segment on one rank, per micro-batch.

    parameter_bytes    bytes of the local fp32 shard of every parameter that the segment reads, by path
    activation_bytes   what autograd keeps until the backward
    boundary_bytes     what crosses to the next stage when the pipeline is cut behind this segment
    """

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: Mapping[str, int]
    activation_bytes: int
    boundary_bytes: int


@dataclass(frozen=True)
class StageCost:
    """A stage: its segments, seconds of one micro-batch, bytes of one rank."""

    segments: tuple[str, ...]
    forward_s: float
    backward_s: float
    memory: Memory


@dataclass(frozen=True)
class StageChoice:
    """All stages, and what a step takes with them. `bubble` is the idle share of all ranks' time."""

    stages: tuple[StageCost, ...]
    step_s: float
    bubble: float
    in_flight: tuple[int, ...]


def choose_stages(
    segments: Sequence[SegmentCost],
    mesh: Mesh,
    *,
    schedule: str,
    micro_batches: int,
    memory_limit: int | None = None,
    pinned: Sequence[Sequence[str]] | None = None,
    link: Link | None = None,
) -> StageChoice:
    """The best stages. `link` joins neighbours along pp (None: transfers take no time); `pinned` are every stage's segments.

    InputError when there are fewer segments than stages, when the pins are no partition, or when no stages fit the limit.
    """
    kept = in_flight(compute_order(schedule, mesh.pp, micro_batches))
    if len(segments) < mesh.pp:
        raise InputError(
            f"mesh: pp={mesh.pp} asks for as many stages, the model has {len(segments)} segments "
            f"({', '.join(s.name for s in segments)}); use pp={len(segments)} or less"
        )
    transfers = tuple(point_to_point_s(s.boundary_bytes, link) if link else 0.0 for s in segments)
    ends = read_pins(segments, mesh, pinned) if pinned is not None else {}
    items = tuple(item(segment, transfer) for segment, transfer in zip(segments, transfers, strict=True))
    try:
        cuts = solve_partition(Chain(items, kept, micro_batches, memory_limit, ends))
    except Infeasible as error:
        raise InputError(does_not_fit(segments, error, kept, memory_limit or 0, pinned is not None)) from None
    return priced(segments, cuts, kept, transfers, schedule, micro_batches)


def item(segment: SegmentCost, transfer_s: float) -> Item:
    """A segment as the solver sees it; both directions of a cut's transfers count."""
    shared = {path: parameter_memory(size) for path, size in segment.parameter_bytes.items()}
    return Item(segment.forward_s + segment.backward_s, 2 * transfer_s, segment.activation_bytes, shared)


def parameter_memory(size_bytes: int) -> int:
    """Bytes of a parameter with its gradient and optimizer state."""
    return (2 + OPTIMIZER_PER_PARAMETER) * size_bytes


def priced(
    segments: Sequence[SegmentCost],
    cuts: Cuts,
    kept: Sequence[int],
    transfers: Sequence[float],
    schedule: str,
    micro_batches: int,
) -> StageChoice:
    """The stages of given cuts, and the time of a step."""
    stages = tuple(
        stage_cost(segments[start:stop], count) for start, stop, count in zip((0, *cuts[:-1]), cuts, kept, strict=True)
    )
    timeline = simulate(
        schedule,
        stages=len(stages),
        micro_batches=micro_batches,
        forward_s=[s.forward_s for s in stages],
        backward_input_s=[s.backward_s for s in stages],
        transfer_s=[transfers[stop - 1] for stop in cuts[:-1]],
    )
    return StageChoice(stages, timeline.step_s, timeline.bubble, timeline.in_flight)


def stage_cost(segments: Sequence[SegmentCost], in_flight: int) -> StageCost:
    """Sums over a stage's segments, every parameter once."""
    local = {path: size for s in segments for path, size in s.parameter_bytes.items()}
    parameters = sum(local.values())
    activations = in_flight * sum(s.activation_bytes for s in segments)
    return StageCost(
        tuple(s.name for s in segments),
        sum(s.forward_s for s in segments),
        sum(s.backward_s for s in segments),
        Memory(
            parameters=parameters,
            gradients=parameters,
            optimizer=OPTIMIZER_PER_PARAMETER * parameters,
            activations=activations,
        ),
    )


def read_pins(segments: Sequence[SegmentCost], mesh: Mesh, pinned: Sequence[Sequence[str]]) -> dict[int, int]:
    """End of every stage that the user gave. InputError at the first name that is out of place."""
    if len(pinned) != mesh.pp:
        raise InputError(
            f"plan.yaml: stages: found {len(pinned)} stages, expected pp={mesh.pp}; leave stages out to have them chosen"
        )
    at = 0
    ends = {}
    order = {segment.name: place for place, segment in enumerate(segments)}
    for stage, names in enumerate(pinned):
        if not names:
            raise InputError(f"plan.yaml: stages[{stage}].layers: found no segment, expected one or more")
        for name in sorted(names, key=lambda n: order.get(n, -1)):
            expected = segments[at].name if at < len(segments) else "the end"
            if name != expected:
                raise InputError(
                    f"plan.yaml: stages[{stage}].layers: found {name}, expected {expected}; {reason(segments, name)}"
                )
            at += 1
        ends[stage] = at
    if at < len(segments):
        raise InputError(
            f"plan.yaml: stages[{mesh.pp - 1}].layers: {segments[at].name} is in no stage; the last stage ends the model"
        )
    return ends


def reason(segments: Sequence[SegmentCost], name: str) -> str:
    """Why a name is out of place."""
    known = any(s.name == name for s in segments)
    return "stages hold consecutive segments in the model's order" if known else f"the model has no segment {name}"


def does_not_fit(segments: Sequence[SegmentCost], error: Infeasible, kept: Sequence[int], limit: int, pinned: bool) -> str:
    """One line: the stage that needs most under the best cuts, what it needs, and what would fit."""
    starts = (0, *error.cuts[:-1])
    costs = [stage_cost(segments[i:j], count) for i, j, count in zip(starts, error.cuts, kept, strict=True)]
    stage, cost = max(enumerate(costs), key=lambda found: found[1].memory.total)
    memory = cost.memory
    held = (
        f"parameters {format_bytes(memory.parameters)}, gradients {format_bytes(memory.gradients)}, "
        f"optimizer {format_bytes(memory.optimizer)}, "
        f"activations {format_bytes(memory.activations)} with {kept[stage]} micro-batches in flight"
    )
    where = f"stages[{stage}] as given" if pinned else f"stage {stage} of the best {len(costs)} stages"
    cure = "leave stages out, allow" if pinned else "allow"
    return (
        f"memory_limit: {where} ({cost.segments[0]} to {cost.segments[-1]}) needs {format_bytes(memory.total)} "
        f"on a rank: {held}; the limit is {format_bytes(limit)}; {cure} {error.least_bytes} bytes, "
        "or use a larger pp or tp, a smaller micro_batch or a shorter seq"
    )
