"""Least sum of tables over discrete variables, exactly: dominated values, elimination of variables, branching on what is left.

Given variables v with `sizes[v]` values each, and factors (scope, table), find the values x that minimise

    sum over factors f of table_f[x restricted to scope_f]          (infinite entries: not allowed)

Steps, all exact
    dominated     value a of v goes when some other value b is no dearer whatever the neighbours of v do:
                  sum over the factors of v of max over the rest of (f[b, rest] - f[a, rest]) <= 0     (Goldstein, Biophys. J. 66(5), 1994)
    eliminated    v is replaced by one factor over its neighbours: min over v of the sum of v's factors. The value that attains it is
                  kept by neighbours' values, for the way back     (bucket elimination: Dechter, Artificial Intelligence 113, 1999)
    branched      when the smallest joint table has more than LARGEST_TABLE entries, each value of the variable with most neighbours is
                  tried, and tables are at hand again; a branch ends when the least entries of its factors sum to no less than the best
                  solution known

A variable with a small joint table goes first. A graph that is nearly a tree, as a program is, never has a large one. Sums are of
whole numbers below 2^53, which do not depend on their order. Ties go to one value always, so the answer is a function of the problem
alone; so is the effort, counted in table entries, after which TooHard is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
LARGEST_TABLE = 1 << 20
LARGEST_COMPARED = 1 << 18
MOST_COMPARED = 16
"""Factors of a variable up to which it is looked for dominated values."""
EFFORT = 1 << 37
"""Table entries before TooHard, under a minute. Layers of 400 to 700 ops, 13,000 options in all, were solved in 3 to 6 s within 1 << 34."""


@dataclass(frozen=True)
class Factor:
    """Costs by the values of the variables in `scope`, an axis each, in that order."""

    scope: tuple[int, ...]
    table: Table


class Impossible(Exception):
    """Every assignment costs infinitely much, or no less than what is known."""


class TooHard(Exception):
    """The effort is spent."""


@dataclass
class Effort:
    """Table entries that may still be computed."""

    left: int

    def spend(self, entries: int) -> None:
        self.left -= entries
        if self.left < 0:
            raise TooHard


@dataclass(frozen=True)
class Eliminated:
    """A variable that is gone: its best value by its neighbours', as places among the values that all had at the time."""

    variable: int
    scope: tuple[int, ...]
    best: NDArray[np.int16]
    values: tuple[NDArray[np.int64], ...]

    def value(self, answer: Sequence[int]) -> int:
        """The best value for what the neighbours have."""
        *others, own = self.values
        places = (int(np.searchsorted(values, answer[u])) for u, values in zip(self.scope, others, strict=True))
        return int(own[self.best[tuple(places)]])


class Reduction:
    """The problem while it shrinks: remaining variables, their remaining values, factors by number, and what is paid for certain."""

    def __init__(self, values: Sequence[NDArray[np.int64]], alive: Iterable[int], factors: Iterable[Factor], paid: float) -> None:
        self.values = list(values)
        self.alive = dict.fromkeys(alive)
        self.factors: dict[int, Factor] = {}
        self.of: dict[int, dict[int, None]] = {v: {} for v in self.alive}
        self.gone: list[Eliminated] = []
        self.paid = paid
        self.made = 0
        for factor in factors:
            self.add(factor)

    def add(self, factor: Factor) -> None:
        """Adds a factor; into one that has its variables, when there is one."""
        if not factor.scope:
            self.paid += float(factor.table)
            return
        own = set(factor.scope)
        for number in min((self.of[v] for v in factor.scope), key=len):
            known = self.factors[number]
            if own.issubset(known.scope):
                self.factors[number] = Factor(known.scope, known.table + spread(factor, known.scope))
                return
        self.factors[self.made] = factor
        for v in factor.scope:
            self.of[v][self.made] = None
        self.made += 1

    def remove(self, number: int) -> Factor:
        factor = self.factors.pop(number)
        for v in factor.scope:
            del self.of[v][number]
        return factor

    def neighbours(self, v: int) -> tuple[int, ...]:
        """Variables that share a factor with v, in order."""
        return tuple(sorted({u for number in self.of[v] for u in self.factors[number].scope} - {v}))

    def joint_size(self, v: int) -> int:
        """Entries of the table that eliminating v makes; one more than LARGEST_TABLE where it has more."""
        seen, size = {v}, len(self.values[v])
        for number in self.of[v]:
            for u in self.factors[number].scope:
                if u not in seen:
                    seen.add(u)
                    size *= len(self.values[u])
            if size > LARGEST_TABLE:
                return LARGEST_TABLE + 1
        return size

    def eliminate(self, v: int) -> tuple[int, ...]:
        """Takes v out; its neighbours."""
        rest = self.neighbours(v)
        scope = (*rest, v)
        joint = np.zeros([len(self.values[u]) for u in scope])
        for number in tuple(self.of[v]):
            joint += spread(self.remove(number), scope)
        best = joint.argmin(axis=-1)
        self.gone.append(Eliminated(v, rest, best.astype(np.int16), tuple(self.values[u] for u in scope)))
        del self.alive[v]
        self.add(Factor(rest, np.take_along_axis(joint, best[..., None], axis=-1)[..., 0]))
        return rest

    def keep(self, v: int, places: Sequence[int]) -> None:
        """Leaves v only the values at these places."""
        self.values[v] = self.values[v][list(places)]
        for number in self.of[v]:
            factor = self.factors[number]
            self.factors[number] = Factor(factor.scope, factor.table.take(places, axis=factor.scope.index(v)))

    def fix(self, v: int, place: int) -> None:
        """Gives v one value and takes it out of its factors."""
        value = self.values[v][place : place + 1]
        self.gone.append(Eliminated(v, (), np.zeros((), dtype=np.int16), (value,)))
        del self.alive[v]
        for number in tuple(self.of[v]):
            factor = self.remove(number)
            axis = factor.scope.index(v)
            self.add(Factor(factor.scope[:axis] + factor.scope[axis + 1 :], np.asarray(factor.table.take(place, axis=axis))))

    def drop_dominated(self, v: int) -> bool:
        """Takes out values of v that another is as good as, whatever its neighbours do; whether any was."""
        size = len(self.values[v])
        tables = [self.factors[number] for number in self.of[v]]
        if size < 2 or len(tables) > MOST_COMPARED or any(f.table.size * size > LARGEST_COMPARED for f in tables):
            return False
        rows = [np.moveaxis(f.table, f.scope.index(v), 0).reshape(size, -1) for f in tables]
        kept = undominated(rows, size)
        if len(kept) < size:
            self.keep(v, kept)
        return len(kept) < size

    def bound(self) -> float:
        """What the rest costs at least."""
        return self.paid + sum(float(f.table.min()) for f in self.factors.values())


