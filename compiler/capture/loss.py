"""The loss as a sum of terms, each divided by its global count.

A mean cross-entropy over the targets of one micro-batch becomes
    mw.cross_entropy_sum(logits, labels, ignore_index, label_smoothing)   sum over the micro-batch's targets
    mw.token_mean(sum, denominator_j)                                     divided by the global number of targets
so that contributions of micro-batches and data-parallel ranks add up to the mean over the global batch. `Graph.counts[j]` is
the INPUT-level value that counts the micro-batch's targets. That is exact where the loss is linear in the term: `split_loss`
walks from the loss through sums, scalings and casts to the terms. Recognised are

    cross-entropy     a mean over class indices, of logits (N, C) or (N, C, d, ...), or nll_loss of a log_softmax
    ratio             sum(x) / count, the count being a sum of values made from inputs alone (a masked mean written out)
    element mean      mse_loss, binary_cross_entropy and the like, or a plain mean: every micro-batch has as many elements, so the
                      mean over micro-batches (a count of 1 in each) is the mean over the batch
Any other term is averaged over micro-batches as well, and a note says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from meshwright.compiler.capture.batch_terms import batch_labels
from meshwright.compiler.capture.simplify import packet, rebind
from meshwright.compiler.graph import Graph, Level, Op, Ref, Value
from meshwright.compiler.labels import BATCH, labels_of

MEAN_REDUCTION = 1
LINEAR = {"aten.to.dtype", "aten.neg.default", "aten.view.default", "aten.reshape.default", "aten.squeeze.default"}
ELEMENT_MEANS = {
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2,
    "binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4,
}  # fmt: skip
"""Losses that are means over all elements, and the place of their `reduction`."""
ARGUMENTS = {"self": None, "target": None, "weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
"""Of losses over class indices, with their defaults. nll_loss lacks the last."""


@dataclass(frozen=True)
class CrossEntropy:
    """The arguments of a mean cross-entropy over class indices; the classes are dim 1 of the logits."""

    logits: str
    labels: str
    ignore_index: int
    label_smoothing: float


@dataclass(frozen=True)
class Term:
    """What a term becomes: ops that end with its mean, the value that counts its targets, and whether the term's own op goes."""

    ops: list[Op]
    count: str
    replaces: bool


def split_loss(graph: Graph) -> Graph:
    """Every term of the loss as a token_mean over its own denominator. Levels must be assigned."""
    inserted: dict[int, list[Op]] = {}
    denominators: list[Value] = []
    counts: list[str] = []
    notes = list(graph.notes)
    renamed: dict[str, str] = {}
    removed: set[int] = set()
    for name in _terms(graph):
        producer = graph.producers.get(name)
        if producer is None:
            continue
        op = graph.ops[producer]
        denominator = Value(f"denominator_{len(denominators)}", (), "float32")
        term = _term(graph, op, denominator)
        if term is None:
            term = _micro_batch_mean(graph, op, denominator)
            notes.append(
                f"{op.module or 'model'}: loss term {name} ({op.target}) is not a mean cross-entropy over class indices: "
                f"averaged over micro-batches, each counting the same"
            )
        if term.replaces:
            removed.add(producer)
        inserted[producer] = term.ops
        renamed[name] = term.ops[-1].name
        denominators.append(denominator)
        counts.append(term.count)
    return replace(
        graph,
        ops=_rebuilt(graph, inserted, renamed, removed),
        denominators=tuple(denominators),
        counts=tuple(counts),
        notes=tuple(notes),
        loss=renamed.get(graph.loss, graph.loss),
    )


def _term(graph: Graph, op: Op, denominator: Value) -> Term | None:
    """A term in an exact form; None when it has none that is known."""
    found = _recognised(graph, op)
    if found is not None:
        return _cross_entropy(graph, op, found, denominator)
    if op.level is Level.CONSTANT or _is_element_mean(graph, op):
        return _micro_batch_mean(graph, op, denominator)
    return _ratio(graph, op, denominator)


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
    if op.target == "aten.cross_entropy_loss.default":
        logits, labels, weight, reduction, ignore_index, smoothing = _spelled_out(op)
    elif packet(op) in ("nll_loss_nd", "nll_loss", "nll_loss2d"):
        logits, labels, weight, reduction, ignore_index, smoothing = _spelled_out(op)
        logits = _log_softmax_input(graph, logits)
    else:
        return None
    if not isinstance(logits, Ref) or not isinstance(labels, Ref) or weight is not None or reduction != MEAN_REDUCTION:
        return None
    target = graph.values[labels.name]
    if not _from_inputs(graph, target) or getattr(torch, target.dtype).is_floating_point or len(graph.values[logits.name].shape) < 2:
        return None
    assert isinstance(ignore_index, int) and isinstance(smoothing, (int, float))
    return CrossEntropy(logits.name, labels.name, ignore_index, float(smoothing))


def _spelled_out(op: Op) -> list[object]:
    """All arguments of a loss over class indices, in order."""
    given = [*op.args, *list(ARGUMENTS.values())[len(op.args) :]]
    for name, item in op.kwargs:
        given[list(ARGUMENTS).index(name)] = item
    return given


def _log_softmax_input(graph: Graph, ref: object) -> object:
    """The logits of a log_softmax over dim 1; None for anything else."""
    producer = graph.producers.get(ref.name) if isinstance(ref, Ref) else None
    if producer is None or packet(graph.ops[producer]) not in ("log_softmax", "_log_softmax"):
        return None
    op = graph.ops[producer]
    rank = len(op.results[0].shape)
    return op.args[0] if rank > 1 and isinstance(op.args[1], int) and op.args[1] % rank == 1 else None


