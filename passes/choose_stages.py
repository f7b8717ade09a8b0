"""Choose pipeline stages: consecutive segments to stages, least modelled step time, within memory. Numbers in, numbers out.

memory    of one rank: parameters, gradients and optimizer state (passes.step_end says how ZeRO shards them over dp), and what the
          schedule keeps of micro-batches on that stage at its fullest (passes.stage_memory; 1F1B: activations of p - s; GPipe: of all),
          and room for messages.
          A parameter that several segments of a stage read counts once there, one that several stages read (tied) on each.
          PipeDream-2BW has a second copy of parameters and gradients
chunks    with v model chunks per rank there are p v stages, and each may have 1/v of the memory limit: the chunks of a rank
          are then sure to fit together. What is told of them is what they have at the rank's fullest moments
pinned    the user's own stages: kept, or refused when memory does not allow them
time      passes.solver chooses by a closed form, passes.refine_stages from there by the simulated step (passes.simulate)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.compiler.costs import point_to_point_s
from meshwright.compiler.hardware import Link
from meshwright.passes.message_memory import Boundary, Messages
from meshwright.passes.refine_stages import refine
from meshwright.passes.simulate import Timeline, Times, compute_order, steady, timed
from meshwright.passes.solver import Chain, Cuts, Infeasible, Item, solve_partition
from meshwright.passes.solver_recompute import solve_stage
from meshwright.passes.stage_memory import Moment, Needs, Option, Row, moments, needs_of, rank_rows, stage_row
from meshwright.passes.step_end import FP32_BYTES, Holding, step_end_s
from meshwright.plans.document import Memory
from meshwright.plans.errors import InputError, OverLimitError
from meshwright.plans.mesh import Mesh
from meshwright.plans.units import format_bytes
from meshwright.runtime.actions import Schedule, stage_ranks
from meshwright.runtime.orders import ASYNCHRONOUS

NO_BOUNDARY = Boundary(0, 0)
CONSTANTS = "(constants)"
"""What a stage keeps once, beside its parameters, by this name."""


@dataclass(frozen=True)
class SegmentCost:
    """One segment on one rank, per micro-batch.

    parameter_bytes    bytes of the local fp32 shard of every parameter that the segment reads, by path
    activation_bytes   what autograd keeps until the backward
    shared_bytes       what it keeps that other segments of a stage may keep too, by name
    transient_bytes    the most that is there for the moment while it runs, forward or backward
    boundary_bytes     what crosses to the next stage when the pipeline is cut behind this segment
    answer_bytes       gradients that come back for it; None: as much
    weight_s           the part of backward_s that a schedule may put off: weight gradients of matrix products
    constant_bytes     of constants that a stage keeps whatever it holds
    options            what it may recompute, the first of them nothing; () where there is no choice
    """

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: Mapping[str, int]
    activation_bytes: int
    boundary_bytes: int
    weight_s: float = 0.0
    shared_bytes: Mapping[str, int] = field(default_factory=dict)
    transient_bytes: int = 0
    options: tuple[Option, ...] = ()
    constant_bytes: int = 0
    answer_bytes: int | None = None

    @property
    def boundary(self) -> Boundary:
        """What crosses behind it."""
        return Boundary(self.boundary_bytes, self.boundary_bytes if self.answer_bytes is None else self.answer_bytes)

    @property
    def ways(self) -> tuple[Option, ...]:
        """The options, or the one that there is."""
        return self.options or (Option(self.activation_bytes, self.shared_bytes, self.transient_bytes),)


@dataclass(frozen=True)
class StageCost:
    """A stage: its segments, seconds of one micro-batch, bytes of one rank. `weight_s` is part of `backward_s`; `parameter_bytes` are
    those of its parameters before ZeRO shards them, `needs` what one micro-batch keeps, `boundary` what it sends. `taken`: of the options
    of each segment, by number."""

    segments: tuple[str, ...]
    forward_s: float
    backward_s: float
    memory: Memory
    weight_s: float = 0.0
    parameter_bytes: int = 0
    needs: Needs = field(default_factory=lambda: Needs.plain(0))
    taken: tuple[int, ...] = ()
    boundary: Boundary = NO_BOUNDARY

    def with_row(self, row: Row) -> StageCost:
        """The same with other bytes of micro-batches."""
        return replace(self, memory=self.memory.model_copy(update={"activations": row.activations, "transient": row.transient}))


@dataclass(frozen=True)
class StageChoice:
    """All stages, and what a step takes with them. `order` has the compute of every rank.

    bubble      the idle share of all ranks' time
    in_flight   most (stage, micro-batch) pairs per rank that activations are kept for
    times       of the stages and of the transfers between them
    end_s       the part of step_s for sums over dp and the update
    """

    stages: tuple[StageCost, ...]
    step_s: float
    bubble: float
    in_flight: tuple[int, ...]
    order: Schedule
    times: Times
    end_s: float = 0.0


def choose_stages(
    segments: Sequence[SegmentCost],
    mesh: Mesh,
    *,
    schedule: str,
    micro_batches: int,
    memory_limit: int | None = None,
    pinned: Sequence[Sequence[str]] | None = None,
    link: Link | None = None,
    chunks: int = 1,
    order: Schedule | None = None,
    zero: int = 0,
    dp_link: Link | None = None,
    item_bytes: tuple[int, int] = (FP32_BYTES, FP32_BYTES),
) -> StageChoice:
    """The best stages. `link` joins neighbours along pp (None: transfers take no time); `pinned` are every stage's segments;
    `order` is the order of compute when no name has it.

    `dp_link` joins the ranks that sum gradients: with it a step's time has these sums and the update in it. `item_bytes`: of a parameter
    as programs read it, and of a gradient that is summed.

    InputError when there are fewer segments than stages, when the pins are no partition, or when no stages fit the limit.
    """
    order = compute_order(schedule, mesh.pp, micro_batches, chunks) if order is None else order
    ranks = stage_ranks(order)
    fullest = tuple(moments(a for a in order[rank] if a.stage == stage) for stage, rank in enumerate(ranks))
    if len(segments) < len(ranks):
        asked = f"pp={mesh.pp}" if chunks == 1 else f"pp={mesh.pp} with {chunks} chunks"
        raise InputError(
            f"mesh: {asked} asks for as many stages, the model has {len(segments)} segments "
            f"({', '.join(s.name for s in segments)}); use pp={len(segments) // chunks} or less"
        )
    transfers = tuple(point_to_point_s(s.boundary_bytes, link) if link else 0.0 for s in segments)
    ends = read_pins(segments, len(ranks), pinned) if pinned is not None else {}
    holding = Holding(2 if schedule == ASYNCHRONOUS else 1, zero, mesh.dp, micro_batches, *item_bytes)
    limit = None if memory_limit is None else memory_limit // chunks
    settled = None if schedule != ASYNCHRONOUS else (mesh.pp, micro_batches)
    messages = Messages(order)
    reserved = (0,) * len(ranks) if limit is None else message_room(segments, messages)
    costs: dict[tuple[int, int, tuple[Moment, ...], int], StageCost] = {}

    def stage(start: int, stop: int, at: tuple[Moment, ...], room: int) -> StageCost:
        if (start, stop, at, room) not in costs:
            costs[start, stop, at, room] = stage_cost(segments[start:stop], at, holding, None if limit is None else limit - room)
        return costs[start, stop, at, room]

    def choice(cuts: Cuts) -> StageChoice:
        spans = zip((0, *cuts[:-1]), cuts, fullest, reserved, strict=True)
        stages = tuple(stage(*span) for span in spans)
        found = priced(stages, order, stage_times(stages, [transfers[stop - 1] for stop in cuts[:-1]]), settled)
        found = replace(found, step_s=found.step_s * busy_share(found, link))
        if dp_link is None:
            return found
        end_s = step_end_s(holding, [(s.parameter_bytes, s.forward_s, s.backward_s) for s in stages], dp_link)
        return replace(found, step_s=found.step_s + end_s, end_s=end_s)

    found: list[StageChoice] = []
    over: list[tuple[Infeasible, Sequence[SegmentCost]]] = []
    for alike in all_alike(segments):
        items = tuple(item(segment, transfer, holding) for segment, transfer in zip(alike, transfers, strict=True))
        chain = Chain(items, fullest, micro_batches, limit, ends, reserved)
        try:
            cuts = refine(chain, solve_partition(chain), lambda cuts: choice(cuts).step_s, ranks)
        except Infeasible as error:
            over.append((error, alike))
        else:
            found.append(choice(cuts))
    if found:
        best = min(found, key=lambda choice: choice.step_s)
        return replace(best, stages=on_ranks(best.stages, messages))
    least, leanest = min(over, key=lambda failed: failed[0].least_bytes)
    limits = memory_limit or 0, least.least_bytes * chunks
    raise OverLimitError(does_not_fit(leanest, least, fullest, reserved, limits, pinned is not None, holding, len(over) > 1))


def message_room(segments: Sequence[SegmentCost], messages: Messages) -> tuple[int, ...]:
    """By stage, its share of the most that messages take on its rank, wherever stages are cut."""
    largest = max((max(s.boundary.forward_bytes, s.boundary.backward_bytes) for s in segments[:-1]), default=0)
    counts = [messages.most(rank) for rank in range(len(messages.order))]
    return tuple(-(-counts[rank] * largest // messages.ranks.count(rank)) for rank in messages.ranks)


def all_alike(segments: Sequence[SegmentCost]) -> Iterator[tuple[SegmentCost, ...]]:
    """The segments with every option taken by all that have it, as cuts are chosen under: where memory is short a cut may lie elsewhere."""
    for number in range(max(len(s.ways) for s in segments)):
        yield tuple(taking(s, s.ways[min(number, len(s.ways) - 1)]) for s in segments)


def taking(segment: SegmentCost, option: Option) -> SegmentCost:
    """A segment with an option."""
    return replace(
        segment,
        backward_s=segment.backward_s + option.seconds,
        activation_bytes=option.own_bytes,
        shared_bytes=option.shared,
        transient_bytes=option.transient_bytes,
        options=(replace(option, seconds=0.0),),
    )


def stage_times(stages: Sequence[StageCost], transfers: Sequence[float]) -> Times:
    """What a simulation needs."""
    return Times(
        tuple(s.forward_s for s in stages),
        tuple(s.backward_s - s.weight_s for s in stages),
        tuple(s.weight_s for s in stages),
        tuple(transfers),
    )


def priced(stages: tuple[StageCost, ...], order: Schedule, times: Times, settled: tuple[int, int] | None = None) -> StageChoice:
    """The time of a step of an order; of (ranks, micro-batches) without flushes when `settled`."""
    timeline: Timeline = timed(order, times) if settled is None else steady(*settled, times)
    return StageChoice(stages, timeline.step_s, timeline.bubble, timeline.in_flight, order, times)


def busy_share(found: StageChoice, link: Link | None) -> float:
    """What is left of a step where ranks share cores: those that wait lend theirs, so the work decides, or one rank with a whole core."""
    return 1.0 if link is None or link.ranks_per_core <= 1 else max(1 / link.ranks_per_core, 1 - found.bubble)


def item(segment: SegmentCost, transfer_s: float, holding: Holding) -> Item:
    """A segment as the solver sees it; both directions of a cut's transfers count."""
    shared = {path: holding.total(size) for path, size in segment.parameter_bytes.items()}
    shared[CONSTANTS] = segment.constant_bytes
    seconds = segment.forward_s + segment.backward_s
    return Item(seconds, 2 * transfer_s, segment.ways[0], shared)


