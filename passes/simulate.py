"""A pipeline schedule in time: when every rank works and waits, with stages of any length. Public as `mw.simulate`.

A rank runs its actions in order. A forward of stage s starts when the rank is free and the forward of stage s-1 has ended
and been sent; a backward likewise after that of stage s+1. Sends between ranks take `transfer_s` and keep no rank busy. In a
schedule with weight gradients of their own (W), a backward takes its input gradient's time, else that of both.

    step_s      from the first action's start to the last one's end
    bubble      idle share of all ranks' time: (p-1)/(m+p-1) for p equal ranks and m micro-batches under GPipe and 1F1B;
                runtime.orders has the table for all schedules
    idle_s      per rank, over the whole step
    in_flight   most (stage, micro-batch) pairs per rank whose forward has run and whose backward or weight gradient has not: what
                activations are kept for. With v chunks per rank each is 1/v of a rank's share of the model
    timeline    per rank, every action with its start and end

PipeDream-2BW has no flush between steps: its times are those of one more step in a long run, in which nobody waits for the sums of
gradients over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.plans.errors import InputError
from meshwright.runtime.actions import Action, Actions, Kind, Schedule, StageRanks, split_backwards, stage_ranks
from meshwright.runtime.endless import order as endless_order
from meshwright.runtime.orders import ASYNCHRONOUS, SCHEDULES
from meshwright.runtime.schedules import named_order, reads_from

STEADY_STEPS = 3
"""Steps after which an asynchronous pipeline has settled."""


@dataclass(frozen=True)
class Span:
    """An action in time."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What a schedule takes; `idle_s`, `in_flight` and `timeline` are per rank."""

    step_s: float
    bubble: float
    idle_s: tuple[float, ...]
    in_flight: tuple[int, ...]
    timeline: tuple[tuple[Span, ...], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Times:
    """Seconds per micro-batch of every stage; `transfer_s` of every boundary between stages."""

    forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    transfer_s: tuple[float, ...]

    @cached_property
    def backward_s(self) -> tuple[float, ...]:
        """Both gradients."""
        return tuple(a + b for a, b in zip(self.backward_input_s, self.backward_weight_s, strict=True))

    def seconds(self, action: Action, split: bool) -> float:
        """How long an action keeps its rank busy; `split`: its weight gradients are a W."""
        match action.kind:
            case Kind.F:
                return self.forward_s[action.stage]
            case Kind.W:
                return self.backward_weight_s[action.stage]
            case _:
                return (self.backward_input_s if split else self.backward_s)[action.stage]


def simulate(
    schedule: str,
    *,
    stages: int,
    micro_batches: int,
    forward_s: float | Sequence[float],
    backward_input_s: float | Sequence[float],
    backward_weight_s: float | Sequence[float] = 0.0,
    transfer_s: float | Sequence[float] = 0.0,
    chunks: int | None = None,
) -> Timeline:
    """Times of a schedule by name.

    stages         pipeline ranks; `chunks` model chunks on each, so that the model is cut into stages * chunks (default: 2 for
                   interleaved and zb-v, else 1)
    *_s            seconds per micro-batch: one number for all ranks or one per rank, divided evenly among its chunks, or one per
                   chunk in the model's order
    transfer_s     one number, or one per boundary between chunks

    InputError when a number of stages or chunks, or a name, is wrong.
    """
    chunks = default_chunks(schedule) if chunks is None else chunks
    order = compute_order(schedule, stages, micro_batches, chunks)
    ranks = stage_ranks(order)
    times = Times(
        per_chunk("forward_s", forward_s, ranks, stages),
        per_chunk("backward_input_s", backward_input_s, ranks, stages),
        per_chunk("backward_weight_s", backward_weight_s, ranks, stages),
        per_stage("transfer_s", transfer_s, len(ranks) - 1),
    )
    if schedule == ASYNCHRONOUS:
        return steady(stages, micro_batches, times)
    return timed(order, times)


def default_chunks(schedule: str) -> int:
    """Chunks per rank of a schedule by name, unless told."""
    return SCHEDULES[schedule].chunks if schedule in SCHEDULES else 1


def compute_order(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Forwards, backwards and weight gradients of every rank, in order. InputError for what cannot be."""
    if schedule not in SCHEDULES:
        raise InputError(f"schedule: found {schedule!r}, expected {' or '.join(SCHEDULES)}")
    if stages < 1 or micro_batches < 1:
        raise InputError(f"schedule: {stages} stages and {micro_batches} micro-batches; there must be 1 or more of each")
    if not SCHEDULES[schedule].allows(chunks):
        raise InputError(f"chunks: found {chunks}, {schedule} has {expected_chunks(schedule)}")
    return named_order(schedule, stages, chunks, micro_batches)


def expected_chunks(schedule: str) -> str:
    """How many chunks per rank a schedule may have, in words."""
    named = SCHEDULES[schedule]
    return f"{named.chunks}" if named.most_chunks <= named.chunks else f"{named.chunks} or more"


def timed(order: Schedule, times: Times) -> Timeline:
    """Times of any order of compute."""
    spans = run(order, times)
    step = max((span.end_s for rank in spans for span in rank), default=0.0)
    idle = tuple(step - sum(span.end_s - span.start_s for span in rank) for rank in spans)
    return Timeline(step, sum(idle) / (step * len(order)) if step else 0.0, idle, in_flight(order), spans)


def steady(ranks: int, micro_batches: int, times: Times) -> Timeline:
    """One step of a run without flushes: what it adds to the steps before it."""
    shorter, longer = (
        timed(endless_order(ranks, micro_batches, n), times) for n in (STEADY_STEPS, STEADY_STEPS + 1)
    )
    step = longer.step_s - shorter.step_s
    work = [micro_batches * (f + b) for f, b in zip(times.forward_s, times.backward_s, strict=True)]
    idle = tuple(max(0.0, step - busy) for busy in work)
    return Timeline(step, sum(idle) / (step * ranks) if step else 0.0, idle, longer.in_flight, longer.timeline)


def per_stage(name: str, amount: float | Sequence[float], count: int) -> tuple[float, ...]:
    """One number of 0 or more per stage."""
    values = tuple(float(a) for a in amount) if isinstance(amount, Sequence) else (float(amount),) * count
    if len(values) != count:
        raise InputError(f"{name}: found {len(values)} numbers, expected one, or {count}")
    if any(not value >= 0 for value in values):
        raise InputError(f"{name}: found {min(values)}, expected seconds of 0 or more")
    return values


def per_chunk(name: str, amount: float | Sequence[float], ranks: StageRanks, num_ranks: int) -> tuple[float, ...]:
    """One number per stage; those of ranks are divided among their chunks."""
    if isinstance(amount, Sequence) and len(amount) == len(ranks) != num_ranks:
        return per_stage(name, amount, len(ranks))
    values = per_stage(name, amount, num_ranks)
    return tuple(values[rank] / (len(ranks) // num_ranks) for rank in ranks)


def run(order: Schedule, times: Times) -> tuple[tuple[Span, ...], ...]:
    """Every action in time, per rank. ValueError when ranks wait for each other for ever."""
    ranks = stage_ranks(order)
    split = [split_backwards(actions) for actions in order]
    ends: dict[Action, float] = {}
    found: list[list[Span]] = [[] for _ in order]
    moved = True
    while moved:
        moved = False
        for spans, actions, halves in zip(found, order, split, strict=True):
            while len(spans) < len(actions):
                action = actions[len(spans)]
                ready = ready_s(action, ends, ranks, times)
                if ready is None:
                    break
                start = max(spans[-1].end_s if spans else 0.0, ready)
                ends[action] = start + times.seconds(action, (action.stage, action.micro_batch) in halves)
                spans.append(Span(action, start, ends[action]))
                moved = True
    if any(len(spans) < len(actions) for spans, actions in zip(found, order, strict=True)):
        raise ValueError("the schedule's ranks wait for each other for ever")
    return tuple(map(tuple, found))


def ready_s(action: Action, ends: dict[Action, float], ranks: StageRanks, times: Times) -> float | None:
    """When what an action needs is there; None while that has not run."""
    needs = []
    source = reads_from(action, len(ranks))
    if source is not None:
        sent = ranks[source.stage] != ranks[action.stage]
        needs.append((source, times.transfer_s[min(source.stage, action.stage)] if sent else 0.0))
    if action.kind is not Kind.F:
        own = Kind.F if action.kind is Kind.B else Kind.B
        needs.append((Action(action.stage, own, action.micro_batch), 0.0))
    if any(need not in ends for need, _ in needs):
        return None
    return max((ends[need] + sent for need, sent in needs), default=0.0)


def in_flight(order: Schedule) -> tuple[int, ...]:
    """Most (stage, micro-batch) pairs per rank that activations are kept for."""
    return tuple(max(kept, default=0) for kept in map(kept_after, order))


def kept_after(actions: Actions) -> tuple[int, ...]:
    """After each action of a rank, the pairs that activations are kept for."""
    split = split_backwards(actions)
    now, found = 0, []
    for action in actions:
        if action.kind is Kind.F:
            now += 1
        elif action.kind is Kind.W or (action.kind is Kind.B and (action.stage, action.micro_batch) not in split):
            now -= 1
        found.append(now)
    return tuple(found)
