"""Cross-entropy over a vocabulary that may be sharded, summed over tokens; and the mean over the global batch.

For logits z (N, V), labels t (N) and smoothing e, over the rows whose label is not `ignore_index`:

    sum over rows of  log Z - (1 - e) z[t] - e / V sum(z)        log Z = log sum exp z
    gradient          softmax(z) - (1 - e) onehot(t) - e / V

With the vocabulary sharded on an axis (the logits' last dim), the maximum, then the sums of exp z, z[t] and z are
all-reduced: two small collectives per loss and none in the backward pass (Megatron-LM, arXiv 1909.08053, section 3).
The result is I.

Saved are the logits, the labels and log Z; the softmax is made once, in the backward pass, as the gradient itself. Rows
are worked on in blocks, in fp32 (or fp64, when the logits are): 16-bit logits are never there in fp32 as a whole. On GPUs both loops
over the rows are kernels (runtime.kernels.cross_entropy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.axes import Axis, TrivialAxis
from meshwright.runtime.kernels import ENABLED, runs_on

if ENABLED:
    from meshwright.runtime.kernels import cross_entropy as kernels

BLOCK_ELEMENTS = 1 << 23
WHOLE = TrivialAxis("vocabulary")


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Ranges of rows of (N, V) of about BLOCK_ELEMENTS each."""
    rows = max(1, BLOCK_ELEMENTS // max(1, logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _place(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """(index within this rank's shard, whether the label lies there); the index is 0 where it does not."""
    local = labels - start
    inside = (local >= 0) & (local < width)
    return local.masked_fill_(~inside, 0), inside


def _row_sums(logits: Tensor, labels: Tensor, axis: Axis, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """log Z, z[t] and sum(z) per row (the last only when smoothing), over the whole vocabulary."""
    if ENABLED and runs_on(logits) and logits.dtype != torch.float64:
        return _merged(*kernels.row_sums(logits, labels, axis.index * logits.shape[1]), axis)
    wide = _accumulator(logits.dtype)
    peak = axis.all_reduce(logits.amax(-1).to(wide), "max")
    local, inside = _place(labels, axis.index * logits.shape[1], logits.shape[1])
    target = logits.gather(1, local.unsqueeze(1)).squeeze(1).to(wide).masked_fill(~inside, 0)
    exps, totals = [], []
    for rows in _blocks(logits):
        block = logits[rows].to(wide)
        if smoothing:
            totals.append(block.sum(1))
        exps.append((block - peak[rows].unsqueeze(1)).exp_().sum(1))
    total = torch.cat(totals) if smoothing else torch.zeros_like(target)
    exp, target, total = axis.all_reduce(torch.stack([torch.cat(exps), target, total])).unbind(0)
    return exp.log() + peak, target, total


def _merged(peaks: Tensor, exps: Tensor, targets: Tensor, totals: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """The same, from each rank's sums of exponentials below its own maxima."""
    peak = axis.all_reduce(peaks, "max")
    own = exps * (peaks - peak).exp()
    exp, target, total = axis.all_reduce(torch.stack([own, targets, totals])).unbind(0)
    return exp.log() + peak, target, total


class _CrossEntropySum(torch.autograd.Function):
    """Logits (N, V / n), labels (N)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, ignore_index: int, smoothing: float) -> Tensor:
        log_z, target, total = _row_sums(logits, labels, axis, smoothing)
        loss = log_z - (1 - smoothing) * target
        if smoothing:
            loss = loss - total * (smoothing / (logits.shape[1] * axis.size))
        ctx.save_for_backward(logits, labels, log_z)
        ctx.axis, ctx.ignore_index, ctx.smoothing = axis, ignore_index, smoothing
        return loss.masked_fill(labels == ignore_index, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, log_z = ctx.saved_tensors
        width = logits.shape[1]
        local, inside = _place(labels, ctx.axis.index * width, width)
        scale = grads[0].to(log_z.dtype).expand_as(log_z).masked_fill(labels == ctx.ignore_index, 0).unsqueeze(1)
        if ENABLED and runs_on(logits) and logits.dtype != torch.float64:
            start, vocabulary = ctx.axis.index * width, width * ctx.axis.size
            found = kernels.gradient(logits, labels, start, log_z, scale.squeeze(1), ctx.smoothing, vocabulary)
            return found, None, None, None, None
        hit = inside.to(log_z.dtype).mul_(ctx.smoothing - 1).unsqueeze(1)
        grad = torch.empty_like(logits)
        for rows in _blocks(logits):
            block = (logits[rows].to(log_z.dtype) - log_z[rows].unsqueeze(1)).exp_()
            if ctx.smoothing:
                block -= ctx.smoothing / (width * ctx.axis.size)
            block.scatter_add_(1, local[rows].unsqueeze(1), hit[rows])
            grad[rows] = block.mul_(scale[rows])
        return grad, None, None, None, None


_cross_entropy_sum: Callable[..., Tensor] = _CrossEntropySum.apply


def vocab_cross_entropy_sum(
    logits: Tensor, labels: Tensor, axis: Axis, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Sum of the cross-entropy over the labels that are not `ignore_index`: a scalar, I over `axis`, fp32 or wider.

    logits (..., V / n): this rank's slice of the vocabulary on `axis`; labels (...) of the whole vocabulary.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"cross-entropy of logits {tuple(logits.shape)} and labels {tuple(labels.shape)}: rows differ")
    rows = logits.reshape(-1, logits.shape[-1])
    return _cross_entropy_sum(rows, labels.reshape(-1), axis, ignore_index, label_smoothing)


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """vocab_cross_entropy_sum with the whole vocabulary on this rank."""
    return vocab_cross_entropy_sum(logits, labels, WHOLE, ignore_index, label_smoothing)


def token_mean(loss_sum: Tensor, denominator: Tensor) -> Tensor:
    """This micro-batch's part of the mean over the global batch; `denominator` is the global number of labels.

    The parts of all micro-batches and data-parallel ranks sum to the mean. With no label at all it is nan, as in torch.
    """
    return loss_sum / denominator
