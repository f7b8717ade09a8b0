"""Grouped matmul: rows sorted by group, one matrix per group (experts).

    grouped_mm(x (T, K), weights (E, K, N), offsets (E,)) -> (T, N)      row t of group e is x[t] @ weights[e]

`offsets[e]` is the row after the last of group e; rows from offsets[-1] on give zeros. Group sizes are data: the host reads `offsets` once
per call. Registered as torch operators, so that fake tensors need no data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weights, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    wants_x, wants_weights, _ = ctx.needs_input_grad
    return (
        _grouped_mm(grad, weights.transpose(1, 2), offsets) if wants_x else None,
        _grouped_outer(x, grad, offsets) if wants_weights else None,
        None,
    )


_grouped_mm.register_fake(_fake_mm)
_grouped_outer.register_fake(_fake_outer)
_grouped_mm.register_autograd(_backward, setup_context=_setup)


def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Rows of x by their group's matrix. See the module."""
    found: Tensor = _grouped_mm(x, weights, offsets)
    return found
