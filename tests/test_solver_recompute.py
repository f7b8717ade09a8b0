"""The choices of what to recompute, against brute force."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from meshwright.compiler.footprint import PutOff
from meshwright.passes.choose_stages import SegmentCost, choose_stages, stage_cost
from meshwright.passes.simulate import simulate
from meshwright.passes.solver_recompute import Statements, solve_regions, solve_stage
from meshwright.passes.stage_memory import Option, in_flight, moments, needs_of, rank_rows, stage_bytes
from meshwright.passes.step_end import Holding
from meshwright.plans.errors import OverLimitError
from meshwright.plans.mesh import Mesh
from meshwright.runtime.schedules import named_order


def options(rng: random.Random) -> tuple[Option, ...]:
    """The more is recomputed, the less is kept, the more is needed at once, the longer it takes."""
    kept = sorted((rng.randint(0, 40) for _ in range(rng.randint(1, 4))), reverse=True)
    shared = {"encoder": 7} if rng.random() < 0.3 else {}
    return tuple(Option(own, shared, 5 + 45 - own, float(i * rng.randint(1, 5))) for i, own in enumerate(kept))


@pytest.mark.parametrize("seed", range(25))
def test_a_stages_recomputation_is_the_least_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [options(rng) for _ in range(2)]
    segments = [kinds[rng.random() < 0.3] for _ in range(rng.randint(1, 5))]
    at = in_flight(rng.randint(1, 4))
    every = [[s[o] for s, o in zip(segments, taken, strict=True)] for taken in product(*(range(len(s)) for s in segments))]
    room = rng.randint(min(stage_bytes(e, at) for e in every) - 5, max(stage_bytes(e, at) for e in every))
    fitting = [sum(o.seconds for o in e) for e in every if stage_bytes(e, at) <= room]
    found = solve_stage(segments, at, room)
    if not fitting:
        assert found is None
        return
    assert found is not None
    chosen = [s[o] for s, o in zip(segments, found, strict=True)]
    assert stage_bytes(chosen, at) <= room
    assert sum(o.seconds for o in chosen) == pytest.approx(min(fitting))


def late_options(rng: random.Random) -> tuple[Option, ...]:
    """The same where weight gradients wait: what waits has little to do with what was kept."""
    found = []
    for o in options(rng):
        waiting = PutOff(rng.randint(5, 30), rng.choice([{}, {"encoder": 7}]), o.transient_bytes + rng.randint(0, 30), rng.randint(0, 9))
        found.append(replace(o, put_off=waiting))
    return tuple(found)


@pytest.mark.parametrize("seed", range(20))
def test_a_stages_recomputation_fits_where_weight_gradients_wait(seed: int) -> None:
    """By the bytes of every action, counted one by one; the least in time unless neighbours are alike."""
    rng = random.Random(seed)
    segments = [late_options(rng) for _ in range(rng.randint(1, 4))]
    order = named_order(rng.choice(["zb-h1", "zb-h2"]), 3, 1, 6)
    rank = rng.randrange(3)
    every = [[s[o] for s, o in zip(segments, taken, strict=True)] for taken in product(*(range(len(s)) for s in segments))]

    def most(chosen: list[Option]) -> int:
        (row,) = rank_rows(order[rank], {rank: needs_of(chosen)}, {}).values()
        return row.activations + row.transient

    for chosen in every:
        assert stage_bytes(chosen, moments(order[rank])) == most(chosen)
    room = rng.randint(min(map(most, every)) - 5, max(map(most, every)))
    fitting = [sum(o.seconds for o in chosen) for chosen in every if most(chosen) <= room]
    found = solve_stage(segments, moments(order[rank]), room)
    assert (found is None) == (not fitting)
    if found is not None:
        chosen = [s[o] for s, o in zip(segments, found, strict=True)]
        assert most(chosen) <= room and sum(o.seconds for o in chosen) == pytest.approx(min(fitting))


def kept_bytes(problem: Statements, chosen: set[int]) -> int:
    kept = {t for i, saved in enumerate(problem.saved) if i not in chosen for t in saved}
    kept |= {t for i in chosen for source, t in problem.read[i] if source not in chosen}
    return sum(problem.num_bytes[t] for t in kept)


@pytest.mark.parametrize("seed", range(20))
def test_regions_are_those_of_least_bytes_and_time(seed: int) -> None:
    """Statement i makes storage i; it reads some before it, and autograd keeps some of these and its result for it."""
    rng = random.Random(seed)
    count = rng.randint(3, 7)
    read: list[frozenset[tuple[int | None, int]]] = []
    saved: list[frozenset[int]] = []
    for i in range(count):
        sources = rng.sample(range(i), min(i, rng.randint(1, 2))) or [-1]
        read.append(frozenset((j if j >= 0 else None, j) for j in sources))
        saved.append(frozenset(j for j in (*sources, i) if rng.random() < 0.5))
    sizes = {t: rng.randint(1, 100) for t in range(-1, count)}
    seconds = [rng.randint(1, 20) / 4 for _ in range(count)]
    problem = Statements(seconds, saved, read, sizes, frozenset(range(count)), {})
    price = 8.0

    def cost(chosen: set[int]) -> float:
        return kept_bytes(problem, chosen) + sum(round(price * seconds[i]) for i in chosen)

    best = min(cost({i for i in range(count) if taken[i]}) for taken in product((False, True), repeat=count))
    assert cost(set(solve_regions(problem, price))) == best


def segment(name: str, ways: tuple[Option, ...], parameters: int = 10) -> SegmentCost:
    first = ways[0]
    return SegmentCost(name, 1.0, 2.0, {name: parameters}, first.own_bytes, 0, 0.5, first.shared, first.transient_bytes, ways)


LAYER = (Option(100, {}, 10, 0.0), Option(60, {}, 50, 0.2), Option(10, {}, 100, 1.0))
SEGMENTS = tuple(segment(f"layers.{i}", LAYER) for i in range(8))


def test_early_stages_recompute_and_stages_with_room_do_not() -> None:
    """1F1B keeps 4, 3, 2 and 1 micro-batches; parameters, gradients and moments are 40 bytes a segment."""
    free = choose_stages(SEGMENTS, Mesh(pp=4), schedule="1f1b", micro_batches=8)
    assert all(set(s.taken) == {0} for s in free.stages)
    found = choose_stages(SEGMENTS, Mesh(pp=4), schedule="1f1b", micro_batches=8, memory_limit=650)
    assert all(s.memory.total <= 650 for s in found.stages)
    recomputed = [sum(LAYER[o].seconds for o in s.taken) for s in found.stages]
    assert recomputed[0] > recomputed[1] >= recomputed[2] and recomputed[3] == 0
    for s, count in zip(found.stages, (4, 3, 2, 1), strict=True):
        assert s.memory.activations == count * s.needs.kept
        assert list(s.taken) == sorted(s.taken, reverse=True), "those that need most at once run while least is kept"


@pytest.mark.parametrize("limit", [330, 340, 400, 450, 500, 560, 700, 900, 1200])
def test_cuts_and_recomputation_are_the_best_together(limit: int) -> None:
    """Every cut and every choice by brute force, by the time of the step; what is missing is said when nothing fits."""
    rng = random.Random(limit)
    segments = tuple(segment(f"s{i}", LAYER if i % 3 else LAYER[:1], rng.randint(1, 20)) for i in range(5))
    mesh, holding = Mesh(pp=2), Holding(micro_batches=4)

    def least_s(start: int, stop: int, count: int) -> float:
        """The shortest backward of a stage that fits."""
        part = segments[start:stop]
        lasting = stage_cost(part, in_flight(count), holding).memory
        room = limit - lasting.parameters - lasting.gradients - lasting.optimizer
        every = product(*(s.ways for s in part))
        return min((2.0 * len(part) + sum(o.seconds for o in e) for e in every if stage_bytes(e, in_flight(count)) <= room), default=inf)

    steps = []
    for cut in range(1, 5):
        backward = [least_s(0, cut, 2), least_s(cut, 5, 1)]
        if max(backward) < inf:
            forward = [1.0 * cut, 1.0 * (5 - cut)]
            steps.append(simulate("1f1b", stages=2, micro_batches=4, forward_s=forward, backward_input_s=backward).step_s)
    if not steps:
        with pytest.raises(OverLimitError, match=r"needs .* on a rank, recomputing what it can,?: .* the limit is .*; allow \d+ bytes"):
            choose_stages(segments, mesh, schedule="1f1b", micro_batches=4, memory_limit=limit)
        return
    found = choose_stages(segments, mesh, schedule="1f1b", micro_batches=4, memory_limit=limit)
    assert all(s.memory.total <= limit for s in found.stages)
    assert found.step_s == pytest.approx(min(steps))
