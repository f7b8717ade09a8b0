"""Loss terms of batch statistics, such as a router's balance loss: taken over the rows of all data-parallel ranks.

Such a term is no mean over rows: it multiplies means (the share of tokens an expert gets, its mean probability). Computed by every
rank from its own rows it would depend on the mesh. `mw.batch_mean(x)` averages a statistic over the dp ranks, forward and backward, where
it is made; what follows is then the same on every rank and equal to one process with the rows of all ranks (Qiu et al., Demons in
the Detail, arXiv 2501.11873: balance over the global batch instead of a rank's own).

This is done where it can be shown to be exact: on every way from the rows to the term the batch disappears in a sum, a mean or a histogram.
Micro-batches cannot see each other: over them such a term is averaged, which a note says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.compiler.capture.simplify import rebind
from meshwright.compiler.graph import Graph, Level, Op, Ref, Value
from meshwright.compiler.labels import BATCH, Labels, label_inputs, label_results, labels_of
from meshwright.compiler.rules.factors import Call

BATCH_MEAN = "mw.batch_mean"
JOINS = frozenset({"aten.cat.default", "aten.concat.default", "aten.concatenate.default"})
STATISTICS = frozenset({"aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim", "aten.histc.default"})


def sync_batch_terms(graph: Graph) -> Graph:
    """The graph with every batch statistic of its unrecognised loss terms averaged over dp. Levels must be assigned."""
    labels = batch_labels(graph)
    means: dict[int, Value] = {}
    inside: dict[int, dict[str, str]] = {}
    notes = list(graph.notes)
    for term in unrecognised_terms(graph):
        found = statistics_of(graph, term, labels)
        if found is None:
            continue
        statistics, slice_ops = found
        for i in statistics:
            value = graph.ops[i].results[0]
            means.setdefault(i, replace(value, name=f"{value.name}_batch"))
        for i in slice_ops:
            inside.setdefault(i, {}).update({graph.ops[s].name: means[s].name for s in statistics})
        notes = [told(note, term) for note in notes]
    if not means:
        return graph
    ops: list[Op] = []
    for i, op in enumerate(graph.ops):
        ops.append(rebind(op, inside[i]) if i in inside else op)
        if i in means:
            ops.append(Op(BATCH_MEAN, (Ref(op.name),), (), (means[i],), op.module, op.level))
    return replace(graph, ops=tuple(ops), notes=tuple(notes))


def told(note: str, term: str) -> str:
    """The note of a term, which says now what is done."""
    if f"loss term {term} (" not in note:
        return note
    where, _, _ = note.partition(": loss term")
    return f"{where}: loss term {term} is made of batch statistics: over the rows of all dp ranks, averaged over micro-batches"


def batch_labels(graph: Graph) -> dict[str, Labels]:
    """Which dims of every value run over rows of the batch; a joined dim does when a part of it does.

    In a graph of one row the tokens of the sequence stand for the batch: a view drops the dim of one, and what then goes over all tokens
    goes over all rows.
    """
    labels: dict[str, Labels] = {v.name: rows_of(v) for v in graph.inputs}
    for op in graph.ops:
        call = Call(op, tuple(graph.values[name] for name in op.operands), op.results)
        labels.update(label_results(call, labels))
        if op.target in JOINS:
            parts = [labels_of(labels, v) for v in call.operands]
            rank = len(op.results[0].shape)
            labels[op.name] = tuple(frozenset().union(*(p[d] for p in parts if len(p) == rank)) for d in range(rank))
    return labels


def rows_of(value: Value) -> Labels:
    """Labels of an input."""
    found = label_inputs(value)
    if len(found) > 1 and value.shape[0] == 1:
        return (found[0], frozenset({BATCH}), *found[2:])
    return found


def unrecognised_terms(graph: Graph) -> tuple[str, ...]:
    """Terms that are averaged over micro-batches: their count is a constant."""
    constant = {
        denominator.name
        for denominator, count in zip(graph.denominators, graph.counts, strict=True)
        if count in graph.producers and graph.ops[graph.producers[count]].level is Level.CONSTANT
    }
    found = []
    for op in graph.ops:
        if op.target == "mw.token_mean" and isinstance(op.args[1], Ref) and op.args[1].name in constant:
            assert isinstance(op.args[0], Ref)
            found.append(op.args[0].name)
    return tuple(found)


def statistics_of(graph: Graph, term: str, labels: Mapping[str, Labels]) -> tuple[list[int], set[int]] | None:
    """(ops that make a term's batch statistics, ops between them and the term); None when a row gets there otherwise, or at once."""

    def has_rows(name: str) -> bool:
        return any(BATCH in label for label in labels_of(labels, graph.values[name]))

    statistics: dict[int, None] = {}
    between: set[int] = set()
    pending, seen = [term], set[str]()
    inputs = {v.name for v in graph.inputs}
    while pending:
        name = pending.pop()
        i = graph.producers.get(name)
        if name in seen:
            continue
        seen.add(name)
        if i is None:
            if name in inputs:
                return None
            continue
        op = graph.ops[i]
        if any(map(has_rows, op.operands)):
            if op.target not in STATISTICS or len(op.operands) != 1:
                return None
            statistics[i] = None
            continue
        between.add(i)
        pending.extend(op.operands)
    if not between:
        return None
    return list(statistics), between
