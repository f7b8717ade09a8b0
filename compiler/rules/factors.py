"""Factors: what an op's dims mean, and the strategies that follow from them.

An op's rule names its factors, einsum-like: `linear` is "... k, n k, n -> ... n". Sharding one factor f on a mesh axis gives

    an operand that has f is S(dim of f)      an operand without f is R
    a result that has f is S(dim of f)        a result without f is P (f is summed over)

Sharding nothing leaves every operand and result I; every op may also run on R operands and give R results, since the
gradient of an op is linear in the gradient of its result. An op linear in an operand maps P to P.

Terms
    Call       an op with the Values of its operands and results
    Factors    the rule's answer: a factor name for every dim of every operand and result, and what is special
    Strategy   one way to run the op on one axis: the types of operands and results, and how it is lowered

Source of the theory: docs/layouts.md; the notation follows einsum and Shardy's sharding rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.compiler.graph import Op, Ref, Value
from meshwright.plans.layout import I, P, R, Type, shard

Dims = tuple[str, ...]
SectionTable = Mapping[int, Sequence[tuple[int, ...]]]
"""dim size -> the ways to see that size as a concatenation of sections, () for one piece."""


@dataclass(frozen=True)
class Call:
    """An op with its operands' and results' Values, in order of `op.operands` and `op.results`."""

    op: Op
    operands: tuple[Value, ...]
    results: tuple[Value, ...]

    def argument(self, index: int, name: str, default: object = None) -> object:
        """A literal or Ref by position, then by keyword, then the default."""
        if index < len(self.op.args):
            return self.op.args[index]
        return dict(self.op.kwargs).get(name, default)

    def slot(self, index: int, name: str) -> int | None:
        """Operand number of a tensor argument; None when it is absent or not a tensor."""
        wanted = self.argument(index, name)
        if not isinstance(wanted, Ref):
            return None
        slot = 0
        for i, argument in enumerate((*self.op.args, *(v for _, v in self.op.kwargs))):
            keyword = i - len(self.op.args)
            if i == index or (keyword >= 0 and self.op.kwargs[keyword][0] == name):
                return slot
            slot += len(Op("", (argument,), (), self.results).operands)
        return None


@dataclass(frozen=True)
class Factors:
    """Factor names per dim; "" is a dim that is not sharded.

    operands, results   one Dims each
    summed              factors that may be sharded although a result lacks them: that result is P
    additive            operands added to a summed result: P when the factor is summed (a row-parallel bias)
    blocked             factors that may not be sharded
    lowering            factor -> name of its special lowering; results of those are as in `lowered_results`
    lowered_results     factor -> result types, where they differ from S/P
    linear              sets of operands in which the op is jointly linear: P in, P out
    resection           (operand sections, result sections) by factor, where they differ (split of a packed dim)
    always              factor that is sharded wherever it divides: the op then never runs whole
    fallback            factor -> the factor that it stands in for: it is offered only where that one does not divide
    extra               strategies that no single factor per dim can say; left out where a dim does not divide
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    summed: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    blocked: frozenset[str] = frozenset()
    lowering: Mapping[str, str] = field(default_factory=dict)
    lowered_results: Mapping[str, tuple[Type, ...]] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    resection: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    extra: tuple[Strategy, ...] = ()
    fallback: Mapping[str, str] = field(default_factory=dict)
    always: str = ""


@dataclass(frozen=True)
class Strategy:
    """One way to run an op on one axis. `factor` is "" for I, "R" for replicated, "P" for partial, else the factor."""

    factor: str
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    lowering: str = ""


@dataclass(frozen=True)
class Refusal:
    """A factor that exists and may be sharded by the rule, but whose size does not divide."""

    factor: str
    size: int


def uniform(call: Call, type_: Type, name: str) -> Strategy:
    return Strategy(name, (type_,) * len(call.operands), (type_,) * len(call.results))


def without_gradient(strategy: Strategy, call: Call) -> Strategy:
    """R and I are the same thing for a value into which no gradient flows; I is written."""

    def settle(type_: Type, value: Value) -> Type:
        return I if type_ == R and not value.requires_grad else type_

    return Strategy(
        strategy.factor,
        tuple(settle(t, v) for t, v in zip(strategy.operands, call.operands, strict=True)),
        tuple(settle(t, v) for t, v in zip(strategy.results, call.results, strict=True)),
        strategy.lowering,
    )


def factor_sizes(call: Call, factors: Factors, factor: str) -> Iterator[int]:
    """Sizes of every dim that carries a factor."""
    for dims, value in zip((*factors.operands, *factors.results), (*call.operands, *call.results), strict=True):
        for name, size in zip(dims, value.shape, strict=True):
            if name == factor:
                yield size