def stage_cost(segments: Sequence[SegmentCost], at: Sequence[Moment], holding: Holding, limit_bytes: int | None = None) -> StageCost:
    """Sums over a stage's segments, every parameter once. Where these may recompute, what takes least time within the limit. `at`: the
    moments when its micro-batches may take most."""
    local = {path: size for s in segments for path, size in s.parameter_bytes.items()}
    parameters = sum(local.values())
    lasting = holding.memory(parameters, 0).model_copy(update={"buffers": max(s.constant_bytes for s in segments)})
    ways = [s.ways for s in segments]
    taken: tuple[int, ...] | None = (0,) * len(segments)
    if limit_bytes is not None and any(len(options) > 1 for options in ways):
        taken = solve_stage(ways, at, limit_bytes - lasting.total)
    assert taken is not None, "the cuts fit with one option for all"
    options = [way[number] for way, number in zip(ways, taken, strict=True)]
    needs = needs_of(options)
    cost = StageCost(
        tuple(s.name for s in segments),
        sum(s.forward_s for s in segments),
        sum(s.backward_s for s in segments) + sum(option.seconds for option in options),
        lasting,
        sum(s.weight_s for s in segments),
        parameters,
        needs,
        taken,
        segments[-1].boundary,
    )
    return cost.with_row(stage_row(needs, at))


