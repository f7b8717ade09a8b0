"""Cross-entropy over rows of logits (N, V / n) that may be a slice of the vocabulary: the two loops of runtime.loss as kernels.

    row_sums    per row: maximum, sum of exp(z - maximum), the target's logit (0 where it is another rank's) and, with smoothing, the sum of
                z; one read of the logits (online softmax: Milakov and Gimelshein, arXiv 1805.02867)
    gradient    (exp(z - log Z) - e / V - (1 - e) onehot(t)) * scale, in the logits' type; one read, one write
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _row_sums(logits, labels, start, peaks, exps, targets, totals, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * width
    peak = tl.full((), float("-inf"), tl.float32)
    exp = tl.full((), 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for at in range(0, width, BLOCK):
        column = at + tl.arange(0, BLOCK)
        z = tl.load(base + column, mask=column < width, other=float("-inf")).to(tl.float32)
        new = tl.maximum(peak, tl.max(z, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        exp = exp * tl.exp(peak - shift) + tl.sum(tl.exp(z - shift), 0)
        total += tl.sum(tl.where(column < width, z, 0.0), 0)
        peak = new
    label = tl.load(labels + row) - start
    inside = (label >= 0) & (label < width)
    target = tl.load(base + tl.where(inside, label, 0), mask=inside, other=0.0).to(tl.float32)
    tl.store(peaks + row, peak)
    tl.store(exps + row, exp)
    tl.store(targets + row, target)
    tl.store(totals + row, total)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(logits, labels, start, log_z, scales, grads, width, even, keep, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    z = tl.load(logits + row * width + column, mask=inside, other=0.0).to(tl.float32)
    p = tl.exp(z - tl.load(log_z + row)) - even
    label = tl.load(labels + row) - start
    p = tl.where(column == label, p - keep, p) * tl.load(scales + row)
    tl.store(grads + row * width + column, p.to(grads.dtype.element_ty), mask=inside)


def row_sums(logits: Tensor, labels: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(maximum, sum of exp(z - maximum), target, sum) of each row, FP32 (N). `start`: id of the first column."""
    logits = logits.contiguous()
    rows, width = logits.shape
    found = torch.empty((4, rows), dtype=torch.float32, device=logits.device)
    if rows:
        _row_sums[(rows,)](logits, labels.contiguous(), start, *found.unbind(0), width, BLOCK=min(BLOCK, triton.next_power_of_2(width)))
    peaks, exps, targets, totals = found.unbind(0)
    return peaks, exps, targets, totals


def gradient(logits: Tensor, labels: Tensor, start: int, log_z: Tensor, scales: Tensor, smoothing: float, vocabulary: int) -> Tensor:
    """Gradient of the logits, in their type; `scales` (N) are the rows' own gradients, `vocabulary` is the whole one's size."""
    logits = logits.contiguous()
    rows, width = logits.shape
    grads = torch.empty_like(logits)
    block = min(BLOCK, triton.next_power_of_2(width))
    if rows:
        grid = (rows, triton.cdiv(width, block))
        even, keep = smoothing / vocabulary, 1 - smoothing
        _gradient[grid](logits, labels.contiguous(), start, log_z, scales.contiguous(), grads, width, even, keep, BLOCK=block)
    return grads
