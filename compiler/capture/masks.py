"""Attention masks that are constants, evaluated and replaced by what they say.

A mask given to scaled_dot_product_attention rules the flash kernels out. HF builds masks in the graph; those that depend on no
input are evaluated here, once each:
    exactly causal            no mask, is_causal=True
    all true (or all zero)    no mask
    anything else             stays, reduced to batch and heads 1 where it does not vary over them
Masks that depend on inputs (attention_mask) stay as they are.

Every attention op leaves in one form: (q, k, v, mask, dropout_p, is_causal), scale=, enable_gqa=.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from meshwright.compiler.graph import Graph, Level, Op, Ref, Value
from meshwright.compiler.interpret import call

SDPA = "aten.scaled_dot_product_attention.default"
LARGEST_NUMEL = 1 << 28
"""Masks with more elements than this are not evaluated."""


@dataclass(frozen=True)
class Mask:
    """What a constant mask says: `keep` False when it is `causal` or says nothing; varying over dims 0 and 1 or not."""

    keep: bool
    causal: bool
    varies: tuple[bool, bool]


def fold_masks(graph: Graph, buffers: Mapping[str, torch.Tensor]) -> Graph:
    """Replaces the constant masks of attention ops. Levels must be assigned."""
    masks: dict[tuple[str, tuple[int, ...]], Mask | None] = {}
    reduced: dict[str, str] = {}
    ops: list[Op] = []
    for op in graph.ops:
        if op.target != SDPA:
            ops.append(op)
            continue
        op = canonical_attention(op)
        mask = op.args[3]
        if isinstance(mask, Ref):
            scores = tuple(graph.values[item.name].shape[-2] for item in op.args[:2] if isinstance(item, Ref))
            if (mask.name, scores) not in masks:
                masks[mask.name, scores] = _classify(graph, mask.name, scores, buffers)
            found = masks[mask.name, scores]
            if found is not None and not (found.causal and op.args[5]):
                op = _with_mask(graph, op, mask.name, found, reduced, ops)
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def canonical_attention(op: Op) -> Op:
    """The op with its six positional arguments spelled out."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    kwargs = dict(op.kwargs)
    given: list[object] = [*op.args, *(None, 0.0, False)[len(op.args) - 3 :]]
    for name in names[3:]:
        if name in kwargs:
            given[names.index(name)] = kwargs.pop(name)
    return replace(op, args=tuple(given), kwargs=tuple(kwargs.items()))


def _with_mask(graph: Graph, op: Op, name: str, mask: Mask, reduced: dict[str, str], ops: list[Op]) -> Op:
    """The attention op with its classified mask; a reduced mask's slices are appended to `ops` once."""
    query, key, value, _, dropout, is_causal = op.args
    if not mask.keep:
        return replace(op, args=(query, key, value, None, dropout, is_causal or mask.causal))
    if name not in reduced:
        reduced[name] = _reduce(graph.values[name], mask, ops)
    return replace(op, args=(query, key, value, Ref(reduced[name]), dropout, is_causal))


def _reduce(value: Value, mask: Mask, ops: list[Op]) -> str:
    """Slices a mask to size 1 in the dims (of the first two of four) that it does not vary over; gives the value's name."""
    for dim, varies in enumerate(mask.varies):
        if varies or len(value.shape) != 4 or value.shape[dim] == 1:
            continue
        shape = tuple(1 if d == dim else size for d, size in enumerate(value.shape))
        result = Value(f"{value.name}_dim{dim}", shape, value.dtype)
        ops.append(Op("aten.slice.Tensor", (Ref(value.name), dim, 0, 1), (), (result,), "", Level.CONSTANT))
        value = result
    return value.name


def _classify(graph: Graph, name: str, scores: tuple[int, ...], buffers: Mapping[str, torch.Tensor]) -> Mask | None:
    """What a mask says of (queries, keys) scores, or None when it is not a constant or too large to evaluate."""
    if not can_evaluate(graph, name):
        return None
    mask = evaluate(graph, name, buffers)
    blocked = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
    if mask.dtype != torch.bool and not bool(((mask == 0) | blocked).all()):
        return Mask(True, False, _varies(mask))
    if not bool(blocked.any()):
        return Mask(False, False, (False, False))
    causal = torch.ones(scores, dtype=torch.bool).triu_(1)
    if bool((blocked == causal).all()):
        return Mask(False, True, (False, False))
    return Mask(True, False, _varies(mask))


def _varies(mask: torch.Tensor) -> tuple[bool, bool]:
    if mask.dim() != 4:
        return True, True
    return bool((mask != mask[:1]).any()), bool((mask != mask[:, :1]).any())


def can_evaluate(graph: Graph, name: str) -> bool:
    """Whether a value is a constant, and not too large."""
    producer = graph.producers.get(name)
    constant = graph.ops[producer].level is Level.CONSTANT if producer is not None else name in {v.name for v, _ in graph.buffers}
    return constant and math.prod(graph.values[name].shape) <= LARGEST_NUMEL


def evaluate(graph: Graph, name: str, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The value of a CONSTANT, computed on the CPU; values are dropped as soon as nothing else needs them."""
    needed, uses = _needed_ops(graph, name)
    known = {value.name: buffers[path] for value, path in graph.buffers if value.name in uses or value.name == name}
    with torch.no_grad():
        for index in needed:
            op = graph.ops[index]
            for result, tensor in zip(op.results, call(op, known), strict=True):
                known[result.name] = tensor
            for operand in dict.fromkeys(op.operands):
                uses[operand] -= 1
                if uses[operand] == 0 and operand != name:
                    del known[operand]
    return known[name]


def _needed_ops(graph: Graph, name: str) -> tuple[list[int], dict[str, int]]:
    """Indices of the ops that a value needs, in order; and how many of those ops read each value."""
    needed: set[int] = set()
    uses: dict[str, int] = {}
    pending = [name]
    while pending:
        producer = graph.producers.get(pending.pop())
        if producer is None or producer in needed:
            continue
        needed.add(producer)
        for operand in dict.fromkeys(graph.ops[producer].operands):
            uses[operand] = uses.get(operand, 0) + 1
            pending.append(operand)
    return sorted(needed), uses
