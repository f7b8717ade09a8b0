"""Grouped matmul: rows sorted by group, one matrix per group (experts).

    grouped_mm(x (T, K), weights (E, K, N), offsets (E,)) -> (T, N)      row t of group e is x[t] @ weights[e]

`offsets[e]` is the row after the last of group e; rows from offsets[-1] on give zeros. Group sizes are data: the host reads `offsets` once
per call. Registered as torch operators, so that fake tensors need no data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.main_gradients import add_grouped


def _bounds(offsets: Tensor) -> list[tuple[int, int]]:
    ends = [int(end) for end in offsets.tolist()]
    return list(zip([0, *ends[:-1]], ends, strict=True))


@torch.library.custom_op("meshwright::grouped_mm", mutates_args=())
def _grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    result = x.new_zeros((x.shape[0], weights.shape[2]))
    for (start, stop), weight in zip(_bounds(offsets), weights.unbind(0), strict=True):
        if stop > start:
            torch.mm(x[start:stop], weight, out=result[start:stop])
    return result


@torch.library.custom_op("meshwright::grouped_outer", mutates_args=())
def _grouped_outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """(T, K), (T, N) -> (E, K, N): x^T y of each group."""
    result = x.new_zeros((offsets.shape[0], x.shape[1], y.shape[1]))
    for (start, stop), part in zip(_bounds(offsets), result.unbind(0), strict=True):
        if stop > start:
            torch.mm(x[start:stop].t(), y[start:stop], out=part)
    return result


def _fake_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weights.shape[2]))


def _fake_outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0], x.shape[1], y.shape[1]))


class _GroupedMM(torch.autograd.Function):
    """Operands: x, weights, offsets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, offsets)
        ctx.weights = weights
        found: Tensor = _grouped_mm(x, weights, offsets)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights, offsets = ctx.saved_tensors
        grad = grads[0].contiguous()
        wants_x, wants_weights, _ = ctx.needs_input_grad
        grad_x = _grouped_mm(grad, weights.transpose(1, 2), offsets) if wants_x else None
        grad_weights = None
        if wants_weights and not add_grouped(ctx.weights, x, grad, offsets):
            grad_weights = _grouped_outer(x, grad, offsets)
        return grad_x, grad_weights, None


_grouped_mm.register_fake(_fake_mm)
_grouped_outer.register_fake(_fake_outer)
_apply: Callable[..., Tensor] = _GroupedMM.apply


def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Rows of x by their group's matrix. See the module."""
    return _apply(x, weights, offsets)
