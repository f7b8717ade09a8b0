"""Column-parallel linears that read one converted value are written as one call.

q, k and v, or gate and up, read the same `I -> R` or `S(d) -> R` of a hidden state. ops.column_linear runs the conversion once and, in
backward, its collective beside the weight gradients (Korthikanti et al., arXiv 2205.05198, section 4.2.2). This holds where every reader of
the converted value is a linear of a parameter; nothing is decided here, the conversions are those of the layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.compiler.assignment import Assignment
from meshwright.compiler.graph import Op, Ref
from meshwright.plans.layout import R, Type

LINEAR, ADDMM = "aten.linear.default", "aten.addmm.default"


@dataclass(frozen=True)
class Column:
    """A linear as y = x w^T + b: names of its operands; `transposed` when the weight is stored (in, out)."""

    x: str
    weight: str
    bias: str | None
    transposed: bool


def column_of(op: Op) -> Column | None:
    """A linear or addmm call taken apart."""
    names = [a.name if isinstance(a, Ref) else None for a in op.args]
    if op.kwargs or any(name is None for name in names):
        return None
    if op.target == LINEAR and len(names) in (2, 3):
        return Column(names[0] or "", names[1] or "", names[2] if len(names) == 3 else None, False)
    if op.target == ADDMM and len(names) == 3:
        return Column(names[1] or "", names[2] or "", names[0], True)
    return None


def column_groups(assignment: Assignment, kind: str) -> dict[int, tuple[int, ...]]:
    """{first position: all positions} of the linears of a kind that can be one call."""
    kinds = assignment.kinds
    segment = kinds.by_name[kind].representative
    entered = assignment.entry_types(kind)
    readers: dict[str, list[int]] = {}
    for position, i in enumerate(segment.ops):
        if assignment.region(kind, position) is not None:
            continue
        strategy = assignment.strategies[kind, position]
        for name, need in dict(zip(kinds.graph.ops[i].operands, strategy.operands, strict=True)).items():
            source = entered.get(name, assignment.type_of(name))
            if need == R and is_gathered(source, len(kinds.graph.values[name].shape)) and kinds.graph.values[name].requires_grad:
                readers.setdefault(name, []).append(position)
    return {
        positions[0]: tuple(positions)
        for name, positions in readers.items()
        if all(is_column(assignment, kind, position, name) for position in positions)
    }


def is_gathered(source: Type, rank: int) -> bool:
    """Whether a value of this type may enter ops.column_linear as R: invariant, or sliced along a dim that is not contracted."""
    return source.kind == "I" or (source.kind == "S" and source.dim != rank - 1)


def is_column(assignment: Assignment, kind: str, position: int, x: str) -> bool:
    """Whether an op is a linear of x with parameters in the types that they are stored in, sharded by its columns."""
    kinds = assignment.kinds
    op, strategy = kinds.op(kind, position), assignment.strategies[kind, position]
    column = column_of(op)
    if column is None or column.x != x or strategy.results[0].kind != "S":
        return False
    needs = dict(zip(op.operands, strategy.operands, strict=True))
    stored = [n for n in (column.weight, column.bias) if n is not None]
    return all(n in kinds.graph.parameter_of and assignment.type_of(n) == needs[n] for n in stored)
