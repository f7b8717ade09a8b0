"""Layout assignment with OR-Tools CP-SAT: one option per choice, conversions shared, least total cost.

Variables
    x[c, o]       option o is taken for choice c
    y[v, t]       value v (a result of a choice) has type t:           y = sum of x[c, o] over the options that yield t
    z[s, v, t]    some consumer at site s needs value v as t:          z >= x[c, o] for each such option
    w[s, v, a, t] value v is converted from a to t at site s:          w >= y[v, a] + z[s, v, t] - 1
Objective
    sum of option costs and of conversion costs: each conversion of a value at a site is paid once, however many read it.
Constraints
    exactly one option per choice; y[v, a] + z[s, v, t] <= 1 where no conversion from a to t exists.

A site is a kind of segment: conversions are placed in the function that consumes the value. Costs are seconds; they are scaled to
integers of 0.1 ns. One worker and a fixed seed make the answer a function of the problem alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ortools.sat.python import cp_model

from meshwright.plans.layout import Type

SCALE = 1e10
LARGEST = 1 << 50


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
    site: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Edge:
    """Operand `operand` of choice `consumer` is result `result` of choice `producer`."""

    producer: int
    result: int
    consumer: int
    operand: int


ConversionCost = Callable[[int, int, str, Type, Type], float | None]
"""(producer, result, site, source type, target type) -> seconds, None when there is no such conversion."""


class Unsolved(Exception):
    """No assignment exists under the pins."""


def scaled(cost_s: float) -> int:
    return min(round(cost_s * SCALE), LARGEST)


def solve_assignment(
    choices: tuple[Choice, ...], edges: tuple[Edge, ...], conversion_s: ConversionCost, time_limit_s: float = 30.0
) -> tuple[int, ...]:
    """Index of the option taken for each choice; the least total cost. Raises Unsolved when there is none."""
    model = cp_model.CpModel()
    taken = [[model.new_bool_var(f"x{c}.{o}") for o in range(len(choice.options))] for c, choice in enumerate(choices)]
    cost: list[tuple[cp_model.IntVar, int]] = []
    for choice, row in zip(choices, taken, strict=True):
        model.add_exactly_one(row)
        cost.extend((x, scaled(option.cost_s)) for x, option in zip(row, choice.options, strict=True))

    yielded: dict[tuple[int, int], dict[Type, list[cp_model.IntVar]]] = {}
    for c, choice in enumerate(choices):
        for o, option in enumerate(choice.options):
            for r, type_ in enumerate(option.yields):
                yielded.setdefault((c, r), {}).setdefault(type_, []).append(taken[c][o])
    needed: dict[tuple[str, int, int], dict[Type, list[cp_model.IntVar]]] = {}
    for edge in edges:
        consumer = choices[edge.consumer]
        table = needed.setdefault((consumer.site, edge.producer, edge.result), {})
        for o, option in enumerate(consumer.options):
            table.setdefault(option.needs[edge.operand], []).append(taken[edge.consumer][o])

    has = {
        (value, type_): one_of(model, variables, f"y{value}{type_}")
        for value, table in yielded.items()
        for type_, variables in table.items()
    }
    for (site, producer, result), table in needed.items():
        for target, variables in table.items():
            wanted = at_least_one(model, variables, f"z{site}{producer}.{result}{target}")
            for source in yielded[producer, result]:
                if source == target:
                    continue
                seconds = conversion_s(producer, result, site, source, target)
                have = has[(producer, result), source]
                if seconds is None:
                    model.add_bool_or(have.negated(), wanted.negated())
                elif scaled(seconds):
                    converted = model.new_bool_var(f"w{site}{producer}.{result}{source}{target}")
                    model.add_bool_or(have.negated(), wanted.negated(), converted)
                    cost.append((converted, scaled(seconds)))
    model.minimize(sum(variable * weight for variable, weight in cost if weight))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = time_limit_s
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise Unsolved(solver.status_name(status))
    return tuple(next(o for o, x in enumerate(row) if solver.boolean_value(x)) for row in taken)


def one_of(model: cp_model.CpModel, variables: list[cp_model.IntVar], name: str) -> cp_model.IntVar:
    """A variable equal to the sum of mutually exclusive ones."""
    if len(variables) == 1:
        return variables[0]
    total = model.new_bool_var(name)
    model.add(sum(variables) == total)
    return total


def at_least_one(model: cp_model.CpModel, variables: list[cp_model.IntVar], name: str) -> cp_model.IntVar:
    """A variable that is true when any of the given is."""
    if len(variables) == 1:
        return variables[0]
    total = model.new_bool_var(name)
    for variable in variables:
        model.add_implication(variable, total)
    return total