def spread(factor: Factor, scope: Sequence[int]) -> Table:
    """The factor's table with an axis for each variable of a larger scope."""
    order = sorted(range(len(factor.scope)), key=lambda axis: scope.index(factor.scope[axis]))
    table = factor.table.transpose(order)
    own = set(factor.scope)
    lengths = iter(table.shape)
    return table.reshape([next(lengths) if u in own else 1 for u in scope])


def undominated(rows: Sequence[Table], size: int) -> list[int]:
    """Values that remain when each that is impossible, or that another remaining one dominates, is taken out, the last first.

    `rows` are the factors of one variable, its values along axis 0.
    """
    possible = np.ones(size, dtype=bool)
    for row in rows:
        possible &= np.isfinite(row).any(axis=1)
    kept = [int(a) for a in np.flatnonzero(possible)]
    if not kept:
        raise Impossible
    dearer = sum((excess(row[kept]) for row in rows), np.zeros((len(kept), len(kept))))
    left = list(range(len(kept)))
    for a in reversed(range(len(kept))):
        if any(dearer[b, a] <= 0 for b in left if b != a):
            left.remove(a)
    return [kept[a] for a in left]


def excess(row: Table) -> Table:
    """excess[b, a]: how much dearer value b can be than value a, where a is possible at all."""
    with np.errstate(invalid="ignore"):
        difference = row[:, None, :] - row[None, :, :]
    difference[:, ~np.isfinite(row)] = -inf
    found: Table = difference.max(axis=2)
    return found


def least_sum(sizes: Sequence[int], factors: Sequence[Factor], effort: int = EFFORT) -> tuple[int, ...]:
    """A value for each variable. Raises Impossible when no assignment is allowed, TooHard when the effort does not suffice."""
    state = Reduction([np.arange(size) for size in sizes], range(len(sizes)), factors, 0.0)
    answer = [0] * len(sizes)
    search(state, answer, inf, Effort(effort))
    return tuple(answer)


def search(state: Reduction, answer: list[int], ceiling: float, effort: Effort) -> float:
    """Writes the best values into `answer`; their cost, which is less than `ceiling`. Raises Impossible when there are none."""
    shrink(state, ceiling, effort)
    found = state.paid
    if state.alive:
        found = branch(state, answer, ceiling, effort)
    if not found < ceiling:
        raise Impossible
    for step in reversed(state.gone):
        answer[step.variable] = step.value(answer)
    return found


def branch(state: Reduction, answer: list[int], ceiling: float, effort: Effort) -> float:
    """Tries every value of the variable with most neighbours, the most promising first."""
    v = max(state.alive, key=lambda u: (len(state.neighbours(u)), len(state.values[u])))
    branches = []
    for place in range(len(state.values[v])):
        part = Reduction(state.values, state.alive, state.factors.values(), state.paid)
        part.fix(v, place)
        branches.append((part.bound(), place, part))
    found = ceiling
    trial = list(answer)
    for bound, _, part in sorted(branches, key=lambda b: b[:2]):
        if bound >= found:
            break
        try:
            found = search(part, trial, found, effort)
        except Impossible:
            continue
        answer[:] = trial
    return found


def shrink(state: Reduction, ceiling: float, effort: Effort) -> None:
    """Drops and eliminates until nothing is left, or only what has no small table. Impossible when nothing below `ceiling` is left."""
    pending = dict.fromkeys(state.alive)
    while pending:
        v = next(iter(pending))
        del pending[v]
        effort.spend(len(state.values[v]) * sum(state.factors[number].table.size for number in state.of[v]))
        if state.drop_dominated(v):
            pending.update(dict.fromkeys((*state.neighbours(v), v)))
    if state.bound() >= ceiling:
        raise Impossible
    queue = [(state.joint_size(v), v) for v in state.alive]
    heapify(queue)
    while queue:
        size, v = heappop(queue)
        if v not in state.alive:
            continue
        now = state.joint_size(v)
        if now > size:
            heappush(queue, (now, v))
            continue
        if now > LARGEST_TABLE:
            return
        effort.spend(now)
        for u in state.eliminate(v):
            state.drop_dominated(u)
            heappush(queue, (state.joint_size(u), u))
