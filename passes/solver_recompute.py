"""Two choices of what to recompute, with OR-Tools CP-SAT. Numbers in, numbers out; one worker and a fixed seed.

solve_regions   which statements of a layer run again, at a price of p bytes for a second. For statement i let x_i = 1 when it does, and
                for storage t let k_t = 1 when autograd keeps it:

                    minimise     sum of bytes_t k_t  +  p sum of seconds_i x_i
                    k_t >= 1 - x_s          for every statement s that autograd keeps t for
                    k_t >= x_c - x_m        for every statement c that reads t from a statement m (0 where it comes from outside)

                A statement that only moves a value between chosen ones goes with them; where that talks to other ranks it is ruled out.
                (The cut of Jain et al., Checkmate, arXiv 1910.02653, section 4, for one level of recomputation.)

solve_stage     which option each segment of a stage takes. For segment i and option o let x_io = 1 when taken:

                    minimise     sum of seconds_io x_io
                    what passes.stage_memory says of each moment and i <= room; for a backward beside k other micro-batches
                                 k A + A_0 + ... + A_i + T_i,  A the sum over the stage
                    shared storages count once, from the beginning
                    alike neighbours: kept bytes do not fall, so that those that need most at once run while least is kept
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ortools.sat.python import cp_model

from meshwright.passes.stage_memory import RULES, Doing, Moment, Option, stage_bytes

TICKS = 1 << 30
"""Seconds are counted in whole ticks, of which all options together have about so many."""
SECONDS = 20.0
"""Deterministic time of a solve, far above what stages of a hundred layers took."""


@dataclass(frozen=True)
class Statements:
    """A layer's statements: seconds of each, storages that are kept for it, and what it reads: (statement that it has it from, or None;
    storage)."""

    seconds: Sequence[float]
    saved: Sequence[frozenset[int]]
    read: Sequence[frozenset[tuple[int | None, int]]]
    num_bytes: Mapping[int, int]
    free: frozenset[int]
    """Statements that may be chosen."""
    movers: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]
    """Statements that only move a value: those that read it, and those that they read. Chosen when all of the former and one of the latter
    are."""
    fixed: frozenset[int] = frozenset()
    """Of these, those that may not be."""


def solve_regions(problem: Statements, bytes_per_s: float) -> frozenset[int]:
    """Statements that are recomputed, movers left out."""
    model = cp_model.CpModel()
    count = len(problem.seconds)
    x = [model.new_bool_var(f"x{i}") for i in range(count)]
    for i in range(count):
        if i not in problem.free and i not in problem.movers:
            model.add(x[i] == 0)
    for i, (readers, operands) in problem.movers.items():
        if not readers:
            model.add(x[i] == 0)
            continue
        for j in readers:
            model.add_implication(x[i], x[j])
        model.add_bool_or([x[i].Not(), *(x[j] for j in operands)])
        for j in operands:
            model.add_bool_or([x[i], x[j].Not(), *(x[r].Not() for r in readers)])
        if i in problem.fixed:
            model.add(x[i] == 0)
    cost = [max(1, round(bytes_per_s * problem.seconds[i])) * x[i] for i in range(count)]
    for t, size in problem.num_bytes.items():
        kept = model.new_bool_var(f"k{t}")
        for i in range(count):
            if t in problem.saved[i]:
                model.add_bool_or([kept, x[i]])
            for source in (m for m, read in problem.read[i] if read == t):
                model.add_bool_or([kept, x[i].Not(), *([] if source is None else [x[source]])])
        cost.append(size * kept)
    model.minimize(sum(cost))
    solver = _solver()
    assert solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE), "keeping everything is always possible"
    return frozenset(i for i in range(count) if i not in problem.movers and solver.boolean_value(x[i]))


def solve_stage(segments: Sequence[Sequence[Option]], at: Sequence[Moment], room_bytes: int) -> tuple[int, ...] | None:
    """The option of each segment, by number; None when nothing fits. Segments with equal options are alike."""
    first = tuple(min(range(len(options)), key=lambda o: (options[o].seconds, options[o].own_bytes)) for options in segments)
    if stage_bytes([s[o] for s, o in zip(segments, first, strict=True)], at) <= room_bytes:
        return first
    stage = _Stage(segments, {moment.doing for moment in at})
    for moment in at:
        stage.fit(moment, room_bytes)
    return stage.solve()


Sum = cp_model.LinearExpr | int


class _Stage:
    """The model of solve_stage."""

    def __init__(self, segments: Sequence[Sequence[Option]], doing: AbstractSet[Doing]) -> None:
        self._segments = segments
        self._model = cp_model.CpModel()
        self._x = [[self._model.new_bool_var(f"x{i}.{o}") for o in range(len(options))] for i, options in enumerate(segments)]
        for taken in self._x:
            self._model.add_exactly_one(taken)
        self._kept = self._sums(lambda option: option.own_bytes)
        self._put_off = self._sums(lambda option: option.waiting.own_bytes)
        self._shared = {now: self._once(RULES[now].shared) for now in Doing if now in {*doing, Doing.BACKWARD, Doing.WEIGHT}}
        for i in range(1, len(segments)):
            if segments[i - 1] == segments[i]:
                self._model.add(self._kept[i - 1] <= self._kept[i])

    def _sums(self, size: Callable[[Option], int]) -> list[Sum]:
        """By segment, a number of the option that is taken."""
        return [
            sum(size(option) * var for option, var in zip(options, taken, strict=True))
            for options, taken in zip(self._segments, self._x, strict=True)
        ]

    def _once(self, of: Callable[[Option], Mapping[str, int]]) -> Sum:
        """Bytes of what any option that is taken has by name, each once."""
        total: Sum = 0
        for name, size in {n: size for options in self._segments for o in options for n, size in of(o).items()}.items():
            there = self._model.new_bool_var(name)
            total = total + size * there
            for taken, options in zip(self._x, self._segments, strict=True):
                for option, var in zip(options, taken, strict=True):
                    if name in of(option):
                        self._model.add_implication(var, there)
        return total

    def fit(self, moment: Moment, room_bytes: int) -> None:
        """What there is at a moment fits."""
        kept, put_off, now = self._kept, self._put_off, moment.doing
        between = moment.put_off * (sum(put_off) + self._shared[Doing.WEIGHT])
        others = moment.kept * (sum(kept) + self._shared[Doing.BACKWARD]) + between
        needs = self._sums(RULES[now].need)
        for i, need in enumerate(needs):
            there = sum(put_off[: i + 1]) if now is Doing.WEIGHT else sum(kept[: i + 1])
            after = sum(put_off[i + 1 :]) if now is Doing.SPLIT else 0
            self._model.add(others + self._shared[now] + there + after + need <= room_bytes)

    def solve(self) -> tuple[int, ...] | None:
        """The cheapest options, by number."""
        total = sum(max(o.seconds for o in options) for options in self._segments) or 1.0
        self._model.minimize(sum(self._sums(lambda option: round(option.seconds / total * TICKS))))
        solver = _solver()
        if solver.solve(self._model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return tuple(next(o for o, var in enumerate(taken) if solver.boolean_value(var)) for taken in self._x)


def _solver() -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = SECONDS
    return solver
