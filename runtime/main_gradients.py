"""Weight gradients straight into `weight.grad`, where the engine has put the main gradient (a view of a flat FP32 buffer).

Autograd would make each micro-batch's gradient as a new tensor, then add it: three more passes over the memory of every
weight and micro-batch. A backward calls these with the weight itself and returns what they return: None when the sum is
in `weight.grad` already, else the gradient, for autograd to handle (no main gradient, or the weight is made of one otherwise than by
transposing or reshaping it).

Where weights are 16-bit the main gradient is FP32: a product of 16-bit operands is added to it in FP32, which on CPUs is first rounded to
16 bits (torch has no such product there that gives FP32), as autograd would round it.

A backward whose weight gradients wait for a W of the schedule leaves them in a `Deferral`: the products themselves, with what they read
(`Work`). The sums are the same, later. A weight knows its Deferral by an attribute, since backwards may run in threads of autograd's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

ATTRIBUTE = "meshwright_deferral"


@dataclass(frozen=True, slots=True)
class Work:
    """A product that is added to a main gradient, and the tensors that it reads: they stay as long as it waits."""

    run: Callable[[], object]
    operands: tuple[Tensor, ...] = ()


class Deferral:
    """Where backwards of a rank leave weight gradients, while it collects them."""

    def __init__(self) -> None:
        self._kept: list[Work] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Work]]:
        """Weight gradients of backwards inside are left in the list."""
        kept: list[Work] = []
        self._kept = kept
        try:
            yield kept
        finally:
            self._kept = None

    def take(self, work: Work) -> None:
        """Keeps work, or does it when nothing is collected."""
        if self._kept is None:
            work.run()
        else:
            self._kept.append(work)


def defer_to(weight: Tensor, deferral: Deferral) -> None:
    """From now on the weight's gradients may be put off there."""
    setattr(weight, ATTRIBUTE, deferral)


def _leaf(weight: Tensor) -> Tensor | None:
    """The parameter that a weight is, or that it is a transpose or reshape of."""
    if weight.is_leaf:
        return weight
    base = weight._base
    return base if base is not None and base.is_leaf and base.numel() == weight.numel() else None


def main_gradient(weight: Tensor) -> Tensor | None:
    """Where a weight's gradient may be summed in place, in the weight's own shape."""
    leaf = _leaf(weight)
    if leaf is None or leaf.grad is None or not leaf.grad.is_contiguous() or not leaf.is_contiguous():
        return None
    if leaf is weight:
        return weight.grad
    return leaf.grad.as_strided(weight.shape, weight.stride(), leaf.grad.storage_offset())


def add_later(weight: Tensor, add: Callable[[], object], *operands: Tensor) -> None:
    """Adds to a weight's main gradient, now or when its W comes. `operands`: what `add` reads."""
    deferral = getattr(_leaf(weight), ATTRIBUTE, None)
    if isinstance(deferral, Deferral):
        deferral.take(Work(add, operands))
    else:
        add()


def _add_product(main: Tensor, left: Tensor, right: Tensor) -> None:
    """main (n, k) += left (n, rows) @ right (rows, k), which may be 16-bit where main is FP32."""
    if main.dtype == left.dtype:
        main.addmm_(left, right)
    elif main.device.type == "cuda":
        main.add_(torch.mm(left, right, out_dtype=main.dtype))
    else:
        main.add_(left @ right)


def add_outer(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """Gradient of weight (n, k) in x (rows, k) -> (rows, n)."""
    main = main_gradient(weight)
    if main is None:
        return grad.t() @ x
    add_later(weight, lambda: _add_product(main, grad.t(), x), grad, x)
    return None


def add_column_sums(bias: Tensor, grad: Tensor) -> Tensor | None:
    """Gradient of bias (n)."""
    main = main_gradient(bias)
    if main is None:
        return grad.sum(0)
    add_later(bias, lambda: main.add_(grad.sum(0, dtype=main.dtype)), grad)
    return None


def add_rows(table: Tensor, ids: Tensor, grad: Tensor) -> Tensor | None:
    """Gradient of table (v, h) in table[ids]: grad (rows, h), ids (rows). On GPUs in the deterministic form."""
    main = main_gradient(table)
    if main is None or grad.device.type != "cpu":
        whole: Tensor = torch.ops.aten.embedding_dense_backward.default(grad, ids, table.shape[0], -1, False)
        return whole
    add_later(table, lambda: main.index_add_(0, ids, grad.to(main.dtype)), ids, grad)
    return None


def add_grouped(weights: Tensor, x: Tensor, grad: Tensor, offsets: Tensor) -> bool:
    """Gradient of weights (E, k, n) in rows x (rows, k) -> (rows, n) by the group's matrix; group e ends before row offsets[e].
    False when there is no main gradient to add it to."""
    main = main_gradient(weights)
    if main is None:
        return False

    def add() -> None:
        ends = [int(end) for end in offsets.tolist()]
        for part, start, stop in zip(main.unbind(0), [0, *ends[:-1]], ends, strict=True):
            if stop > start:
                _add_product(part, x[start:stop].t(), grad[start:stop])

    add_later(weights, add, x, grad, offsets)
    return True
