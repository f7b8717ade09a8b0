"""Factors of elementwise ops: every dim of the broadcast result is a factor.

An operand dim that is widened is whole. Which operands may be P is said where an op is linear in them: where(c, a, b) is, jointly in a and
b; a + 1 is not, since every rank would add 1.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.graph import Ref
from meshwright.compiler.rules.factors import Call, Factors, Rule, aligned, broadcast, dims_of, whole

FIRST, BOTH = frozenset({0}), frozenset({0, 1})


def pointwise(*linear: frozenset[int]) -> Rule:
    """Broadcasting elementwise op; `linear` are the operand sets in which it is linear."""

    def rule(call: Call) -> Factors:
        result = call.results[0].shape
        names = dims_of(len(result))
        operands = tuple(aligned(v.shape, result, names) for v in call.operands)
        kept = tuple(s for s in linear if max(s) < len(operands))
        return Factors(operands, (names,) * len(call.results), linear=kept)

    return rule


def added(call: Call) -> Factors:
    """add and sub: linear in both tensor operands together; adding a number to P would add it once per rank."""
    return pointwise(*((BOTH,) if len(call.operands) == 2 else ()))(call)


def multiplied(call: Call) -> Factors:
    """mul: linear in each operand."""
    return pointwise(FIRST, frozenset({1}))(call)


def divided(call: Call) -> Factors:
    """div: linear in what is divided, unless the quotient is rounded."""
    rounded = call.argument(2, "rounding_mode") is not None
    numerator = bool(call.op.args) and isinstance(call.op.args[0], Ref)
    return pointwise(*((FIRST,) if numerator and not rounded else ()))(call)


def where(call: Call) -> Factors:
    """where(c, a, b): linear in the tensors among a and b together, where the numbers among them are 0."""
    numbers = [a for a in call.op.args[1:3] if not isinstance(a, Ref)]
    tensors = frozenset(range(1, len(call.operands)))
    return pointwise(*((tensors,) if tensors and not any(numbers) else ()))(call)


def masked_fill(call: Call) -> Factors:
    """masked_fill(x, mask, value): linear in x where the value is 0, in x and value together where it is a tensor."""
    value = call.argument(2, "value")
    if isinstance(value, Ref):
        return pointwise(frozenset({0, 2}))(call)
    return pointwise(*((FIRST,) if value == 0 else ()))(call)


def filled(call: Call) -> Factors:
    """fill and copy: the shape of the first operand, the values of the second or of a number."""
    result = call.results[0].shape
    names = dims_of(len(result))
    linear = (frozenset({1}),) if len(call.operands) == 2 else ()
    return Factors(tuple(aligned(v.shape, result, names) for v in call.operands), (names,), linear=linear)


def prelu(call: Call) -> Factors:
    """prelu(x (n, c, ...), weight (c,) or (1,)): the channels are dim 1, or the only dim."""
    rank = len(call.operands[0].shape)
    names = dims_of(rank)
    weight = call.operands[1].shape
    channel = names[1] if rank > 1 else ""
    return Factors((names, tuple(channel if n > 1 else "" for n in weight)), (names,))


def bucketize(call: Call) -> Factors:
    """bucketize(x, boundaries): the boundaries are whole."""
    values = call.slot(0, "self")
    dims = tuple(dims_of(len(v.shape)) if slot == values else ("",) * len(v.shape) for slot, v in enumerate(call.operands))
    return Factors(dims, (dims_of(len(call.results[0].shape)),))


def loss(reduction: int) -> Rule:
    """An elementwise loss; argument `reduction` says 0 for no reduction, 1 for mean, 2 for sum: a scalar that may be P.

    What is compared has one shape, or all is whole: torch's own gradient of an operand that is widened is not that of the mean.
    """

    def rule(call: Call) -> Factors:
        kind = call.integer(reduction, "reduction", 1)
        if call.operands[0].shape != call.operands[1].shape:
            return whole(call)
        shape = broadcast(*(v.shape for v in call.operands))
        names = dims_of(len(shape))
        factors = Factors(tuple(aligned(v.shape, shape, names) for v in call.operands), (names,))
        if kind == 0:
            return factors
        lowering = {name: "mean" for name in names} if kind == 1 else {}
        return replace(factors, results=((),), summed=frozenset(names), lowering=lowering)

    return rule
