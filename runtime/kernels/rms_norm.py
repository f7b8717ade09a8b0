"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467): y = x r w with r = 1 / sqrt(mean(x^2) + eps) over the last dim.

    backward    with n = x r:   dx = r (dy w - n mean(dy w n)),   dw = sum over rows of dy n

Saved are x, w and r (one FP32 number a row). Each program of the backward adds up dw over rows of its own; those sums are added after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 256


@triton.jit  # type: ignore[untyped-decorator]
def _forward(x, w, y, factors, eps, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    weight = tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, (values * factor * weight).to(y.dtype.element_ty), mask=inside)
    tl.store(factors + row, factor)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(x, w, dy, factors, dx, dw, rows, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        place = (tl.zeros((BLOCK,), tl.int64) + row) * width + column
        factor = tl.load(factors + row)
        normed = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * factor
        grad = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        total += grad * normed
        grad *= weight
        result = factor * (grad - normed * (tl.sum(grad * normed, 0) / width))
        tl.store(dx + place, result.to(dx.dtype.element_ty), mask=inside)
    tl.store(dw + program * width + column, total, mask=inside)


class _RMSNorm(torch.autograd.Function):
    """Rows x (N, H), weight (H)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        y, factors = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            _forward[(rows,)](x, weight, y, factors, eps, width, BLOCK=triton.next_power_of_2(width))
        ctx.save_for_backward(x, weight, factors)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factors = ctx.saved_tensors
        rows, width = x.shape
        programs = min(PROGRAMS, rows)
        dx = torch.empty_like(x)
        dw = torch.zeros((programs, width), dtype=torch.float32, device=x.device)
        if rows:
            block = triton.next_power_of_2(width)
            _backward[(programs,)](x, weight, grads[0].contiguous(), factors, dx, dw, rows, width, BLOCK=block)
        return dx, dw.sum(0).to(weight.dtype), None


_rms_norm: Callable[..., Tensor] = _RMSNorm.apply


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., H) normalised and weighted by (H), in x's type."""
    return _rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), weight, eps).view(x.shape)
