"""Where gradients flow, types are told apart: a value that carries one is marked, whatever its dtype and its op."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.compiler.capture import capture
from meshwright.compiler.graph import Graph

SIZE = 16


class Rotated(nn.Module):
    """A rotation by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.inner(x).unflatten(-1, (-1, 2))) * torch.polar(torch.ones(8), torch.arange(8.0))
        return torch.view_as_real(turned).flatten(-2).square().mean()


class Filled(nn.Module):
    """A tensor that is filled with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.ops.aten.fill.Tensor(x, self.level) * x).mean()


def graph_of(module: nn.Module) -> Graph:
    return capture(module, {"x": torch.ones(2, 8, SIZE)}, seq=8, micro_batch=2).graph


def test_complex_values_carry_gradients() -> None:
    ops = [op for op in graph_of(Rotated()).ops if "view_as" in op.target]
    assert [op.target for op in ops] == ["aten.view_as_complex.default", "aten.view_as_real.default"]
    assert all(r.requires_grad for op in ops for r in op.results)


def test_what_is_filled_with_a_parameter_carries_its_gradient() -> None:
    assert all(op.results[0].requires_grad for op in graph_of(Filled()).ops if op.target == "aten.fill.Tensor")
