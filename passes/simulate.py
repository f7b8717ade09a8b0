"""A pipeline schedule in time: when every rank works and waits, with stages of any length. Public as `mw.simulate`.

A rank runs its actions in order. A forward of stage s starts when the rank is free and the forward of stage s-1 has ended
and been sent; a backward likewise after that of stage s+1. Sends take `transfer_s` and keep no rank busy.

    step_s      from the first action's start to the last one's end
    bubble      idle share of all ranks' time: (p-1)/(M+p-1) for p equal stages and M micro-batches under GPipe and 1F1B
    in_flight   most micro-batches per rank whose forward has run and whose backward has not: what activations are kept for
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plans.errors import InputError
from meshwright.runtime.actions import Action, Kind, Schedule
from meshwright.runtime.schedules import SCHEDULES


@dataclass(frozen=True)
class Timeline:
    """What a schedule takes; `idle_s` and `in_flight` are per rank."""

    step_s: float
    bubble: float
    idle_s: tuple[float, ...]
    in_flight: tuple[int, ...]


def simulate(
    schedule: str,
    *,
    stages: int,
    micro_batches: int,
    forward_s: float | Sequence[float],
    backward_input_s: float | Sequence[float],
    backward_weight_s: float | Sequence[float] = 0.0,
    transfer_s: float | Sequence[float] = 0.0,
) -> Timeline:
    """Times of a schedule by name. Seconds are per micro-batch: one number for all stages, or one per stage.

    `transfer_s` is one number, or one per boundary between stages. InputError when a number of stages or a name is wrong.
    """
    order = compute_order(schedule, stages, micro_batches)
    forward = per_stage("forward_s", forward_s, stages)
    to_input = per_stage("backward_input_s", backward_input_s, stages)
    to_weight = per_stage("backward_weight_s", backward_weight_s, stages)
    backward = tuple(a + b for a, b in zip(to_input, to_weight, strict=True))
    transfer = per_stage("transfer_s", transfer_s, stages - 1)
    ends = run(order, forward, backward, transfer)
    step = max(ends.values())
    idle = tuple(step - sum(seconds(action, forward, backward) for action in rank) for rank in order)
    return Timeline(step, sum(idle) / (step * len(order)) if step else 0.0, idle, in_flight(order))


def compute_order(schedule: str, stages: int, micro_batches: int) -> Schedule:
    """Forwards and backwards of every rank, in order."""
    if schedule not in SCHEDULES:
        raise InputError(f"schedule: found {schedule!r}, expected {' or '.join(SCHEDULES)}")
    if stages < 1 or micro_batches < 1:
        raise InputError(f"schedule: {stages} stages and {micro_batches} micro-batches; there must be 1 or more of each")
    return SCHEDULES[schedule](stages, micro_batches)


def per_stage(name: str, amount: float | Sequence[float], count: int) -> tuple[float, ...]:
    """One number of 0 or more per stage."""
    values = tuple(float(a) for a in amount) if isinstance(amount, Sequence) else (float(amount),) * count
    if len(values) != count:
        raise InputError(f"{name}: found {len(values)} numbers, expected one, or {count}")
    if any(not value >= 0 for value in values):
        raise InputError(f"{name}: found {min(values)}, expected seconds of 0 or more")
    return values


def seconds(action: Action, forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
    """How long an action keeps its rank busy."""
    return (forward_s if action.kind is Kind.F else backward_s)[action.stage]


def run(
    order: Schedule, forward_s: Sequence[float], backward_s: Sequence[float], transfer_s: Sequence[float]
) -> dict[Action, float]:
    """End of every forward and backward. ValueError when ranks wait for each other for ever."""
    ends: dict[Action, float] = {}
    at = [0] * len(order)
    free = [0.0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                ready = ready_s(action, ends, transfer_s)
                if ready is None:
                    break
                free[rank] = ends[action] = max(free[rank], ready) + seconds(action, forward_s, backward_s)
                at[rank] += 1
                moved = True
    if any(i < len(actions) for i, actions in zip(at, order, strict=True)):
        raise ValueError("the schedule's ranks wait for each other for ever")
    return ends


def ready_s(action: Action, ends: dict[Action, float], transfer_s: Sequence[float]) -> float | None:
    """When what an action needs is there; None while that has not run."""
    stage, kind, micro_batch = action.stage, action.kind, action.micro_batch
    needs = []
    if kind is Kind.F and stage > 0:
        needs.append((Action(stage - 1, Kind.F, micro_batch), transfer_s[stage - 1]))
    if kind is Kind.B:
        needs.append((Action(stage, Kind.F, micro_batch), 0.0))
        if stage < len(transfer_s):
            needs.append((Action(stage + 1, Kind.B, micro_batch), transfer_s[stage]))
    if any(need not in ends for need, _ in needs):
        return None
    return max((ends[need] + sent for need, sent in needs), default=0.0)


def in_flight(order: Schedule) -> tuple[int, ...]:
    """Most micro-batches per rank between their forward and their backward."""
    found = []
    for actions in order:
        now = most = 0
        for action in actions:
            now += 1 if action.kind is Kind.F else -1
            most = max(most, now)
        found.append(most)
    return tuple(found)
