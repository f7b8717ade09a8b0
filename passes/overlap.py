"""Collectives on a linear's input, and what of them runs beside the linear's own matmuls.

Where links overlap, ops.column_linear runs in backward (Korthikanti et al., arXiv 2205.05198, section 4.2.2):

    beside the gradient of the input      the second gather of an input that was kept as its slice
    beside the gradient of the weight     the collective on the gradient of the input

Each counts for what it takes longer than the matmul beside it. Where the same cores compute and send, both count whole. The layout
objective and the predictions of a plan both count so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.compiler.costs import all_gather_s, conversion_s
from meshwright.compiler.emission.columns import column_of, is_gathered
from meshwright.compiler.flops import op_time_s
from meshwright.compiler.graph import Graph, Op
from meshwright.compiler.hardware import Hardware, Link
from meshwright.plans.layout import R, Type


@dataclass(frozen=True)
class Beside:
    """Seconds of the matmuls of the linears that read one value: gradients of the input, and of the weights."""

    input_s: float = 0.0
    weight_s: float = 0.0


def linear_input(op: Op, graph: Graph) -> str | None:
    """The input of a linear with a weight of the model, beside whose matmuls collectives can run (ops.column_linear); or None."""
    column = column_of(op)
    return column.x if column is not None and column.weight in graph.parameter_of and graph.values[column.x].requires_grad else None


def matmuls(linears: Iterable[Op], graph: Graph, ranks: int, hardware: Hardware) -> Beside:
    """Of linears that read the same value and are sharded by their columns. Half of a backward is the weight's gradient, if it has one."""
    input_s = weight_s = 0.0
    for op in linears:
        backward = op_time_s(op, graph.values, 1 / ranks, hardware)[1]
        own = backward / 2 if any(graph.values[n].requires_grad for n in op.operands if n in graph.parameter_of) else 0.0
        input_s, weight_s = input_s + backward - own, weight_s + own
    return Beside(input_s, weight_s)


def linear_input_s(source: Type, rank: int, global_bytes: float, ranks: int, link: Link, beside: Beside) -> tuple[float, float]:
    """(forward, backward) seconds that a linear's input of `rank` dims takes from `source` to R, without what is hidden in backward.

    The input is gathered again for the gradient of the weight: a frozen weight needs none.
    """
    forward, backward = conversion_s(source, R, global_bytes, ranks, link, True)
    if not is_gathered(source, rank):
        return forward, backward
    again = all_gather_s(global_bytes, ranks, link) if source.kind == "S" and beside.weight_s else 0.0
    if not link.overlaps:
        return forward, backward + again
    return forward, max(0.0, backward - beside.weight_s) + max(0.0, again - beside.input_s)
