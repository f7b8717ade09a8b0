"""Layout assignment: one option per choice, conversions shared, least total cost.

The problem
    choices      each takes one of its options; an option has a cost, the types its operands must have and its results have
    edges        operand `operand` of a choice is result `result` of another, converted at a site where the types differ
    objective    sum of option costs and of conversion costs: each conversion of a value at a site is paid once, however many read it
    a site       is where a conversion is written: the function of a kind, for all its consumers together, or the call of one

`solve_assignment` solves it exactly in two ways. Costs are seconds, scaled to whole multiples of 0.1 ns.

As tables (`layout_factors`, solved by passes.least_sum): a variable per choice, a table of option costs each, and for a value at a
site a table over the producer and all consumers there. Where that table would be large, the set of needed types is a variable of its
own, which every consumer restricts. Programs are nearly trees, so this takes a second for thousands of ops.

As a 0-1 program for OR-Tools CP-SAT (`solve_as_program`), when tables do not suffice:
    x[c, o]       option o is taken for choice c
    y[v, t]       value v (a result of a choice) has type t:           y = sum of x[c, o] over the options that yield t
    z[s, v, t]    some consumer at site s needs value v as t:          z >= x[c, o] for each such option
    w[s, v, a, t] value v is converted from a to t at site s:          w <= y[v, a]
    exactly one option per choice; a need is met as it is or by a conversion: z[s, v, t] <= y[v, t] + sum over a of w[s, v, a, t], over the
    conversions that exist. This form has a nearly integral linear relaxation. One worker and a fixed seed make the answer a
    function of the problem alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, prod

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from meshwright.passes.least_sum import Factor, Impossible, Table, TooHard, least_sum
from meshwright.plans.layout import Type

SCALE = 1e10
LARGEST = 1 << 50
GAP = 1e-7
EFFORT = 30.0
LARGEST_DIRECT = 200_000
LARGEST_SETS = 4096


@dataclass(frozen=True)
class Option:
    """One way to make a choice: its cost, the types that its results have and its operands must have."""

    cost_s: float
    needs: tuple[Type, ...]
    yields: tuple[Type, ...]


@dataclass(frozen=True)
class Choice:
    """An op of a kind (or a parameter: an option without needs)."""

    name: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Edge:
    """Operand `operand` of choice `consumer` is result `result` of choice `producer`, converted at `site`."""

    producer: int
    result: int
    consumer: int
    operand: int
    site: str


ConversionCost = Callable[[int, int, str, Type, Type], float | None]
"""(producer, result, site, source type, target type) -> seconds, None when there is no such conversion."""


class Unsolved(Exception):
    """No assignment exists under the pins."""


def solve_assignment(choices: tuple[Choice, ...], edges: tuple[Edge, ...], conversion_s: ConversionCost) -> tuple[int, ...]:
    """Index of the option taken for each choice; the least total cost. Raises Unsolved when there is none."""
    try:
        sizes, factors = layout_factors(choices, edges, conversion_s)
        return least_sum(sizes, factors)[: len(choices)]
    except Impossible:
        raise Unsolved("no assignment") from None
    except TooHard:
        return solve_as_program(choices, edges, conversion_s)


@dataclass(frozen=True)
class Use:
    """A value at one site: cost[a, t] of having the type of producer's option a as target t, and for every consumer the targets (bits) that
    each of its options needs."""

    producer: int
    consumers: tuple[int, ...]
    cost: Table
    masks: tuple[NDArray[np.int64], ...]

    @property
    def size(self) -> int:
        """Entries of one table over all of them."""
        return prod((len(self.cost), *(len(mask) for mask in self.masks)))

    def priced(self, needed: NDArray[np.int64]) -> Table:
        """What sets of needed targets cost, by the producer's option (first axis)."""
        total = np.zeros((self.cost.shape[0], *needed.shape))
        for t in range(self.cost.shape[1]):
            column = self.cost[:, t].reshape(-1, *[1] * needed.ndim)
            total += np.where((needed >> t & 1).astype(bool), column, 0.0)
        return total

    def together(self) -> Factor:
        """One table over the producer and the consumers."""
        needed = reduce(lambda left, right: left[..., None] | right, self.masks)
        return Factor((self.producer, *self.consumers), self.priced(needed))

    def sets(self) -> NDArray[np.int64]:
        """Every set of targets that the consumers together can need."""
        found = {0}
        for mask in self.masks:
            found = {known | int(own) for known in found for own in mask}
            if len(found) > LARGEST_SETS:
                raise TooHard
        return np.array(sorted(found))

    def by_set(self, variable: int, sets: NDArray[np.int64]) -> Iterator[Factor]:
        """The same with the set of needed targets as a variable: it holds what each consumer needs."""
        yield Factor((self.producer, variable), self.priced(sets))
        for consumer, mask in zip(self.consumers, self.masks, strict=True):
            held = (sets[None, :] & mask[:, None]) == mask[:, None]
            yield Factor((consumer, variable), np.where(held, 0.0, inf))


def layout_factors(
    choices: Sequence[Choice], edges: Sequence[Edge], conversion_s: ConversionCost
) -> tuple[list[int], list[Factor]]:
    """The problem as tables: sizes of the variables, the choices first, and factors."""
    sizes = [len(choice.options) for choice in choices]
    factors = [Factor((c,), np.array([float(scaled(o.cost_s)) for o in choice.options])) for c, choice in enumerate(choices)]
    for use in uses(choices, edges, conversion_s):
        if use.size <= LARGEST_DIRECT or len(use.consumers) == 1:
            factors.append(use.together())
            continue
        sets = use.sets()
        factors.extend(use.by_set(len(sizes), sets))
        sizes.append(len(sets))
    return sizes, factors


