"""Layouts under a memory limit, and collectives that hide behind weight gradients."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from meshwright.compiler.hardware import Link
from meshwright.passes.overlap import Beside, linear_input_s
from meshwright.passes.solver_layout import solve_assignment
from meshwright.plan import Plan, compile
from meshwright.plans.errors import InputError
from meshwright.plans.layout import I, shard
from meshwright.tests.parity import build
from meshwright.tests.test_solver_layout import Problem


def planned(**options: object) -> Plan:
    return compile(build("llama").directory, None, **{"mesh": "tp=2", "seq": 32, "micro_batch": 2, "hardware": "h100", **options})


def test_layouts_keep_less_where_the_limit_binds_and_say_so() -> None:
    free = planned()
    memory = free.document.stages[0].memory
    tight = planned(memory_limit=int(0.95 * memory.total))
    assert tight.document.stages[0].memory.total <= 0.95 * memory.total
    assert tight.document.stages[0].memory.activations < memory.activations
    assert tight.document.predicted.step_s >= free.document.predicted.step_s
    assert any("these keep less" in note for note in tight.document.notes)
    alone = {"zero": 0, "recompute": "none", "schedule": "1f1b", "global_batch": free.document.global_batch}
    searched = planned(memory_limit=int(0.95 * memory.total), devices=2, **alone)
    assert searched.document.kinds == tight.document.kinds and "layouts that keep less, chosen" in searched.summary()
    roomy = planned(memory_limit=2 * memory.total)
    assert roomy.document.kinds == free.document.kinds and roomy.document.notes == free.document.notes
    with pytest.raises(InputError, match="memory_limit: stage 0"):
        planned(memory_limit=memory.total // 2)


def test_the_limit_holds_for_what_only_a_whole_plan_knows() -> None:
    """Padded buckets, ZeRO's gathers and sums over dp come to what stages are cut by."""

    def fullest(limit: int) -> int:
        document = planned(mesh="dp=2", zero=3, recompute="auto", memory_limit=limit).document
        return document.memory_of(0)

    free = fullest(10**9)
    for share in (0.9, 0.8):
        assert fullest(int(share * free)) <= share * free
    with pytest.raises(InputError, match=r"the limit is .* are kept free for padded buckets, gathers and sums over dp\)"):
        fullest(int(0.65 * free))


def test_priced_bytes_give_the_fastest_of_all_that_keep_no_more() -> None:
    """Everett's theorem, against brute force: the answer at a price is best among assignments of no more bytes."""
    rng = random.Random(17)
    checked = 0
    for _ in range(40):
        problem = Problem(rng, rng.randint(3, 6))
        kept = [[rng.randrange(100) for _ in choice.options] for choice in problem.choices]
        price = rng.choice([1e-8, 1e-7, 1e-6])
        priced = [
            replace(choice, options=tuple(replace(o, cost_s=o.cost_s + price * n) for o, n in zip(choice.options, row, strict=True)))
            for choice, row in zip(problem.choices, kept, strict=True)
        ]
        every = [a for a in product(*(range(len(c.options)) for c in problem.choices)) if problem.cost(a) < float("inf")]
        if not every:
            continue
        answer = solve_assignment(tuple(priced), tuple(problem.edges), problem.conversion_s)
        limit = held(kept, answer)
        best = min(problem.cost(a) for a in every if held(kept, a) <= limit)
        assert problem.cost(answer) == pytest.approx(best, abs=2e-9)
        checked += 1
    assert checked > 20


def held(kept: list[list[int]], answer: tuple[int, ...]) -> int:
    return sum(row[o] for row, o in zip(kept, answer, strict=True))


def test_a_linears_collectives_count_for_what_is_longer_than_the_matmuls_beside_them() -> None:
    """Sequence parallelism of 8 bytes on 2 ranks: a gather or scatter takes 4 s, an all-reduce 8 s."""
    beside, alone = Link(0.0, 1.0), Link(0.0, 1.0, overlaps=False)
    cost = partial(linear_input_s, rank=3, global_bytes=8, ranks=2)
    assert cost(shard(1), link=beside, beside=Beside(3.0, 1.0)) == (4.0, (4 - 1) + (4 - 3))
    assert cost(shard(1), link=beside, beside=Beside(9.0, 9.0)) == (4.0, 0.0)
    assert cost(shard(1), link=alone, beside=Beside(9.0, 9.0)) == (4.0, 8.0)
    assert cost(I, link=beside, beside=Beside(9.0, 3.0)) == (0.0, 5.0) and cost(I, link=alone, beside=Beside(9.0, 3.0)) == (0.0, 8.0)
    assert cost(shard(1), link=beside, beside=Beside(9.0, 0.0)) == (4.0, 4.0)  # a frozen weight: its input is not gathered again
    assert cost(shard(2), link=beside, beside=Beside(9.0, 9.0)) == (4.0, 4.0)  # cut along what is contracted: no one call
