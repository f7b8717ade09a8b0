"""From a plan's layouts to one strategy per op class: the "apply" half of layouts.

A plan names the layout of every op's (first) result, per kind, and the storage layout of every parameter. The strategy of an op is the
legal one with that result type; where several are, the one whose operands need the least communication. What is not legal is an
InputError that names the plan's key.

    legal_strategies(kinds, ...)   every strategy of every op class on one axis, with the sizes that were refused
    assign(kinds, ...)             Assignment for given result and parameter types
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.compiler.experts import EP, Region, expert_paths, region_of
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.labels import BATCH, HIDDEN, SEQUENCE, banned_factors, label_values
from meshwright.compiler.rules.factors import Strategy
from meshwright.compiler.rules.sections import section_table
from meshwright.compiler.rules.strategies import Refusal, strategies
from meshwright.compiler.rules.table import factors_of
from meshwright.plans.errors import InputError
from meshwright.plans.layout import I, Layout, Type, conversion, shard

OpClass = tuple[str, int]
TRAFFIC = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


@dataclass(frozen=True)
class Legal:
    """Legal strategies per op class on one axis, refused factors, and op classes whose op has no rule."""

    axis: str
    ranks: int
    strategies: Mapping[OpClass, tuple[Strategy, ...]]
    refusals: Mapping[OpClass, tuple[Refusal, ...]]
    without_rule: tuple[OpClass, ...]


@dataclass(frozen=True)
class Assignment:
    """One strategy per op class and one type per parameter, on one axis; and the regions that run where their experts are."""

    kinds: Kinds
    axis: str
    ranks: int
    strategies: Mapping[OpClass, Strategy]
    parameters: Mapping[str, Type]
    regions: Mapping[str, tuple[Region, ...]] = field(default_factory=dict)

    @cached_property
    def types(self) -> dict[str, Type]:
        """Type of every value of the graph: op results, parameters by graph name; all else is I."""
        found = {p.value.name: self.parameters.get(p.path, I) for p in self.kinds.graph.parameters}
        for i, op_class in self.kinds.class_of_op.items():
            for value, type_ in zip(self.kinds.graph.ops[i].results, self.strategies[op_class].results, strict=True):
                found[value.name] = type_
        return found

    def type_of(self, name: str) -> Type:
        return self.types.get(name, I)

    @cached_property
    def expert_paths(self) -> frozenset[str]:
        """Parameters that are sliced over ep."""
        return expert_paths(self.regions)

    def parameter_layout(self, path: str) -> Layout:
        """Storage layout of a parameter on all axes."""
        own = {EP: shard(0)} if path in self.expert_paths else {}
        return Layout.of({self.axis: self.parameters.get(path, I), **own})

    def region(self, kind: str, position: int) -> Region | None:
        """The region that an op class runs in."""
        return region_of(self.regions, kind, position)

    def entry_type(self, kind: str, place: int) -> Type:
        """The type in which a kind's function takes its external number `place`."""
        return self.type_of(self.kinds.entries[kind, place][-1])

    def entry_types(self, kind: str) -> dict[str, Type]:
        """Types of the representative's externals, as its function takes them."""
        names = self.kinds.externals(self.kinds.by_name[kind].representative)
        return {name: self.entry_type(kind, place) for place, name in enumerate(names)}


def legal_strategies(
    kinds: Kinds,
    axis: str,
    ranks: int,
    sequence_parallel: bool,
    regions: Mapping[str, tuple[Region, ...]] | None = None,
) -> Legal:
    """Every legal strategy of every op class.

    The batch is never sharded here: that is dp's work. Neither is the hidden size of what passes between layers, which every
    norm would have to put together again; nor the experts or rows of a region, which are on ep.
    """
    graph = kinds.graph
    labels = label_values(kinds)
    banned = frozenset({BATCH, HIDDEN} if sequence_parallel else {BATCH, HIDDEN, SEQUENCE})
    legal: dict[OpClass, tuple[Strategy, ...]] = {}
    refusals: dict[OpClass, tuple[Refusal, ...]] = {}
    without_rule = []
    for name, kind in kinds.by_name.items():
        calls = [kinds.call(graph.ops[i]) for i in kind.representative.ops]
        factors_of_calls = [factors_of(call) for call in calls]
        table = section_table(zip(calls, factors_of_calls, strict=True))
        for position, (call, factors) in enumerate(zip(calls, factors_of_calls, strict=True)):
            if factors is None:
                without_rule.append((name, position))
            refused_factors = banned_factors(call, labels, banned)
            found, refusals[name, position] = strategies(call, factors, ranks, table, refused_factors)
            in_region = any(position in region.marked for region in (regions or {}).get(name, ()))
            legal[name, position] = tuple(s for s in found if keeps_rows(s)) if in_region else found
    return Legal(axis, ranks, legal, refusals, tuple(without_rule))


def keeps_rows(strategy: Strategy) -> bool:
    """Whether a strategy leaves dim 0 of everything whole."""
    return not any(t.kind == "S" and t.dim == 0 for t in (*strategy.operands, *strategy.results))


def traffic(source: Type, target: Type) -> int:
    """A rough weight of a conversion, to choose between strategies with the same result."""
    pair = conversion(source, target)
    return TRAFFIC.get(pair.forward, 0) + TRAFFIC.get(pair.backward, 0)


def assign(
    kinds: Kinds,
    legal: Legal,
    results: Mapping[OpClass, Type],
    parameters: Mapping[str, Type],
    regions: Mapping[str, tuple[Region, ...]] | None = None,
) -> Assignment:
    """The strategies that a plan means. InputError when a result type is not legal for its op."""
    graph = kinds.graph
    declared: dict[str, Type] = {p.value.name: parameters.get(p.path, I) for p in graph.parameters}
    declared.update((r.name, results[c]) for i, c in kinds.class_of_op.items() for r in graph.ops[i].results)
    chosen: dict[OpClass, Strategy] = {}
    for name, kind in kinds.by_name.items():
        entered = enumerate(kinds.externals(kind.representative))
        known = {**declared, **{n: declared.get(kinds.entries[name, place][-1], I) for place, n in entered}}
        for position, i in enumerate(kind.representative.ops):
            op = graph.ops[i]
            wanted = results[name, position]
            fitting = [s for s in legal.strategies[name, position] if s.results[0] == wanted]
            if not fitting:
                raise InputError(illegal(kinds, legal, (name, position), wanted))
            best = min(
                fitting,
                key=lambda s: sum(
                    traffic(known.get(n, I), t) for n, t in dict(zip(op.operands, s.operands, strict=True)).items()
                ),
            )
            chosen[name, position] = best
            known.update((r.name, t) for r, t in zip(op.results, best.results, strict=True))
    return Assignment(kinds, legal.axis, legal.ranks, chosen, parameters, regions or {})


def illegal(kinds: Kinds, legal: Legal, op_class: OpClass, wanted: Type) -> str:
    """The error for a layout that an op cannot have."""
    kind, position = op_class
    module, name = kinds.keys[kind][position]
    options = sorted({str(s.results[0]) for s in legal.strategies[op_class]})
    shape = list(kinds.op(kind, position).results[0].shape)
    return (
        f"plan.yaml: kinds.{kind}.layouts.{module}: {name} of shape {shape} cannot be {wanted}@{legal.axis} "
        f"on {legal.axis}={legal.ranks}; it can be {', '.join(options)}. After a change of mesh, seq or micro_batch, leave kinds out"
    )
