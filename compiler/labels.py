"""Which dims are the batch and which the sequence: labels carried from the inputs through the rules' factors.

Every model input has the batch as dim 0 and, with two dims or more, the sequence as dim 1. A result's dim has the labels of the
operand dims that share its factor. A merged dim (batch x sequence) has the labels of its slowest part.
"""

from __future__ import annotations

from meshwright.compiler.graph import Graph, Op, Value
from meshwright.compiler.rules.factors import Call, Factors
from meshwright.compiler.rules.table import factors_of

BATCH, SEQUENCE = "batch", "sequence"
Labels = tuple[frozenset[str], ...]
NONE: frozenset[str] = frozenset()


def label_inputs(value: Value) -> Labels:
    return tuple(frozenset({(BATCH, SEQUENCE)[d]}) if d < 2 else NONE for d in range(len(value.shape)))


def factor_labels(factors: Factors, operands: tuple[Labels, ...]) -> dict[str, frozenset[str]]:
    """Labels of each factor of a call: the union over the operand dims that carry it."""
    found: dict[str, frozenset[str]] = {}
    for dims, labels in zip(factors.operands, operands, strict=True):
        for name, label in zip(dims, labels, strict=True):
            if name:
                found[name] = found.get(name, NONE) | label
    return found


def label_values(graph: Graph) -> dict[str, Labels]:
    """Labels of every value's dims."""
    labels: dict[str, Labels] = {v.name: label_inputs(v) for v in graph.inputs}
    for op in graph.ops:
        call = Call(op, tuple(graph.values[n] for n in op.operands), op.results)
        labels.update(label_results(call, labels, graph))
    return labels


def label_results(call: Call, labels: dict[str, Labels], graph: Graph) -> dict[str, Labels]:
    factors = factors_of(call)
    if factors is None:
        return {}
    operands = tuple(labels_of(labels, v) for v in call.operands)
    found = factor_labels(factors, operands)
    return {
        value.name: tuple(found.get(name, NONE) if name else NONE for name in dims)
        for dims, value in zip(factors.results, call.results, strict=True)
    }


def labels_of(labels: dict[str, Labels], value: Value) -> Labels:
    return labels.get(value.name, (NONE,) * len(value.shape))


def banned_factors(op: Op, graph: Graph, labels: dict[str, Labels], banned: frozenset[str]) -> frozenset[str]:
    """Factors of an op that carry a banned label (in operands or results)."""
    call = Call(op, tuple(graph.values[n] for n in op.operands), op.results)
    factors = factors_of(call)
    if factors is None:
        return NONE
    found = factor_labels(factors, tuple(labels_of(labels, v) for v in call.operands))
    return frozenset(name for name, label in found.items() if label & banned)