def _from_inputs(graph: Graph, value: Value) -> bool:
    """Whether a value is made from inputs alone, and from some."""
    producer = graph.producers.get(value.name)
    return graph.ops[producer].level is Level.INPUT if producer is not None else value in graph.inputs


def _cross_entropy(graph: Graph, op: Op, found: CrossEntropy, denominator: Value) -> Term:
    """The ops of a recognised cross-entropy, ending with its mean; and the value that counts its targets."""
    name = op.name
    labels = Ref(found.labels)
    valid = Value(f"{name}_valid", graph.values[found.labels].shape, "bool")
    count = Value(f"{name}_count", (), "int64")
    total = Value(f"{name}_sum", (), op.results[0].dtype, True)
    mean = Value(f"{name}_mean", (), op.results[0].dtype, True)
    settings = (found.ignore_index, found.label_smoothing)
    rows, logits, targets = _as_rows(graph, op, found)
    ops = [
        Op("aten.ne.Scalar", (labels, found.ignore_index), (), (valid,), op.module, Level.INPUT),
        Op("aten.sum.default", (Ref(valid.name),), (), (count,), op.module, Level.INPUT),
        *rows,
        Op("mw.cross_entropy_sum", (logits, targets, *settings), (), (total,), op.module),
        Op("mw.token_mean", (Ref(total.name), Ref(denominator.name)), (), (mean,), op.module),
    ]
    return Term(ops, count.name, True)


def _as_rows(graph: Graph, op: Op, found: CrossEntropy) -> tuple[list[Op], Ref, Ref]:
    """Ops that make logits (N, C, d, ...) and labels (N, d, ...) rows (N d ..., C) and (N d ...); none for (N, C)."""
    logits, labels = graph.values[found.logits], graph.values[found.labels]
    rank, classes = len(logits.shape), logits.shape[1]
    if rank == 2:
        return [], Ref(logits.name), Ref(labels.name)
    order = [0, *range(2, rank), 1]
    last = replace(logits, name=f"{op.name}_last", shape=tuple(logits.shape[d] for d in order))
    rows = prod(labels.shape)
    flat = replace(logits, name=f"{op.name}_rows", shape=(rows, classes))
    targets = replace(labels, name=f"{op.name}_targets", shape=(rows,))
    ops = [
        Op("aten.permute.default", (Ref(logits.name), order), (), (last,), op.module),
        Op("aten.view.default", (Ref(last.name), [rows, classes]), (), (flat,), op.module),
        Op("aten.view.default", (Ref(labels.name), [rows]), (), (targets,), op.module, Level.INPUT),
    ]
    return ops, Ref(flat.name), Ref(targets.name)


def _is_element_mean(graph: Graph, op: Op) -> bool:
    """Whether an op is a mean over all elements of its operands, rows of the batch among them."""
    if op.target == "aten.mean.default":
        return any(BATCH in label for label in labels_of(batch_labels(graph), graph.values[op.operands[0]]))
    place = ELEMENT_MEANS.get(packet(op)) if op.target.startswith("aten.") else None
    if place is None:
        return False
    reduction = dict(op.kwargs).get("reduction", op.args[place] if len(op.args) > place else MEAN_REDUCTION)
    return reduction == MEAN_REDUCTION


def _ratio(graph: Graph, op: Op, denominator: Value) -> Term | None:
    """sum(x) / count as sum(x) over the global count; the count must be a sum that is made from inputs alone."""
    if op.target != "aten.div.Tensor" or len(op.args) != 2 or not all(isinstance(item, Ref) for item in op.args):
        return None
    total, count = (_past_casts(graph, item.name) for item in op.args if isinstance(item, Ref))
    if not _is_row_sum(graph, total) or not _is_row_sum(graph, count) or not _from_inputs(graph, graph.values[count]):
        return None
    mean = replace(op.results[0], name=f"{op.name}_mean")
    return Term([Op("mw.token_mean", (op.args[0], Ref(denominator.name)), (), (mean,), op.module)], count, True)


def _past_casts(graph: Graph, name: str) -> str:
    """What a value is a cast of."""
    while (producer := graph.producers.get(name)) is not None and graph.ops[producer].target == "aten.to.dtype":
        name = graph.ops[producer].operands[0]
    return name


def _is_row_sum(graph: Graph, name: str) -> bool:
    """Whether a value is a sum over everything, rows of the batch among it."""
    producer = graph.producers.get(name)
    if producer is None or graph.ops[producer].target != "aten.sum.default":
        return False
    return any(BATCH in label for label in labels_of(batch_labels(graph), graph.values[graph.ops[producer].operands[0]]))


def _micro_batch_mean(graph: Graph, op: Op, denominator: Value) -> Term:
    """A term divided by the number of micro-batches: its count is 1 in each."""
    count = Value(f"{op.name}_count", (), "int64")
    mean = replace(graph.values[op.name], name=f"{op.name}_mean")
    ops = [
        Op("aten.full.default", ([], 1), (("dtype", torch.int64),), (count,), op.module, Level.CONSTANT),
        Op("mw.token_mean", (Ref(op.name), Ref(denominator.name)), (), (mean,), op.module),
    ]
    return Term(ops, count.name, False)


def _rebuilt(graph: Graph, inserted: dict[int, list[Op]], renamed: dict[str, str], removed: set[int]) -> tuple[Op, ...]:
    """The ops with each term's ops after its producer, readers of a term reading its mean."""
    ops: list[Op] = []
    for index, op in enumerate(graph.ops):
        if index not in removed:
            ops.append(rebind(op, renamed))
        ops.extend(inserted.get(index, ()))
    return tuple(ops)
