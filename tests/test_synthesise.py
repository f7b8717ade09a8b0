"""Synthesised schedules: they run, fit, are never worse than what they start from, and beat named ones on uneven stages."""

from __future__ import annotations

import random

import pytest

from meshwright.passes.choose_schedule import Pipeline, ScheduleChoice, choose_schedule
from meshwright.passes.choose_stages import SegmentCost
from meshwright.passes.order_problem import Problem, taken_bytes
from meshwright.passes.simulate import Times, in_flight, timed
from meshwright.passes.stage_memory import Needs
from meshwright.passes.synthesise import is_shortest, list_orders, split_order, synthesise
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.runtime.actions import Action, Kind, Schedule
from meshwright.runtime.orders import SCHEDULES
from meshwright.runtime.schedules import insert_transfers, named_order
from meshwright.runtime.soundness import UnsoundError, check_schedule


def problem(name: str, ranks: int, micro_batches: int, forward_s: list[float], transfer_s: float = 0.1) -> Problem:
    """Backwards take a little longer than forwards, weight gradients a little less; activations are as forwards."""
    chunks = SCHEDULES[name].chunks
    times = Times(
        tuple(forward_s),
        tuple(1.2 * f for f in forward_s),
        tuple(0.8 * f for f in forward_s),
        (transfer_s,) * (len(forward_s) - 1),
    )
    return Problem(named_order(name, ranks, chunks, micro_batches), times, tuple(Needs.plain(int(100 * f)) for f in forward_s))


def check(case: Problem, order: Schedule) -> None:
    """Sound, complete and no larger than allowed."""
    check_schedule(insert_transfers(order))
    compute = [a for actions in split_order(case, order) for a in actions]
    wanted = {Action(s, k, i) for s in range(len(case.ranks)) for k in case.kinds(s) for i in range(case.micro_batches)}
    assert len(compute) == len(wanted) and set(compute) == wanted
    assert all(used <= room for used, room in zip(taken_bytes(order, case.needs), case.room, strict=True))


HEAVY_HEAD = [0.5] * 7 + [0.9]
MIXED = [1.0, 2.0] * 4


@pytest.mark.parametrize(("forward_s", "named"), [(HEAVY_HEAD, "zb-v"), (MIXED, "zb-v"), ([1.9, 1.0, 1.0, 1.3], "1f1b")])
def test_uneven_stages_are_ordered_better_than_by_name(forward_s: list[float], named: str) -> None:
    case = problem(named, 4, 8, forward_s)
    found = synthesise(case)
    check(case, found)
    assert case.step_s(found) < 0.98 * case.step_s(case.start)
    assert found == synthesise(case), "the same problem, the same order"


def test_what_cannot_be_shorter_is_left() -> None:
    for name in ("zb-h1", "zb-h2"):
        case = problem(name, 4, 8, [1.0] * 4, transfer_s=0.0)
        if is_shortest(case, case.start):
            assert synthesise(case) is case.start
    even = Problem(named_order("zb-h1", 4, 1, 8), Times((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, (0.0,) * 3), (Needs.plain(1),) * 4)
    assert is_shortest(even, even.start) and synthesise(even) is even.start


def test_list_orders_are_sound_and_fit_on_random_stages() -> None:
    rng = random.Random(3)
    for _ in range(12):
        ranks, name = rng.randint(1, 4), rng.choice(["1f1b", "zb-h1", "zb-v", "interleaved"])
        stages = ranks * SCHEDULES[name].chunks
        case = problem(name, ranks, rng.randint(1, 6), [rng.choice([0.5, 1.0, rng.random()]) for _ in range(stages)])
        for order in list_orders(case):
            check(case, order)


def test_without_weight_gradients_of_their_own_there_is_no_w() -> None:
    case = Problem(named_order("1f1b", 2, 1, 4), Times((1.0, 3.0), (2.0, 4.0), (0.0, 0.0), (0.5,)), (Needs.plain(1),) * 2)
    found = synthesise(case)
    check(case, found)
    assert not [a for actions in found for a in actions if a.kind is Kind.W]


# the choice of a schedule


def model(layers: int = 7, heavy: float = 2.0) -> tuple[SegmentCost, ...]:
    middle = (SegmentCost(f"layers.{i}", 1.0, 2.0, {f"layers.{i}.weight": 100}, 10, 8, 0.9) for i in range(layers))
    head = SegmentCost("head", heavy, 2 * heavy, {"head.weight": 400}, 30, 0, 0.9 * heavy)
    return (SegmentCost("embedding", 0.1, 0.1, {"table": 400}, 8, 8), *middle, head)


def choose(schedule: str, pp: int = 2, **more: object) -> ScheduleChoice:
    return choose_schedule(model(), Pipeline(Mesh(pp=pp), 4, schedule, **more))  # type: ignore[arg-type]


def test_auto_is_as_short_as_the_best_and_never_stale() -> None:
    named = {n: choose(n).stages.step_s for n in SCHEDULES if n != "pipedream-2bw"}
    auto, own = choose("auto"), choose("synthesised")
    assert auto.name != "pipedream-2bw"
    assert auto.stages.step_s <= min(named.values()) * (1 + 1e-6)
    assert own.stages.step_s <= min(named.values()) * (1 + 1e-6)
    assert choose("auto", pp=1).name == "1f1b"


def test_memory_rules_schedules_out() -> None:
    free = choose("auto")
    tight = choose("auto", memory_limit=free.fullest_bytes - 1)
    assert tight.fullest_bytes < free.fullest_bytes and tight.stages.step_s >= free.stages.step_s
    with pytest.raises(InputError, match="memory_limit: stage"):
        choose("auto", memory_limit=100)
    with pytest.raises(InputError, match="memory_limit: stage"):
        choose("synthesised", memory_limit=100)


def test_actions_of_a_plan_are_kept_or_refused() -> None:
    own = choose("synthesised")
    again = choose("synthesised", actions=own.stages.order)
    assert (again.chunks, again.stages.order, again.stages.in_flight) == (own.chunks, own.stages.order, in_flight(own.stages.order))
    assert again.stages.step_s == pytest.approx(timed(own.stages.order, again.stages.times).step_s)
    for name, pp, message in (("1f1b", 2, "are those of schedule synthesised"), ("synthesised", 3, "are for pp=2 and 4")):
        with pytest.raises(InputError, match=f"actions: .*{message}"):
            choose(name, pp=pp, actions=own.stages.order)
    first, *others = own.stages.order
    with pytest.raises(UnsoundError, match="schedule cannot run"):
        choose("synthesised", actions=(tuple(reversed(first)), *others))
