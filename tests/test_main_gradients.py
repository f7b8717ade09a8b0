"""Weight gradients that are summed in place equal those that autograd sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright.runtime import ops
from meshwright.runtime.main_gradients import Deferral, defer_to

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


def test_transposed_and_grouped_weights_are_summed_in_place() -> None:
    generator = torch.Generator().manual_seed(0)
    flat, experts = torch.randn(4, 5, generator=generator), torch.randn(3, 2, 4, generator=generator)
    x, offsets = torch.randn(6, 4, generator=generator), torch.tensor([2, 2, 5])
    here, there = ([w.clone().requires_grad_() for w in (flat, experts)] for _ in range(2))
    mains = [torch.zeros_like(w) for w in here]
    for weight, main in zip(here, mains, strict=True):
        weight.grad = main

    def loss(linear: Tensor, rows: Tensor) -> Tensor:
        return linear.square().sum() + rows.square().sum()

    loss(ops.linear(x, here[0].t()), ops.grouped_mm(x, here[1].transpose(1, 2), offsets)).backward()
    groups = [x[:2] @ there[1][0].t(), x[2:5] @ there[1][2].t()]
    loss(F.linear(x, there[0].t()), torch.cat(groups)).backward()
    for mine, main, expected in zip(here, mains, there, strict=True):
        assert expected.grad is not None
        assert mine.grad is main and torch.allclose(main, expected.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [through_ops, recomputed])
def test_weight_gradients_are_put_off_and_sum_to_the_same(function: Callable[..., Tensor]) -> None:
    here, there = leaves(0.5), leaves(0.5)
    deferral = Deferral()
    for leaf in here:
        defer_to(leaf, deferral)
    inputs = []
    for weights in (here, there):
        x = torch.ones(()).requires_grad_()
        with deferral.collecting() as work:
            (function(*weights) * x).backward()
        inputs.append(x.grad)
        if weights is here:
            assert len(work) == 3, "the table, the weight and the bias"
            assert all(leaf.grad is not None and bool((leaf.grad == 0.5).all()) for leaf in here)
            for one in work:
                one.run()
    assert inputs[0] == inputs[1]
    for mine, expected in zip(here, there, strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, expected.grad)
    function(*here).backward()
    assert not torch.equal(here[0].grad, there[0].grad), "without collecting it is done at once"
