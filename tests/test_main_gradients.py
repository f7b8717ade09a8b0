"""Weight gradients that are summed in place equal those that autograd sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright.runtime import ops

TABLE, WEIGHT, BIAS = (7, 4), (5, 4), (5,)
IDS = torch.tensor([[0, 3, 3], [6, 2, 0]])


def through_ops(table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ops.linear(ops.embedding(IDS, table, padding_idx=2), weight, bias).square().sum()


def through_torch(table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.embedding(IDS, table, padding_idx=2), weight, bias).square().sum()


def recomputed(table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    found = checkpoint(through_ops, table, weight, bias, use_reentrant=False)
    assert isinstance(found, Tensor)
    return found


def leaves(start: float | None) -> list[Tensor]:
    """Parameters whose gradients start at a number, or do not exist."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=generator).requires_grad_() for shape in (TABLE, WEIGHT, BIAS)]
    for leaf in found:
        leaf.grad = None if start is None else torch.full(leaf.shape, start)
    return found


@pytest.mark.parametrize("start", [None, 0.5])
@pytest.mark.parametrize("function", [through_ops, recomputed])
def test_sums_in_place(start: float | None, function: Callable[..., Tensor]) -> None:
    here, there = leaves(start), leaves(start)
    before = [leaf.grad for leaf in here]
    for _ in range(2):
        function(*here).backward()
        through_torch(*there).backward()
    for mine, expected, main in zip(here, there, before, strict=True):
        assert mine.grad is not None and expected.grad is not None
        assert torch.allclose(mine.grad, expected.grad, rtol=1e-5, atol=1e-5)
        assert main is None or mine.grad is main


def test_weights_that_are_no_leaves() -> None:
    here, there = leaves(0.0), leaves(0.0)
    through_ops(*(2 * leaf for leaf in here)).backward()
    through_torch(*(2 * leaf for leaf in there)).backward()
    for mine, expected in zip(here, there, strict=True):
        assert mine.grad is not None and expected.grad is not None
        assert torch.allclose(mine.grad, expected.grad, rtol=1e-5, atol=1e-5)
