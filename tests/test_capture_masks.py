"""Constant masks: those of attention are removed, made smaller, or stay; those that select go by position."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.compiler.capture import capture
from meshwright.compiler.interpret import count_targets, run_graph
from meshwright.plan import compile
from meshwright.tests.test_capture_passes import D, Model, N, T, captured_graph


class Attends(nn.Module):
    """Attention over x with a mask that `make` builds for `size` positions."""

    def __init__(self, make: Callable[[int], T | None], size: int = 8) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        mask = make(size)
        self.register_buffer("mask", mask)

    def forward(self, x: T) -> T:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).mean()


def causal(size: int) -> T:
    return torch.ones(size, size, dtype=torch.bool).tril()


def window(size: int) -> T:
    return (causal(size) & ~causal(size).tril(-3))[None, None].expand(N, 1, size, size).contiguous()


def additive(size: int) -> T:
    return torch.zeros(1, 1, size, size).masked_fill(~causal(size), torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    ("make", "mask", "is_causal"),
    [
        (causal, None, True),
        (additive, None, True),
        (lambda size: torch.ones(size, size, dtype=torch.bool), None, False),
        (lambda size: torch.zeros(size, size), None, False),
        (window, (1, 1, 8, 8), False),
        (lambda size: torch.full((size, size), 0.5), (8, 8), False),
        (lambda size: causal(size).flip(0), (8, 8), False),
    ],
)
def test_masks(make: Callable[[int], T], mask: tuple[int, ...] | None, is_causal: bool) -> None:
    graph = capture(Attends(make), {"x": torch.zeros(N, 8, D)}, seq=8, micro_batch=N).graph
    (attention,) = [op for op in graph.ops if "scaled_dot_product" in op.target]
    found = attention.args[3]
    assert (graph.values[found.name].shape if found is not None else None) == mask
    assert attention.args[5] is is_causal
    assert (found is None) == (graph.buffers == ())


def test_a_mask_that_broadcasts_over_queries_is_not_causal() -> None:
    first = torch.zeros(1, 1, 1, D, dtype=torch.bool)
    first[..., 0] = True

    def attend(h: T) -> T:
        q = h.view(N, 1, D, 1)
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=first.expand(1, 1, 1, D).clone()).flatten(1)

    graph = captured_graph(Model(attend), x=torch.zeros(N, D))
    op = next(op for op in graph.ops if "scaled_dot_product" in op.target)
    assert op.args[3] is not None and not op.args[5]


def test_selections_by_a_constant_mask_go_by_position() -> None:
    """Also of two dims, and written into; shapes are static, so that the footprint's fake tensors go through."""

    def select(h: T) -> T:
        odd, corner = torch.arange(D) % 2 == 1, torch.ones(N, D).tril() > 0
        written = torch.zeros_like(h)
        written[:, odd] = h[:, odd] * 2
        return written.sum() + h[corner].square().sum()

    module, x = Model(select), torch.randn(N, D)
    captured = capture(module, {"x": torch.zeros(N, D)}, seq=D, micro_batch=N)
    selections = [op for op in captured.graph.ops if op.target.startswith("aten.index")]
    assert len(selections) == 3 and all(captured.graph.values[n].dtype != "bool" for op in selections for n in op.operands)
    assert sum(op.target == "aten.nonzero_static.default" for op in captured.graph.ops) == 2
    ones = [count.float() for count in count_targets(captured.graph, captured.buffers, {"x": x})]
    found = run_graph(captured.graph, dict(module.named_parameters()), captured.buffers, {"x": x}, ones)
    torch.testing.assert_close(found, module(x))
    assert compile(module, {"x": torch.zeros(N, D)}, mesh="dp=1", seq=D, micro_batch=N).document.stages[0].memory.activations > 0
