"""Linear layers: weights are (out, in), as in aten.linear.

column_linear is one conversion to R followed by several linears (q, k and v; gate and up), with what Megatron's
column-parallel linear does in its backward pass (arXiv 2205.05198, section 4.2.2): the input gradient is computed first
and its all-reduce or reduce-scatter runs while the weight gradients are computed; a sequence-sharded input is saved as
its shard, and gathered again while the input gradient is computed. It equals `convert` and `linear`, to rounding.

Both add weight gradients straight to the main gradient where there is one (runtime.main_gradients).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.plans.layout import R, Type
from meshwright.runtime.axes import Axis, Pending, done
from meshwright.runtime.main_gradients import add_column_sums, add_outer

Grads = tuple[Tensor | None, ...]


def _rows(x: Tensor) -> Tensor:
    """(..., features) -> (rows, features)."""
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    """Operands: x, weight, bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias = weight, bias
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad = _rows(grads[0])
        grad_x = (grad @ weight).view(x.shape) if needs_x else None
        grad_weight = add_outer(ctx.weight, grad, _rows(x)) if needs_weight else None
        return grad_x, grad_weight, add_column_sums(ctx.bias, grad) if needs_bias else None


_linear: Callable[..., Tensor] = _Linear.apply


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) -> (..., out)."""
    if not torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    return _linear(x, weight, bias)


def _input_grad(grads: Grads, weights: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Gradient of the shared input, before the ranks' sum."""
    total: Tensor | None = None
    for grad, weight in zip(grads, weights, strict=True):
        if grad is None:
            continue
        total = _rows(grad) @ weight if total is None else total.addmm_(_rows(grad), weight)
    return weights[0].new_zeros(shape) if total is None else total.view(shape)


class _ColumnLinear(torch.autograd.Function):
    """Operands: axis, type of x, x, number of linears, the weights, then the biases."""

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, source: Type, x: Tensor, num: int, *operands: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = operands[:num], operands[num:]
        ctx.axis, ctx.source = axis, source
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *weights)
        ctx.weights, ctx.biases = weights, biases
        full = axis.all_gather(x, source.dim, source.sections) if source.kind == "S" else x
        return tuple(functional.linear(full, w, b) for w, b in zip(weights, biases, strict=True) if w is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        x, *weights = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[2]
        needs_weights = ctx.needs_input_grad[4 : 4 + len(weights)]
        needs_biases = ctx.needs_input_grad[4 + len(weights) :]
        if all(grad is None for grad in grads):
            return (None,) * (4 + 2 * len(weights))

        gathered = _start_gather(ctx.axis, ctx.source, x) if any(needs_weights) else done(x)
        grad_x = _start_input_grad(ctx.axis, ctx.source, grads, weights, x.shape) if needs_x else None
        full = _rows(gathered.wait())
        grad_weights = [
            add_outer(weight, _rows(grad), full) if needed and grad is not None else None
            for weight, grad, needed in zip(ctx.weights, grads, needs_weights, strict=True)
        ]
        grad_biases = [
            add_column_sums(bias, _rows(grad)) if needed and grad is not None else None
            for bias, grad, needed in zip(ctx.biases, grads, needs_biases, strict=True)
        ]
        return (None, None, None if grad_x is None else grad_x.wait(), None, *grad_weights, *grad_biases)


def _start_gather(axis: Axis, source: Type, x: Tensor) -> Pending:
    return axis.start_all_gather(x, source.dim, source.sections) if source.kind == "S" else done(x)


def _start_input_grad(axis: Axis, source: Type, grads: Grads, weights: Sequence[Tensor], local: torch.Size) -> Pending:
    """Gradient of x: this rank's part, and the start of the sum over ranks."""
    if source.kind != "S":
        return axis.start_all_reduce(_input_grad(grads, weights, local), in_place=True)
    shape = list(local)
    shape[source.dim] *= axis.size
    return axis.start_reduce_scatter(_input_grad(grads, weights, torch.Size(shape)), source.dim, source.sections)


_column_linear: Callable[..., tuple[Tensor, ...]] = _ColumnLinear.apply


def column_linear(
    x: Tensor, axis: Axis, weights: Sequence[Tensor], biases: Sequence[Tensor | None], text: str
) -> tuple[Tensor, ...]:
    """One output per weight: x converted by `text` ("I -> R" or "S(1) -> R"), then each linear.

    x (..., in), weights (out / n, in), biases (out / n) or None, one per weight; outputs (..., out / n). The last dim
    of x is contracted and cannot be the sharded one.
    """
    source, target = (Type.parse(part) for part in text.split("->"))
    if target != R or source.kind not in ("I", "S") or source.dim == x.dim() - 1:
        raise ValueError(f"column_linear cannot do {text!r} to a tensor of {x.dim()} dims: use I -> R or S(d) -> R")
    if len(weights) != len(biases) or not weights:
        raise ValueError(f"column_linear got {len(weights)} weights and {len(biases)} biases; give each one or None")
    return _column_linear(axis, source, x, len(weights), *weights, *biases)