def sharded(dims: Dims, factor: str, sections: tuple[int, ...]) -> Type | None:
    return shard(dims.index(factor), sections) if factor in dims else None


def factor_strategy(call: Call, factors: Factors, factor: str, sections: tuple[int, ...]) -> Strategy | None:
    """Shard one factor; None when a result lacks it and the rule does not sum over it."""
    before, after = factors.resection.get(factor, (sections, sections))
    summed = factor in factors.summed
    operands = tuple(
        sharded(dims, factor, before) or (P if summed and i in factors.additive else R)
        for i, dims in enumerate(factors.operands)
    )
    if factor in factors.lowered_results:
        return Strategy(factor, operands, factors.lowered_results[factor], factors.lowering.get(factor, ""))
    results = tuple(sharded(dims, factor, after) or (P if summed else None) for dims in factors.results)
    if any(t is None for t in results):
        return None
    return Strategy(factor, operands, tuple(t for t in results if t is not None), factors.lowering.get(factor, ""))


def linear_strategy(call: Call, chosen: frozenset[int]) -> Strategy:
    return Strategy("P", tuple(P if i in chosen else R for i in range(len(call.operands))), (P,) * len(call.results))


def consistent(call: Call, strategy: Strategy) -> bool:
    """Whether a value that is read twice is read as one type."""
    types = dict(zip(call.op.operands, strategy.operands, strict=True))
    return all(types[name] == t for name, t in zip(call.op.operands, strategy.operands, strict=True))


def divides(call: Call, strategy: Strategy, ranks: int) -> bool:
    """Whether every sharded dim, or every section of it, divides by the number of ranks."""
    pairs = zip((*strategy.operands, *strategy.results), (*call.operands, *call.results), strict=True)
    return not any(
        part % ranks for t, v in pairs if t.kind == "S" for part in (t.sections or (v.shape[t.dim],))
    )


def factor_names(factors: Factors) -> tuple[str, ...]:
    """All factors of a rule that may be sharded, in order of appearance."""
    named = dict.fromkeys(f for dims in (*factors.operands, *factors.results) for f in dims if f)
    return tuple(f for f in named if f not in factors.blocked)


def strategies(
    call: Call, factors: Factors | None, ranks: int, table: SectionTable, banned: frozenset[str] = frozenset()
) -> tuple[tuple[Strategy, ...], tuple[Refusal, ...]]:
    """Every legal strategy of a call on an axis of `ranks` ranks, and the factors refused for their size.

    `banned` factors are left out silently (the batch, or the sequence when sequence parallelism is off).
    """
    found = [] if never_whole(call, factors, ranks) else [uniform(call, I, ""), uniform(call, R, "R")]
    refused = []
    for factor in factor_names(factors) if factors else ():
        if factor in banned:
            continue
        first = factors.fallback.get(factor) if factors else None
        if factors and first and not any(size % ranks for size in factor_sizes(call, factors, first)):
            continue
        sizes = tuple(factor_sizes(call, factors, factor)) if factors else ()
        if any(size % ranks for size in sizes):
            refused.append(Refusal(factor, next(s for s in sizes if s % ranks)))
            continue
        for sections in sections_of(factors, factor, sizes, table) if factors else ():
            if any(part % ranks for part in sections):
                continue
            strategy = factor_strategy(call, factors, factor, sections) if factors else None
            if strategy is not None:
                found.append(strategy)
    found.extend(s for s in (factors.extra if factors else ()) if divides(call, s, ranks))
    if all(v.dtype.startswith(("float", "bfloat")) for v in call.results):
        found.extend(linear_strategy(call, chosen) for chosen in (factors.linear if factors else ()))
    settled = dict.fromkeys(without_gradient(s, call) for s in found if consistent(call, s))
    return tuple({(s.operands, s.results): s for s in reversed(settled)}.values())[::-1], tuple(refused)


def never_whole(call: Call, factors: Factors | None, ranks: int) -> bool:
    """Whether the rule has a factor that is sharded wherever it divides, and it does."""
    if factors is None or not factors.always or ranks == 1:
        return False
    return not any(size % ranks for size in factor_sizes(call, factors, factors.always))


def sections_of(
    factors: Factors, factor: str, sizes: tuple[int, ...], table: SectionTable
) -> Sequence[tuple[int, ...]]:
    """The ways to cut a factor into sections: those of its size, or what the rule itself demands."""
    if factor in factors.resection:
        return [factors.resection[factor][0]]
    if factor in factors.lowering:
        return ((),)
    return ((), *table.get(sizes[0], ())) if len(set(sizes)) == 1 else ((),)
