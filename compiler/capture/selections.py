"""Selections by a constant boolean mask, as selections by position: their shapes are then known without the mask's values.

    x[mask]        index(x, [mask])  ->  index(x, [p_0, ..., p_k]), the columns of p = nonzero_static(mask, size=n)
    x[mask] = y    index_put alike

A mask has n true entries whatever runs, since it depends on neither inputs nor parameters. On GPUs this also saves waiting for the count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from meshwright.compiler.capture.masks import can_evaluate, evaluate
from meshwright.compiler.graph import Graph, Level, Op, Ref, Value, aten_packet

SELECTIONS = frozenset(("index", "index_put", "_unsafe_index", "_unsafe_index_put"))


def select_by_position(graph: Graph, buffers: Mapping[str, torch.Tensor]) -> Graph:
    """Replaces constant masks of selections. Levels must be assigned."""
    columns: dict[str, tuple[Ref, ...]] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if aten_packet(op.target) in SELECTIONS and isinstance(op.args[1], (list, tuple)):
            for name in dict.fromkeys(item.name for item in op.args[1] if isinstance(item, Ref)):
                if name not in columns and is_constant_mask(graph, name):
                    made = positions(graph.values[name], int(evaluate(graph, name, buffers).sum()))
                    columns[name] = tuple(Ref(each.name) for each in made[1:])
                    ops += made
            op = replace(op, args=(op.args[0], by_position(op.args[1], columns), *op.args[2:]))
        ops.append(op)
    return replace(graph, ops=tuple(ops)) if columns else graph


def is_constant_mask(graph: Graph, name: str) -> bool:
    """Whether a value is a mask that can be evaluated here."""
    value = graph.values[name]
    return value.dtype == "bool" and bool(value.shape) and can_evaluate(graph, name)


def positions(mask: Value, count: int) -> list[Op]:
    """The op that finds the positions of a mask's true entries, and one for each of their columns."""
    found = Value(f"{mask.name}_positions", (count, len(mask.shape)), "int64")
    ops = [Op("aten.nonzero_static.default", (Ref(mask.name),), (("size", count),), (found,), "", Level.CONSTANT)]
    for dim in range(len(mask.shape)):
        column = Value(f"{mask.name}_position{dim}", (count,), "int64")
        ops.append(Op("aten.select.int", (Ref(found.name), 1, dim), (), (column,), "", Level.CONSTANT))
    return ops


def by_position(indices: Sequence[object], columns: Mapping[str, tuple[Ref, ...]]) -> list[object]:
    """A list of indices with the columns of a mask in its place."""
    return [each for item in indices for each in (columns.get(item.name, (item,)) if isinstance(item, Ref) else (item,))]