def on_ranks(stages: Sequence[StageCost], messages: Messages) -> tuple[StageCost, ...]:
    """The stages with what they have of micro-batches and messages at the fullest moments of their ranks."""
    boundaries = [s.boundary for s in stages]
    rows: dict[int, Row] = {}
    for rank, actions in enumerate(messages.schedule):
        needs = {stage: stages[stage].needs for stage in sorted({a.stage for a in actions})}
        rows.update(rank_rows(actions, needs, messages.sizes(rank, boundaries)))
    return tuple(cost.with_row(rows[stage]) for stage, cost in enumerate(stages))


def read_pins(segments: Sequence[SegmentCost], num_stages: int, pinned: Sequence[Sequence[str]]) -> dict[int, int]:
    """End of every stage that the user gave. InputError at the first name that is out of place."""
    if len(pinned) != num_stages:
        raise InputError(
            f"plan.yaml: stages: found {len(pinned)} stages, expected pp * chunks = {num_stages}; "
            "leave stages out to have them chosen"
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
            f"plan.yaml: stages[{num_stages - 1}].layers: {segments[at].name} is in no stage; the last stage ends the model"
        )
    return ends


def reason(segments: Sequence[SegmentCost], name: str) -> str:
    """Why a name is out of place."""
    known = any(s.name == name for s in segments)
    return "stages hold consecutive segments in the model's order" if known else f"the model has no segment {name}"


