"""Every legal strategy of a call on an axis of some ranks: what follows from its factors.

    strategies(call, factors, ranks, table)     the strategies, and the factors refused for their size
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.compiler.rules.factors import (
    Call,
    Factors,
    Strategy,
    consistent,
    divides,
    factor_sizes,
    linear_strategy,
    uniform,
    without_gradient,
)
from meshwright.compiler.rules.sections import SectionTable, Way, dim_parts, indivisible, ways
from meshwright.plans.layout import I, P, R, Type, shard


@dataclass(frozen=True)
class Refusal:
    """A factor that exists and may be sharded by the rule, but whose size does not divide."""

    factor: str
    size: int


def strategies(
    call: Call, factors: Factors | None, ranks: int, table: SectionTable, banned: frozenset[str] = frozenset()
) -> tuple[tuple[Strategy, ...], tuple[Refusal, ...]]:
    """Every legal strategy of a call on an axis of `ranks` ranks, and the factors refused for their size.

    An op that is not torch's and has no rule may have a backward of its own, not linear in the gradient: it runs whole, and ranks'
    parts of a gradient do not go through it.

    `banned` factors are left out silently (the batch, or the sequence when sequence parallelism is off).
    """
    always = factors.always if factors is not None and ranks > 1 and factors.always not in banned else ""
    never_whole = factors is not None and bool(always) and splits(call, factors, always, ranks)
    found = [] if never_whole else [uniform(call, I, "")]
    if not never_whole and (factors is not None or call.op.target.startswith("aten.")):
        found.append(uniform(call, R, "R"))
    refused: list[Refusal] = []
    if factors is not None:
        for factor in factors.names:
            if factor not in banned and not replaced(call, factors, factor, ranks):
                offered, refusal = factor_strategies(call, factors, factor, ranks, table)
                found += offered
                refused += refusal
        found += extras(call, factors, ranks, banned)
        found += [linear_strategy(call, chosen) for chosen in factors.linear if chosen]
    settled = dict.fromkeys(without_gradient(s, call) for s in found if consistent(call, s))
    return tuple({(s.operands, s.results): s for s in reversed(settled)}.values())[::-1], tuple(refused)


def splits(call: Call, factors: Factors, factor: str, ranks: int) -> bool:
    """Whether every dim of a factor divides."""
    return not any(size % ranks for size in factor_sizes(call, factors, factor))


def replaced(call: Call, factors: Factors, factor: str, ranks: int) -> bool:
    """Whether a factor only stands in for another one, which divides."""
    first = factors.fallback.get(factor)
    return first is not None and splits(call, factors, first, ranks)


def factor_strategies(
    call: Call, factors: Factors, factor: str, ranks: int, table: SectionTable
) -> tuple[list[Strategy], list[Refusal]]:
    """The strategies that shard one factor, one for each way to cut it; a refusal when no way divides."""
    legal = ways(call, factors, factor, table)
    fitting = [way for way in legal if indivisible(call, factors, factor, way, ranks) is None]
    if not fitting:
        size = next((n for n in factor_sizes(call, factors, factor) if n % ranks), None)
        size = size or next((n for way in legal for n in [indivisible(call, factors, factor, way, ranks)] if n), None)
        return [], [Refusal(factor, size)] if size else []
    made = (factor_strategy(call, factors, factor, way) for way in fitting)
    return [strategy for strategy in made if strategy is not None], []


def factor_strategy(call: Call, factors: Factors, factor: str, way: Way) -> Strategy | None:
    """Shard one factor; None when a result lacks it and the rule does not sum over it."""
    cut_dims = {slot: shard(dim, parts) for slot, dim, parts in dim_parts(call, factors, factor, way) or ()}
    summed = factor in factors.summed
    operands = tuple(
        cut_dims.get(slot) or (P if summed and slot in factors.additive else R) for slot in range(len(call.operands))
    )
    lowering = factors.lowering.get(factor, "")
    if factor in factors.lowered_results:
        return Strategy(factor, operands, factors.lowered_results[factor], lowering)
    results: list[Type] = []
    for slot in range(len(call.operands), len(call.values)):
        type_ = cut_dims.get(slot) or (P if summed else None)
        if type_ is None:
            return None
        results.append(type_)
    return Strategy(factor, operands, tuple(results), lowering)


def extras(call: Call, factors: Factors, ranks: int, banned: frozenset[str]) -> Iterator[Strategy]:
    """The rule's own strategies that divide, and are neither banned nor replaced."""
    for strategy in factors.extra:
        if strategy.factor.rpartition(".")[2] in banned or replaced(call, factors, strategy.factor, ranks):
            continue
        if divides(call, strategy, ranks):
            yield strategy
