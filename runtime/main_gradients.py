"""Weight gradients straight into `weight.grad`, where the engine has put the main gradient (a view of a flat FP32 buffer).

Autograd would make each micro-batch's gradient as a new tensor, then add it: three more passes over the memory of every
weight and micro-batch. A backward calls these with the weight itself and returns what they return: None when the sum is
in `weight.grad` already, else the gradient, for autograd to handle (no main gradient, or the weight is no leaf).
"""

from __future__ import annotations

import torch
from torch import Tensor


def main_gradient(weight: Tensor) -> Tensor | None:
    """Where a weight's gradient may be summed in place."""
    if not weight.is_leaf or weight.grad is None or not weight.grad.is_contiguous():
        return None
    return weight.grad


def add_outer(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Gradient of weight (n, k) in x (rows, k) -> (rows, n)."""
    main = main_gradient(weight)
    if main is None or main.dtype != grad.dtype:
        return grad.t() @ x
    main.addmm_(grad.t(), x)
    return None


def add_column_sums(bias: Tensor, grad: Tensor) -> Tensor | None:
    """Gradient of bias (n)."""
    main = main_gradient(bias)
    if main is None or main.dtype != grad.dtype:
        return grad.sum(0)
    main.add_(grad.sum(0))
    return None


def add_rows(table: Tensor, ids: Tensor, grad: Tensor) -> Tensor | None:
    """Gradient of table (v, h) in table[ids]: grad (rows, h), ids (rows). On GPUs in the deterministic form."""
    main = main_gradient(table)
    if main is None or main.dtype != grad.dtype or grad.device.type != "cpu":
        whole: Tensor = torch.ops.aten.embedding_dense_backward.default(grad, ids, table.shape[0], -1, False)
        return whole
    main.index_add_(0, ids, grad)
    return None
