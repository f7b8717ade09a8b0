"""The stages that are chosen have the least simulated step time: brute force over random chains, long chains, encoder-decoders."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from meshwright.compiler.hardware import Link
from meshwright.passes.choose_stages import SegmentCost, choose_stages
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh

LINK = Link(latency_s=0.01, bandwidth_bytes_per_s=10.0)


def random_chain(rng: random.Random) -> tuple[SegmentCost, ...]:
    """Up to 7 segments of unequal times, forward and backward apart; one parameter may be tied."""
    return tuple(
        SegmentCost(
            f"s{i}",
            forward_s=rng.choice([0.5, 1.0, rng.random()]),
            backward_s=rng.choice([1.0, 2.0, 3 * rng.random()]),
            parameter_bytes={rng.choice(["tied", f"own{i}"]): 5, f"w{i}": rng.randint(1, 5)},
            activation_bytes=rng.randint(0, 9),
            boundary_bytes=rng.randint(0, 2),
            weight_s=0.4,
        )
        for i in range(rng.randint(3, 7))
    )


def every_partition(segments: tuple[SegmentCost, ...], stages: int) -> list[tuple[tuple[str, ...], ...]]:
    names = [s.name for s in segments]
    return [
        tuple(tuple(names[i:j]) for i, j in pairwise((0, *inner, len(names))))
        for inner in combinations(range(1, len(names)), stages - 1)
    ]


def test_chosen_stages_have_the_least_simulated_time_on_240_chains() -> None:
    """Every partition, priced as pinned stages, against the one that is chosen."""
    rng = random.Random(3)
    refused = better = 0
    for _ in range(240):
        segments = tuple(replace(s, weight_s=min(s.weight_s, s.backward_s)) for s in random_chain(rng))
        pp = rng.randint(2, min(4, len(segments)))
        schedule, chunks = rng.choice([("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2)])
        chunks = chunks if pp * chunks <= len(segments) else 1
        schedule = schedule if chunks == 2 or schedule != "interleaved" else "1f1b"
        limit = rng.choice([None, 150, 250])
        options = {"schedule": schedule, "micro_batches": pp * rng.randint(1, 3), "chunks": chunks, "memory_limit": limit}
        found = []
        for pinned in every_partition(segments, pp * chunks):
            try:
                found.append(choose_stages(segments, Mesh(pp=pp), link=LINK, pinned=pinned, **options).step_s)  # type: ignore[arg-type]
            except InputError:
                refused += 1
        if not found:
            with pytest.raises(InputError, match="memory_limit"):
                choose_stages(segments, Mesh(pp=pp), link=LINK, **options)  # type: ignore[arg-type]
            continue
        choice = choose_stages(segments, Mesh(pp=pp), link=LINK, **options)  # type: ignore[arg-type]
        assert choice.step_s == pytest.approx(min(found), rel=1e-6)
        better += min(found) < max(found) * 0.99
    assert refused > 20 and better > 100


def test_a_long_uneven_chain_is_no_worse_than_any_single_move() -> None:
    rng = random.Random(8)
    segments = tuple(SegmentCost(f"s{i}", rng.random(), 2 * rng.random(), {f"w{i}": 4}, 4, 8) for i in range(60))
    choice = choose_stages(segments, Mesh(pp=8), schedule="1f1b", micro_batches=16, link=LINK)
    stages = [list(s.segments) for s in choice.stages]
    for place in range(7):
        for step in (-1, 1):
            other = [list(s) for s in stages]
            if step < 0:
                other[place + 1].insert(0, other[place].pop())
            else:
                other[place].append(other[place + 1].pop(0))
            if not all(other):
                continue
            moved = choose_stages(
                segments, Mesh(pp=8), schedule="1f1b", micro_batches=16, link=LINK, pinned=[tuple(s) for s in other]
            )
            assert moved.step_s >= choice.step_s * (1 - 1e-6)
