"""The loss as a sum of terms, each divided by its global count.

A mean cross-entropy over the targets of one micro-batch becomes
    mw.cross_entropy_sum(logits, labels, ignore_index, label_smoothing)   sum over the micro-batch's targets
    mw.token_mean(sum, denominator_j)                                     divided by the global number of targets
so that contributions of micro-batches and data-parallel ranks add up to the mean over the global batch. `Graph.counts[j]` is
the INPUT-level value that counts the micro-batch's targets. That is exact where the loss is linear in the term: `split_loss`
walks from the loss through sums, scalings and casts to the terms. A term that is not a recognised cross-entropy is averaged
over micro-batches (its count is the constant 1), and a note says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from meshwright.compiler.capture.simplify import rebind
from meshwright.compiler.graph import Graph, Level, Op, Ref, Value

MEAN_REDUCTION = 1
LINEAR = {"aten.to.dtype", "aten.neg.default", "aten.view.default", "aten.reshape.default", "aten.squeeze.default"}


@dataclass(frozen=True)
class CrossEntropy:
    """The arguments of a mean cross-entropy over class indices."""

    logits: str
    labels: str
    ignore_index: int
    label_smoothing: float


def split_loss(graph: Graph) -> Graph:
    """Every term of the loss as a token_mean over its own denominator. Levels must be assigned."""
    terms = _terms(graph)
    inserted: dict[int, list[Op]] = {}
    denominators: list[Value] = []
    counts: list[str] = []
    notes = list(graph.notes)
    renamed: dict[str, str] = {}
    removed: set[int] = set()
    for name in terms:
        denominator = Value(f"denominator_{len(denominators)}", (), "float32")
        producer = graph.producers.get(name)
        if producer is None:
            continue
        op = graph.ops[producer]
        found = _recognised(graph, op)
        if found is not None:
            removed.add(producer)
            inserted[producer], count = _cross_entropy(graph, op, found, denominator)
        else:
            inserted[producer], count = _micro_batch_mean(graph, op, denominator)
            notes.append(
                f"{op.module or 'model'}: loss term {name} ({op.target}) is not a mean cross-entropy over class indices: "
                f"averaged over micro-batches, each counting the same"
            )
        renamed[name] = inserted[producer][-1].name
        denominators.append(denominator)
        counts.append(count)
    return replace(
        graph,
        ops=_rebuilt(graph, inserted, renamed, removed),
        denominators=tuple(denominators),
        counts=tuple(counts),
        notes=tuple(notes),
        loss=renamed.get(graph.loss, graph.loss),
    )


def _terms(graph: Graph) -> list[str]:
    """Names of the values that the loss is a linear combination of, in program order."""
    found: dict[str, None] = {}
    pending = [graph.loss]
    while pending:
        name = pending.pop()
        producer = graph.producers.get(name)
        inputs = _linear_inputs(graph, graph.ops[producer]) if producer is not None else None
        if inputs is None or any(len(graph.consumers.get(i, ())) > 1 for i in inputs):
            found[name] = None
        else:
            pending.extend(inputs)
    return sorted(found, key=lambda name: graph.producers.get(name, -1))


def _linear_inputs(graph: Graph, op: Op) -> list[str] | None:
    """Operands that this op is linear in, or None when it is not linear in all that depend on parameters."""
    tensors = [name for name in op.operands if graph.values[name].shape in ((), (1,))]
    if len(tensors) != len(op.operands):
        return None
    if op.target in LINEAR and getattr(torch, op.results[0].dtype).is_floating_point:
        return tensors
    if op.target in ("aten.mul.Tensor", "aten.div.Tensor") and len(tensors) == 1 and isinstance(op.args[0], Ref):
        return tensors
    if op.target in ("aten.add.Tensor", "aten.sub.Tensor") and len(tensors) == 2:
        return tensors
    return None


def _recognised(graph: Graph, op: Op) -> CrossEntropy | None:
    """The cross-entropy that an op is, if its targets are class indices made from inputs alone."""
    if op.target != "aten.cross_entropy_loss.default":
        return None
    defaults: list[object] = [None, None, None, MEAN_REDUCTION, -100, 0.0]
    names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    given = [*op.args, *defaults[len(op.args) :]]
    for name, item in op.kwargs:
        given[names.index(name)] = item
    logits, labels, weight, reduction, ignore_index, smoothing = given
    if not isinstance(logits, Ref) or not isinstance(labels, Ref) or weight is not None or reduction != MEAN_REDUCTION:
        return None
    target = graph.values[labels.name]
    producer = graph.producers.get(labels.name)
    from_inputs = graph.ops[producer].level is Level.INPUT if producer is not None else target in graph.inputs
    if not from_inputs or getattr(torch, target.dtype).is_floating_point or len(graph.values[logits.name].shape) != 2:
        return None
    assert isinstance(ignore_index, int) and isinstance(smoothing, (int, float))
    return CrossEntropy(logits.name, labels.name, ignore_index, float(smoothing))


def _cross_entropy(graph: Graph, op: Op, found: CrossEntropy, denominator: Value) -> tuple[list[Op], str]:
    """The ops of a recognised cross-entropy, ending with its mean; and the value that counts its targets."""
    name = op.name
    labels = Ref(found.labels)
    valid = Value(f"{name}_valid", graph.values[found.labels].shape, "bool")
    count = Value(f"{name}_count", (), "int64")
    total = Value(f"{name}_sum", (), op.results[0].dtype, True)
    mean = Value(f"{name}_mean", (), op.results[0].dtype, True)
    settings = (found.ignore_index, found.label_smoothing)
    ops = [
        Op("aten.ne.Scalar", (labels, found.ignore_index), (), (valid,), op.module, Level.INPUT),
        Op("aten.sum.default", (Ref(valid.name),), (), (count,), op.module, Level.INPUT),
        Op("mw.cross_entropy_sum", (Ref(found.logits), labels, *settings), (), (total,), op.module),
        Op("mw.token_mean", (Ref(total.name), Ref(denominator.name)), (), (mean,), op.module),
    ]
    return ops, count.name


def _micro_batch_mean(graph: Graph, op: Op, denominator: Value) -> tuple[list[Op], str]:
    """A term divided by the number of micro-batches: its count is 1 in each."""
    count = Value(f"{op.name}_count", (), "int64")
    mean = replace(graph.values[op.name], name=f"{op.name}_mean")
    ops = [
        Op("aten.full.default", ([], 1), (("dtype", torch.int64),), (count,), op.module, Level.CONSTANT),
        Op("mw.token_mean", (Ref(op.name), Ref(denominator.name)), (), (mean,), op.module),
    ]
    return ops, count.name


def _rebuilt(graph: Graph, inserted: dict[int, list[Op]], renamed: dict[str, str], removed: set[int]) -> tuple[Op, ...]:
    """The ops with each term's ops after its producer, readers of a term reading its mean."""
    ops: list[Op] = []
    for index, op in enumerate(graph.ops):
        if index not in removed:
            ops.append(rebind(op, renamed))
        ops.extend(inserted.get(index, ()))
    return tuple(ops)
