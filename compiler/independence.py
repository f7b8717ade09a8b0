"""Whether the rows of a batch stay apart: what makes micro-batches and data parallelism exact.

A step's loss is the sum over micro-batches of what each contributes. That is the loss of the whole batch only where no op mixes rows:
every batch dim of an op's operands must be one factor of its rule, which its results keep or which it sums on the way to the loss.
(Two factors pair rows with other rows: the similarities of a contrastive loss.)
What this does not show of an op (one without a rule, a sort of all rows' tokens by expert) is said in the plan's notes;
`verify` then is the proof. A graph of one row shows nothing and is not asked.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.compiler.graph import Op
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.labels import BATCH, Labels, label_values, labels_of
from meshwright.compiler.rules.factors import Call
from meshwright.compiler.rules.table import factors_of

BATCH_MEAN = "mw.batch_mean"
SCALING = frozenset({"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar", "mw.token_mean"})
ADDITIVE = SCALING | {
    "aten.add.Tensor", "aten.sub.Tensor", "aten.neg.default", "aten.to.dtype", "aten.view.default", "aten.reshape.default",
    "aten.squeeze.default", "aten.unsqueeze.default", "aten.alias.default", "aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default",
}  # fmt: skip


def unproved_ops(kinds: Kinds) -> dict[tuple[str, int], str]:
    """Op classes that may mix rows of a batch, with the op's target."""
    labels = label_values(kinds)
    found = {}
    for name, kind in kinds.by_name.items():
        for position, i in enumerate(kind.representative.ops):
            call = kinds.call(kinds.graph.ops[i])
            if not keeps_rows(call, labels) or (sums_rows(call, labels) and not adds_to_loss(kinds, call.op, labels)):
                found[name, position] = call.op.target
    return found


def sums_rows(call: Call, labels: Mapping[str, Labels]) -> bool:
    """Whether rows go into an op of which no result has any."""
    rows = any(BATCH in label and value.shape[dim] > 1 for value in call.operands for dim, label in enumerate(labels_of(labels, value)))
    return rows and not any(has_rows(value.name, labels) for value in call.results)


def has_rows(name: str, labels: Mapping[str, Labels]) -> bool:
    """Whether a dim of a value is the batch."""
    return any(BATCH in label for label in labels.get(name, ()))


def adds_to_loss(kinds: Kinds, op: Op, labels: Mapping[str, Labels]) -> bool:
    """Whether a sum over rows reaches the loss through ops that are linear in it and bring in no row: then parts of it add up.

    A statistic over all dp ranks ends the way: what is made of it is said by another note.
    """
    pending, seen = [r.name for r in op.results if r.requires_grad], set[int]()
    while pending:
        name = pending.pop()
        for i in kinds.graph.consumers.get(name, ()):
            reader = kinds.graph.ops[i]
            if reader.target == BATCH_MEAN or i in seen:
                continue
            others = [n for n in reader.operands if n != name]
            if reader.target not in ADDITIVE or any(has_rows(n, labels) for n in reader.operands):
                return False
            if reader.target in SCALING and any(kinds.graph.values[n].requires_grad for n in others):
                return False
            seen.add(i)
            pending.extend(r.name for r in reader.results)
    return True


def keeps_rows(call: Call, labels: Mapping[str, Labels]) -> bool:
    """Whether all batch dims of an op's operands are one factor, which its results keep or which it sums."""
    marked = [
        (slot, dim)
        for slot, value in enumerate(call.operands)
        for dim, label in enumerate(labels_of(labels, value))
        if BATCH in label and value.shape[dim] > 1
    ]
    if not marked:
        return True
    factors = factors_of(call)
    if factors is None:
        return False
    kept = {name for dims in factors.results for name in dims if name} | factors.summed
    rows = {factors.operands[slot][dim] for slot, dim in marked}
    return len(rows) == 1 and rows <= kept
