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

How a factor may be cut by sections is in rules.sections. Integers and bools are never P.
Source of the theory: docs/layouts.md; the notation follows einsum and Shardy's sharding rules. How rules are read: docs/rules.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from meshwright.compiler.graph import Op, Ref, Value
from meshwright.plans.layout import I, P, R, Type

Dims = tuple[str, ...]
Window = tuple[int, int]


@dataclass(frozen=True)
class Call:
    """An op with its operands' and results' Values, in order of `op.operands` and `op.results`."""

    op: Op
    operands: tuple[Value, ...]
    results: tuple[Value, ...]

    @property
    def values(self) -> tuple[Value, ...]:
        """Operands, then results."""
        return (*self.operands, *self.results)

    def argument(self, index: int, name: str, default: object = None) -> object:
        """A literal or Ref by position, then by keyword, then the default."""
        if index < len(self.op.args):
            return self.op.args[index]
        return dict(self.op.kwargs).get(name, default)

    def integer(self, index: int, name: str, default: int) -> int:
        """An integer argument; the default where it is absent or None."""
        value = self.argument(index, name, default)
        return default if value is None else int(str(value))

    def integers(self, index: int, name: str) -> list[int]:
        """An argument that is an integer or a list of them, as a list; empty where it is absent or None."""
        value = self.argument(index, name)
        if isinstance(value, (list, tuple)):
            return [int(str(item)) for item in value]
        return [] if value is None else [int(str(value))]

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
    windows             factor -> where the dim of each operand and result lies in the whole that the factor is, as [start, stop); None for
                        one without the factor. Where a factor has no windows, all its dims are the whole, in units that may differ
    units               factor -> how many pieces it has that may not be cut (groups of channels)
    contiguous          factors that may not be cut by sections
    always              factor that is sharded wherever it divides: the op then never runs whole
    fallback            factor -> the factor that it stands in for: it is offered only where that one does not divide
    extra               strategies that no single factor per dim can say; left out where a dim does not divide. One named `packed.f` belongs
                        to factor f
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    summed: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    blocked: frozenset[str] = frozenset()
    lowering: Mapping[str, str] = field(default_factory=dict)
    lowered_results: Mapping[str, tuple[Type, ...]] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    windows: Mapping[str, tuple[Window | None, ...]] = field(default_factory=dict)
    units: Mapping[str, int] = field(default_factory=dict)
    contiguous: frozenset[str] = frozenset()
    extra: tuple[Strategy, ...] = ()
    fallback: Mapping[str, str] = field(default_factory=dict)
    always: str = ""

    @property
    def dims(self) -> tuple[Dims, ...]:
        """Operands, then results."""
        return (*self.operands, *self.results)

    @property
    def names(self) -> tuple[str, ...]:
        """All factors that may be sharded, in order of appearance."""
        named = dict.fromkeys(f for dims in self.dims for f in dims if f)
        return tuple(f for f in named if f not in self.blocked)


Rule = Callable[[Call], Factors]


@dataclass(frozen=True)
class Strategy:
    """One way to run an op on one axis. `factor` is "" for I, "R" for replicated, "P" for partial, else the factor."""

    factor: str
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    lowering: str = ""

    @property
    def types(self) -> tuple[Type, ...]:
        """Operands, then results."""
        return (*self.operands, *self.results)


def whole(call: Call) -> Factors:
    """No dim may be sharded: every rank runs the op on whole operands."""
    return Factors(tuple(("",) * len(v.shape) for v in call.operands), tuple(("",) * len(v.shape) for v in call.results))


def dims_of(rank: int, but: frozenset[int] | set[int] = frozenset()) -> Dims:
    """d0, d1, ... for the dims of a tensor; those in `but` are not sharded."""
    return tuple("" if i in but else f"d{i}" for i in range(rank))


def aligned(shape: tuple[int, ...], result: tuple[int, ...], names: Dims) -> Dims:
    """Names of the dims of an operand that is broadcast to a result with `names`; a dim that is widened has none."""
    shift = len(result) - len(shape)
    return tuple(names[i + shift] if n == result[i + shift] else "" for i, n in enumerate(shape))


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that all are broadcast to."""
    rank = max(map(len, shapes))
    full = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*full, strict=True))


def is_float(value: Value) -> bool:
    return value.dtype.startswith(("float", "bfloat"))


def uniform(call: Call, type_: Type, name: str) -> Strategy:
    """Every operand and result of one type."""
    return Strategy(name, (type_,) * len(call.operands), (type_,) * len(call.results))


def linear_strategy(call: Call, chosen: frozenset[int]) -> Strategy:
    """P in the operands in which the op is linear, R in the others, P out."""
    return Strategy("P", tuple(P if i in chosen else R for i in range(len(call.operands))), (P,) * len(call.results))


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
    for dims, value in zip(factors.dims, call.values, strict=True):
        for name, size in zip(dims, value.shape, strict=True):
            if name == factor:
                yield size


def consistent(call: Call, strategy: Strategy) -> bool:
    """Whether a value that is read twice is read as one type, and only floats are P."""
    types = dict(zip(call.op.operands, strategy.operands, strict=True))
    agree = all(types[name] == t for name, t in zip(call.op.operands, strategy.operands, strict=True))
    return agree and all(is_float(v) for v, t in zip(call.values, strategy.types, strict=True) if t == P)


def divides(call: Call, strategy: Strategy, ranks: int) -> bool:
    """Whether every sharded dim, or every section of it, divides by the number of ranks."""
    pairs = zip(strategy.types, call.values, strict=True)
    return not any(part % ranks for t, v in pairs if t.kind == "S" for part in (t.sections or (v.shape[t.dim],)))
