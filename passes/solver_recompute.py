"""Two choices of what to recompute, with OR-Tools CP-SAT. Numbers in, numbers out; one worker and a fixed seed.

solve_regions   which statements of a layer run again, at a price of p bytes for a second. For statement i let x_i = 1 when it does, and
                for storage t let k_t = 1 when autograd keeps it:

                    minimise     sum of bytes_t k_t  +  p sum of seconds_i x_i
                    k_t >= 1 - x_s          for every statement s that autograd keeps t for
                    k_t >= x_c - x_m        for every statement c that reads t from a statement m (0 where it comes from outside)

                A statement that only moves a value between chosen ones goes with them; where that talks to other ranks it is ruled out.
                (The cut of Jain et al., Checkmate, arXiv 1910.02653, section 4, for one level of recomputation.)

solve_stage     which option each segment of a stage takes, k micro-batches in flight. For segment i and option o let x_io = 1 when taken,
                A_i its kept bytes and T_i its moment's need:

                    minimise     sum of seconds_io x_io
                    (k - 1) A + A_0 + ... + A_i + T_i <= room     for every i, A the sum over the stage
                    shared storages count once, from the beginning
                    alike neighbours: kept bytes do not fall, so that those that need most at once run while least is kept
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

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


@dataclass(frozen=True)
class Option:
    """One way to run a segment.

    own_bytes         that autograd keeps for it alone, per micro-batch
    shared            storages that it keeps and that others may keep too, by name
    transient_bytes   the most that is there beside what is kept, in its forward or backward
    seconds           that it adds to the backward
    """

    own_bytes: int
    shared: Mapping[str, int] = field(default_factory=dict)
    transient_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Kept:
    """What a stage keeps of a micro-batch, and the most that there is beside that of all micro-batches."""

    kept_bytes: int
    transient_bytes: int


def kept_of(options: Sequence[Option]) -> Kept:
    """Of a stage whose segments take these, in order."""
    shared = {name: size for option in options for name, size in option.shared.items()}
    at = most = sum(shared.values())
    for option in options:
        at += option.own_bytes
        most = max(most, at + option.transient_bytes)
    return Kept(at, most - at)


def stage_bytes(options: Sequence[Option], in_flight: int) -> int:
    """Activations and the moment's need of a stage."""
    found = kept_of(options)
    return in_flight * found.kept_bytes + found.transient_bytes


def solve_stage(segments: Sequence[Sequence[Option]], in_flight: int, room_bytes: int) -> tuple[int, ...] | None:
    """The option of each segment, by number; None when nothing fits. Segments with equal options are alike."""
    first = tuple(min(range(len(options)), key=lambda o: (options[o].seconds, options[o].own_bytes)) for options in segments)
    if stage_bytes([s[o] for s, o in zip(segments, first, strict=True)], in_flight) <= room_bytes:
        return first
    model = cp_model.CpModel()
    x = [[model.new_bool_var(f"x{i}.{o}") for o in range(len(options))] for i, options in enumerate(segments)]
    own = []
    for taken, options in zip(x, segments, strict=True):
        model.add_exactly_one(taken)
        own.append(sum(option.own_bytes * var for option, var in zip(options, taken, strict=True)))
    together = []
    for name, size in {n: s for options in segments for o in options for n, s in o.shared.items()}.items():
        there = model.new_bool_var(name)
        together.append(size * there)
        for taken, options in zip(x, segments, strict=True):
            for option, var in zip(options, taken, strict=True):
                if name in option.shared:
                    model.add_implication(var, there)
    for i, (taken, options) in enumerate(zip(x, segments, strict=True)):
        needs = sum(option.transient_bytes * var for option, var in zip(options, taken, strict=True))
        model.add((in_flight - 1) * sum(own) + sum(own[: i + 1]) + in_flight * sum(together) + needs <= room_bytes)
        if i and segments[i - 1] == options:
            model.add(own[i - 1] <= own[i])
    model.add(in_flight * (sum(own) + sum(together)) <= room_bytes)
    total = sum(max(o.seconds for o in options) for options in segments) or 1.0
    model.minimize(
        sum(round(o.seconds / total * TICKS) * var for taken, options in zip(x, segments, strict=True)
            for o, var in zip(options, taken, strict=True))
    )  # fmt: skip
    solver = _solver()
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return tuple(next(o for o, var in enumerate(taken) if solver.boolean_value(var)) for taken in x)


def _solver() -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = SECONDS
    return solver
