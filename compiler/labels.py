"""Which dims are the batch, the sequence and the hidden size: labels carried through the rules' factors.

Every model input has the batch as dim 0 and, with two dims or more, the sequence as dim 1. What passes between layers has the
hidden size as its last dim. A result's dim has the labels of the operand dims that share its factor. A merged dim
(batch x sequence) has the labels of its slowest part.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.compiler.flops import MATMULS, matmul_flops, short_name
from meshwright.compiler.graph import Value
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.rules.factors import Call, Factors
from meshwright.compiler.rules.table import factors_of

BATCH, SEQUENCE, HIDDEN = "batch", "sequence", "hidden"
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


def label_values(kinds: Kinds) -> dict[str, Labels]:
    """Labels of every value's dims. Ops of one class have one rule's factors, which are found once."""
    graph = kinds.graph
    handed_on = {v.name for s in graph.segments if s.prefix for v in kinds.result_values(s)}
    handed_on |= {name for s in graph.segments if s.prefix for name in kinds.externals(s) if name in graph.producers}
    labels: dict[str, Labels] = {v.name: label_inputs(v) for v in graph.inputs}
    known: dict[object, Factors | None] = {}
    for i, op in enumerate(graph.ops):
        call = kinds.call(op)
        op_class = kinds.class_of_op.get(i, i)
        if op_class not in known:
            known[op_class] = factors_of(call)
        labels.update(label_by(known[op_class], call, labels))
        labels.update((v.name, with_hidden(labels_of(labels, v))) for v in op.results if v.name in handed_on and v.requires_grad)
    return labels


def added_products(kinds: Kinds) -> frozenset[tuple[str, int]]:
    """Op classes of matmuls whose result becomes part of what layers hand on, through ops that keep its last dim: the hidden size."""
    graph = kinds.graph
    found = set()
    for kind in kinds.by_name.values():
        segment = kind.representative
        own = {r.name: i for i in segment.ops for r in graph.ops[i].results}
        reached = [v for v in kinds.result_values(segment) if segment.prefix and v.requires_grad and len(v.shape) > 2]
        seen = {v.name for v in reached}
        while reached:
            value = reached.pop()
            i = own.get(value.name)
            if i is None:
                continue
            if matmul_flops(graph.ops[i], graph.values):
                found.add(kinds.class_of_op[i])
                continue
            sources = [graph.values[name] for name in graph.ops[i].operands if name not in seen and name not in graph.parameter_of]
            reached += [v for v in sources if v.requires_grad and v.shape[-1:] == value.shape[-1:]]
            seen.update(v.name for v in sources)
    return frozenset(found)


def with_hidden(labels: Labels) -> Labels:
    """Labels of a value that layers hand on."""
    return (*labels[:-1], labels[-1] | {HIDDEN}) if len(labels) > 2 else labels


def label_results(call: Call, labels: dict[str, Labels]) -> dict[str, Labels]:
    """Labels of a call's results."""
    return label_by(factors_of(call), call, labels)


def label_by(factors: Factors | None, call: Call, labels: dict[str, Labels]) -> dict[str, Labels]:
    """The same by the factors of its rule; none without a rule."""
    if factors is None:
        return {}
    operands = tuple(labels_of(labels, v) for v in call.operands)
    found = factor_labels(factors, operands)
    return {
        value.name: tuple(found.get(name, NONE) if name else NONE for name in dims)
        for dims, value in zip(factors.results, call.results, strict=True)
    }


def labels_of(labels: Mapping[str, Labels], value: Value) -> Labels:
    return labels.get(value.name, (NONE,) * len(value.shape))


def banned_factors(call: Call, labels: dict[str, Labels], banned: frozenset[str]) -> frozenset[str]:
    """Factors of an op that carry a banned label. Of the hidden size only two uses are banned: a result sliced along it, and the plain sum
    of an op that is no product, which would take an all-reduce of its own in every norm."""
    factors = factors_of(call)
    if factors is None:
        return NONE
    found = factor_labels(factors, tuple(labels_of(labels, v) for v in call.operands))
    kept = {name for dims in factors.results for name in dims}
    plain = frozenset() if short_name(call.op) in MATMULS else factors.summed - factors.lowered_results.keys()
    return frozenset(n for n, label in found.items() if label & banned and (label & banned != {HIDDEN} or n in kept or n in plain))