def uses(choices: Sequence[Choice], edges: Sequence[Edge], conversion_s: ConversionCost) -> Iterator[Use]:
    """Every value at every site."""
    groups: dict[tuple[int, int, str], list[Edge]] = {}
    for edge in edges:
        groups.setdefault((edge.producer, edge.result, edge.site), []).append(edge)
    for (producer, result, site), group in groups.items():
        options = {c: choices[c].options for c in dict.fromkeys(edge.consumer for edge in group)}
        targets = list(dict.fromkeys(o.needs[e.operand] for e in group for o in options[e.consumer]))
        bit = {target: 1 << place for place, target in enumerate(targets)}
        masks = {c: np.zeros(len(options[c]), dtype=np.int64) for c in options}
        for edge in group:
            masks[edge.consumer] |= np.array([bit[o.needs[edge.operand]] for o in options[edge.consumer]])

        def cost(source: Type, target: Type, place: tuple[int, int, str] = (producer, result, site)) -> float:
            seconds = 0.0 if source == target else conversion_s(*place, source, target)
            return inf if seconds is None else float(scaled(seconds))

        rows = [[cost(option.yields[result], target) for target in targets] for option in choices[producer].options]
        yield Use(producer, tuple(options), np.array(rows), tuple(masks.values()))


def solve_as_program(choices: tuple[Choice, ...], edges: tuple[Edge, ...], conversion_s: ConversionCost) -> tuple[int, ...]:
    """The same with CP-SAT."""
    model = Model()
    taken = [[model.variable() for _ in choice.options] for choice in choices]
    for choice, row in zip(choices, taken, strict=True):
        model.exactly_one(row)
        for x, option in zip(row, choice.options, strict=True):
            model.cost[x] = option.cost_s
    has = yields(model, choices, taken)
    for (site, producer, result), table in needs(choices, edges, taken).items():
        sources = has[producer, result]
        for target, variables in table.items():
            wanted = model.any_of(variables)
            ways: list[int] = []
            for source, have in sources.items():
                if source == target:
                    ways.append(have)
                    continue
                seconds = conversion_s(producer, result, site, source, target)
                if seconds is not None:
                    converted = model.variable()
                    model.cost[converted] = seconds
                    model.implies(converted, have)
                    ways.append(converted)
            model.implies_any(wanted, ways)
    values = model.solve()
    return tuple(next(o for o, x in enumerate(row) if values[x]) for row in taken)


Variables = dict[Type, list[int]]


def yields(model: Model, choices: tuple[Choice, ...], taken: list[list[int]]) -> dict[tuple[int, int], dict[Type, int]]:
    """y: for every result of every choice, a variable per type."""
    found: dict[tuple[int, int], Variables] = {}
    for c, choice in enumerate(choices):
        for o, option in enumerate(choice.options):
            for r, type_ in enumerate(option.yields):
                found.setdefault((c, r), {}).setdefault(type_, []).append(taken[c][o])
    return {value: {t: model.sum_of(variables) for t, variables in table.items()} for value, table in found.items()}


def needs(
    choices: tuple[Choice, ...], edges: tuple[Edge, ...], taken: list[list[int]]
) -> dict[tuple[str, int, int], Variables]:
    """For every value at every site, the option variables that need it, by type."""
    found: dict[tuple[str, int, int], Variables] = {}
    for edge in edges:
        table = found.setdefault((edge.site, edge.producer, edge.result), {})
        for o, option in enumerate(choices[edge.consumer].options):
            table.setdefault(option.needs[edge.operand], []).append(taken[edge.consumer][o])
    return found


class Model:
    """A 0-1 program under construction: variables by number, rows as {variable: coefficient} between bounds."""

    def __init__(self) -> None:
        self.cost: dict[int, float] = {}
        self.model = cp_model.CpModel()
        self.variables: list[cp_model.IntVar] = []

    def variable(self) -> int:
        self.variables.append(self.model.new_bool_var(""))
        return len(self.variables) - 1

    def exactly_one(self, variables: list[int]) -> None:
        self.model.add_exactly_one(self.variables[v] for v in variables)

    def implies(self, cause: int, effect: int) -> None:
        self.model.add_implication(self.variables[cause], self.variables[effect])

    def implies_any(self, cause: int, effects: list[int]) -> None:
        self.model.add_bool_or(self.variables[cause].negated(), *(self.variables[v] for v in effects))

    def sum_of(self, variables: list[int]) -> int:
        """A variable equal to the sum of mutually exclusive ones."""
        if len(variables) == 1:
            return variables[0]
        total = self.variable()
        self.model.add(sum(self.variables[v] for v in variables) == self.variables[total])
        return total

    def any_of(self, variables: list[int]) -> int:
        """A variable that is 1 when any of the given is."""
        if len(variables) == 1:
            return variables[0]
        total = self.variable()
        for variable in variables:
            self.implies(variable, total)
        return total

    def solve(self) -> list[bool]:
        """Values of all variables."""
        self.model.minimize(sum(self.variables[v] * scaled(c) for v, c in self.cost.items() if scaled(c)))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.linearization_level = 2
        solver.parameters.relative_gap_limit = GAP
        solver.parameters.max_deterministic_time = EFFORT
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            raise Unsolved(solver.status_name(status))
        return [solver.boolean_value(v) for v in self.variables]


def scaled(cost_s: float) -> int:
    return min(round(cost_s * SCALE), LARGEST)
