"""What emitted programs call, besides ATen: layout conversions, and the few ops that know of a mesh axis or of a seed.

    convert(x, axis, "P -> S(1)")     collectives of plans.layout.CONVERSIONS, on the value and on the gradient
    embedding                         rows of a table
    vocab_embedding                   rows of a table sharded over the vocabulary; the result is P
    linear, column_linear             runtime.linear
    cross_entropy_sum, vocab_cross_entropy_sum, token_mean      runtime.loss
    batch_mean                        a batch statistic over the rows of all dp ranks
    own_heads                         the key heads of a rank's query heads
    dropout, sdpa                     runtime.random
    grouped_mm                        runtime.grouped
    rms_norm                          torch's; on GPUs runtime.kernels.rms_norm
    autograd_function                 runtime.functions
    route, dispatch, combine, local_experts, exchange           runtime.experts

Conversions save no tensors. On an axis of one rank they return their operand. Integer and bool tensors convert alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.plans.layout import Type, conversion
from meshwright.runtime.axes import Axis, join_shards, take_shard
from meshwright.runtime.experts import combine, dispatch, exchange, local_experts, route
from meshwright.runtime.functions import autograd_function
from meshwright.runtime.grouped import grouped_mm
from meshwright.runtime.kernels import ENABLED, runs_on
from meshwright.runtime.linear import column_linear, linear
from meshwright.runtime.loss import cross_entropy_sum, token_mean, vocab_cross_entropy_sum
from meshwright.runtime.main_gradients import add_rows
from meshwright.runtime.random import dropout, sdpa

if ENABLED:
    from meshwright.runtime.kernels import rms_norm as kernels

__all__ = [
    "autograd_function",
    "batch_mean",
    "column_linear",
    "combine",
    "convert",
    "cross_entropy_sum",
    "dispatch",
    "dropout",
    "embedding",
    "exchange",
    "grouped_mm",
    "linear",
    "local_experts",
    "parse_conversion",
    "rms_norm",
    "route",
    "sdpa",
    "token_mean",
    "vocab_cross_entropy_sum",
    "vocab_embedding",
]


@cache
def parse_conversion(text: str) -> tuple[Type, Type]:
    """(source, target) of "P -> S(1)"; ValueError says what is wrong."""
    source, arrow, target = text.partition("->")
    if not arrow:
        raise ValueError(f"conversion {text!r} is not SOURCE -> TARGET, as in 'P -> S(1)'")
    return Type.parse(source), Type.parse(target)


def _pad(x: Tensor, axis: Axis, have: Type) -> Tensor:
    """Zeros, but for this rank's slice."""
    stacked = x.new_zeros((axis.size, *x.shape))
    stacked[axis.index] = x
    return join_shards(stacked, have.dim, have.sections)


def _swap(x: Tensor, axis: Axis, have: Type, want: Type) -> Tensor:
    """From a slice of one dim to a slice of another; of the same dim when only the sections differ."""
    if have.dim != want.dim:
        return axis.all_to_all(x, want.dim, have.dim, want.sections, have.sections)
    return take_shard(axis.all_gather(x, have.dim, have.sections), want.dim, axis.size, axis.index, want.sections)


def _collective(x: Tensor, axis: Axis, name: str, have: Type, want: Type) -> Tensor:
    """One entry of the table of conversions. `have` and `want` are the types of x and of the result (as gradients, in
    the backward pass)."""
    match name:
        case "identity":
            return x
        case "first":
            return x if axis.index == 0 else torch.zeros_like(x)
        case "slice":
            return take_shard(x, want.dim, axis.size, axis.index, want.sections)
        case "pad":
            return _pad(x, axis, have)
        case "all-reduce":
            return axis.all_reduce(x)
        case "all-gather":
            return axis.all_gather(x, have.dim, have.sections)
        case "reduce-scatter":
            return axis.reduce_scatter(x, want.dim, want.sections)
        case "all-to-all":
            return _swap(x, axis, have, want)
    raise ValueError(f"conversion {have} -> {want} names an unknown collective {name!r}")


class _Convert(torch.autograd.Function):
    """A conversion and its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, source: Type, target: Type) -> Tensor:
        ctx.axis, ctx.source, ctx.target = axis, source, target
        return _collective(x, axis, conversion(source, target).forward, source, target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        backward = conversion(ctx.source, ctx.target).backward
        return _collective(grads[0], ctx.axis, backward, ctx.target, ctx.source), None, None, None


_convert: Callable[..., Tensor] = _Convert.apply


def convert(x: Tensor, axis: Axis, text: str) -> Tensor:
    """x from one layout type to another on `axis`: "S(1) -> R", "P -> I", "S(2:64+64) -> S(1)"."""
    source, target = parse_conversion(text)
    if axis.size == 1 or source == target:
        return x
    return _convert(x, axis, source, target)


class _VocabEmbedding(torch.autograd.Function):
    """Saves the ids only."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, start: int, padding_idx: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        ctx.rows, ctx.start, ctx.padding_idx = weight.shape[0], start, padding_idx
        local = ids - start
        outside = (local < 0) | (local >= weight.shape[0])
        rows = functional.embedding(local.masked_fill_(outside, 0), weight)
        return rows.masked_fill_(outside.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        local = ids - ctx.start
        dropped = (local < 0) | (local >= ctx.rows) | (ids == ctx.padding_idx)
        grad = grads[0].masked_fill(dropped.unsqueeze(-1), 0)
        local.masked_fill_(dropped, 0)
        return None, add_rows(ctx.weight, local.flatten(), grad.flatten(0, -2)), None, None


_vocab_embedding: Callable[..., Tensor] = _VocabEmbedding.apply


def batch_mean(x: Tensor, dp: Axis) -> Tensor:
    """Mean of a statistic (any shape) over the dp ranks, the same on each. Every rank's loss counts 1/dp of what follows, so the gradient
    is summed over them on its way back (Qiu et al., arXiv 2501.11873: router balance over the global batch)."""
    return x if dp.size == 1 else convert(x, dp, "P -> R") / dp.size


def embedding(ids: Tensor, weight: Tensor, padding_idx: int = -1) -> Tensor:
    """Rows `ids` of a table: ids (...) -> (..., H). Row `padding_idx` gets no gradient."""
    return _vocab_embedding(ids, weight, 0, padding_idx)


def vocab_embedding(ids: Tensor, weight: Tensor, axis: Axis, padding_idx: int = -1) -> Tensor:
    """Rows `ids` of a table of which this rank holds its shard (V / n, H): P over `axis`, zero for rows elsewhere.

    ids (...) -> (..., H). Row `padding_idx` (an id of the whole vocabulary) gets no gradient.
    """
    start = axis.index * weight.shape[0]
    return _vocab_embedding(ids, weight, start, padding_idx)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """x (..., *shape) divided by the root of the mean square over `shape`, times weight (shape)."""
    if ENABLED and runs_on(x) and weight is not None and len(shape) == 1 and x.dtype == weight.dtype != torch.float64:
        return kernels.rms_norm(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)
    return functional.rms_norm(x, list(shape), weight, eps)


def own_heads(x: Tensor, axis: Axis, heads: int) -> Tensor:
    """For each query head of this rank, of `heads` on all ranks, its key head: x (..., K, T, D), R -> (..., heads / n, T, D)."""
    count = heads // axis.size
    queries = torch.arange(axis.index * count, (axis.index + 1) * count, device=x.device)
    return x.index_select(-3, queries // (heads // x.shape[-3]))
