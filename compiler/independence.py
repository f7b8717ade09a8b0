"""Whether the rows of a batch stay apart: what makes micro-batches and data parallelism exact.

A step's loss is the sum over micro-batches of what each contributes. That is the loss of the whole batch only where no op mixes rows:
every batch dim of an op's operands must be one factor of its rule, which its results keep or which it sums on the way to the loss.
(Two factors pair rows with other rows: the similarities of a contrastive loss.)
What this does not show of an op (one without a rule, a sort of all rows' tokens by expert) is said in the plan's notes;
`verify` then is the proof. A graph of one row shows nothing and is not asked.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.compiler.kinds import Kinds
from meshwright.compiler.labels import BATCH, Labels, label_values, labels_of
from meshwright.compiler.rules.factors import Call
from meshwright.compiler.rules.table import factors_of


def unproved_ops(kinds: Kinds) -> dict[tuple[str, int], str]:
    """Op classes that may mix rows of a batch, with the op's target."""
    labels = label_values(kinds)
    found = {}
    for name, kind in kinds.by_name.items():
        for position, i in enumerate(kind.representative.ops):
            call = kinds.call(kinds.graph.ops[i])
            if not keeps_rows(call, labels):
                found[name, position] = call.op.target
    return found


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
