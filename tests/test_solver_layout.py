"""Layout assignment: tables against brute force and against the 0-1 program, on random graphs; elimination, branching, effort."""

from __future__ import annotations

import random
import time
from itertools import product
from math import inf

import numpy as np
import pytest

from meshwright.passes.least_sum import Factor, Impossible, TooHard, least_sum
from meshwright.passes.solver_layout import (
    Choice,
    Edge,
    Option,
    Unsolved,
    layout_factors,
    solve_as_program,
    solve_assignment,
)
from meshwright.plans.layout import I, P, R, Type, shard

TYPES = (I, R, P, shard(0), shard(1))


class Problem:
    """A random program: every choice reads up to three earlier results; several may read one at the same site."""

    def __init__(self, rng: random.Random, size: int, options: int = 3) -> None:
        self.costs = {pair: rng.choice([None, 1e-6, 3e-6, rng.random() * 1e-5]) for pair in product(TYPES, TYPES)}
        self.edges: list[Edge] = []
        self.choices: list[Choice] = []
        for c in range(size):
            reads = [rng.randrange(c) for _ in range(min(c, rng.randint(1, 3)))]
            self.edges += [Edge(p, 0, c, operand, rng.choice("ab")) for operand, p in enumerate(reads)]
            made = tuple(self.option(rng, len(reads)) for _ in range(rng.randint(1, options)))
            self.choices.append(Choice(f"op{c}", made))

    def option(self, rng: random.Random, operands: int) -> Option:
        return Option(rng.random() * 1e-5, tuple(rng.choice(TYPES) for _ in range(operands)), (rng.choice(TYPES),))

    def conversion_s(self, producer: int, result: int, site: str, source: Type, target: Type) -> float | None:
        cost = self.costs[source, target]
        return None if cost is None else cost * (1 + producer % 3)

    def cost(self, answer: tuple[int, ...]) -> float:
        """The objective as the docstring states it; infinite where a conversion does not exist."""
        taken = [choice.options[o] for choice, o in zip(self.choices, answer, strict=True)]
        needs = {(e.producer, e.result, e.site, taken[e.consumer].needs[e.operand]) for e in self.edges}
        total = sum(option.cost_s for option in taken)
        for producer, result, site, target in needs:
            source = taken[producer].yields[result]
            seconds = 0.0 if source == target else self.conversion_s(producer, result, site, source, target)
            total += inf if seconds is None else seconds
        return total

    def least(self) -> float:
        return min(self.cost(answer) for answer in product(*(range(len(c.options)) for c in self.choices)))

    def solved(self) -> tuple[int, ...]:
        return solve_assignment(tuple(self.choices), tuple(self.edges), self.conversion_s)


def test_tables_equal_brute_force_on_300_graphs() -> None:
    rng = random.Random(11)
    impossible = 0
    for _ in range(300):
        problem = Problem(rng, rng.randint(2, 8))
        least = problem.least()
        if least == inf:
            impossible += 1
            with pytest.raises(Unsolved):
                problem.solved()
            continue
        assert problem.cost(problem.solved()) == pytest.approx(least, abs=1e-9)
    assert 20 < impossible < 200


def test_tables_equal_the_program_on_larger_graphs() -> None:
    rng = random.Random(5)
    compared = 0
    for _ in range(30):
        problem = Problem(rng, rng.randint(20, 40), options=5)
        try:
            tables = problem.solved()
        except Unsolved:
            continue
        program = solve_as_program(tuple(problem.choices), tuple(problem.edges), problem.conversion_s)
        assert problem.cost(tables) == pytest.approx(problem.cost(program), abs=1e-8)
        assert problem.solved() == tables
        compared += 1
    assert compared > 5


def test_needed_types_as_a_set_cost_what_one_table_does(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    problems = [Problem(rng, rng.randint(3, 12)) for _ in range(60)]
    expected = [answer_or_none(problem) for problem in problems]
    monkeypatch.setattr("meshwright.passes.solver_layout.LARGEST_DIRECT", 1)
    sizes, _ = layout_factors(problems[-1].choices, problems[-1].edges, problems[-1].conversion_s)
    assert len(sizes) > len(problems[-1].choices)
    for problem, known in zip(problems, expected, strict=True):
        again = answer_or_none(problem)
        assert (again is None) == (known is None)
        if again is not None and known is not None:
            assert problem.cost(again) == pytest.approx(problem.cost(known), abs=1e-9)


def answer_or_none(problem: Problem) -> tuple[int, ...] | None:
    try:
        return problem.solved()
    except Unsolved:
        return None


def test_branching_finds_the_same_least_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tables of no more than 16 entries dense graphs are branched on."""
    generator = np.random.default_rng(2)
    monkeypatch.setattr("meshwright.passes.least_sum.LARGEST_TABLE", 16)
    for _ in range(40):
        size = int(generator.integers(4, 8))
        sizes = [int(n) for n in generator.integers(2, 4, size)]
        factors = [
            Factor((u, v), np.where(generator.random((sizes[u], sizes[v])) < 0.2, inf, generator.integers(0, 20, (sizes[u], sizes[v]))))
            for u in range(size)
            for v in range(u)
        ]
        least = min(total(factors, values) for values in product(*map(range, sizes)))
        if least == inf:
            with pytest.raises(Impossible):
                least_sum(sizes, factors)
        else:
            assert total(factors, least_sum(sizes, factors)) == least


def total(factors: list[Factor], values: tuple[int, ...]) -> float:
    return sum(float(f.table[tuple(values[v] for v in f.scope)]) for f in factors)


def test_effort_is_bounded_and_the_program_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = next(p for p in (Problem(random.Random(seed), 12) for seed in range(50)) if answer_or_none(p) is not None)
    known = problem.solved()
    sizes, factors = layout_factors(problem.choices, problem.edges, problem.conversion_s)
    with pytest.raises(TooHard):
        least_sum(sizes, factors, effort=1)
    monkeypatch.setattr("meshwright.passes.solver_layout.LARGEST_SETS", 0)
    monkeypatch.setattr("meshwright.passes.solver_layout.LARGEST_DIRECT", 0)
    assert problem.cost(problem.solved()) == pytest.approx(problem.cost(known), abs=1e-8)


def test_hundreds_of_ops_in_a_chain_with_shared_values_take_seconds() -> None:
    """An unrolled scan: every step reads the state before it and one of four values that all steps read."""
    rng = random.Random(1)
    types = (I, R, shard(0), shard(1))
    choices = [Choice(f"shared{i}", tuple(Option(0.0, (), (t,)) for t in types)) for i in range(4)]
    edges = []
    for step in range(500):
        options = tuple(Option(rng.random() * 1e-6, (t, t), (t,)) for t in types)
        edges += [Edge(len(choices) - 1, 0, len(choices), 0, "layer"), Edge(step % 4, 0, len(choices), 1, "layer")]
        choices.append(Choice(f"step{step}", options))
    start = time.process_time()
    answer = solve_assignment(tuple(choices), tuple(edges), lambda *_: 1e-6)
    assert time.process_time() - start < 5
    assert len(answer) == len(choices)