def does_not_fit(
    segments: Sequence[SegmentCost], error: Infeasible, fullest: Sequence[tuple[Moment, ...]], reserved: Sequence[int],
    limits: tuple[int, int], pinned: bool, holding: Holding, recomputed: bool = False,
) -> str:
    """One line: the stage that needs most under the best cuts, what it needs, and what would fit. `limits`: what was allowed,
    and the least that will do. `recomputed`: with the recomputation that needs least."""
    limit, least = limits
    starts = (0, *error.cuts[:-1])
    costs = [stage_cost(segments[i:j], at, holding) for i, j, at in zip(starts, error.cuts, fullest, strict=True)]
    costs = [c.with_row(Row(c.memory.activations, c.memory.transient + room)) for c, room in zip(costs, reserved, strict=True)]
    stage, cost = max(enumerate(costs), key=lambda found: found[1].memory.total)
    memory, most = cost.memory, max(fullest[stage], key=lambda moment: moment.kept)
    held = (
        f"parameters {format_bytes(memory.parameters)}, gradients {format_bytes(memory.gradients)}, "
        f"optimizer {format_bytes(memory.optimizer)}, "
        f"activations {format_bytes(memory.activations)} with {most.kept + most.put_off + 1} micro-batches in flight, "
        f"{format_bytes(memory.transient)} for the moment"
    )
    least_kept = ", recomputing what it can" if recomputed else ""
    where = f"stages[{stage}] as given" if pinned else f"stage {stage} of the best {len(costs)} stages"
    cure = "leave stages out, allow" if pinned else "allow"
    return (
        f"memory_limit: {where} ({cost.segments[0]} to {cost.segments[-1]}) needs {format_bytes(memory.total)} "
        f"on a rank{least_kept}: {held}; the limit is {format_bytes(limit)}; {cure} {least} bytes, "
        "or use a larger pp or tp, a smaller micro_batch or a shorter seq"
    )
