"""Rows of a batch: proved apart for plain models, said to be unproved where ops may mix them."""

from __future__ import annotations

import torch

from meshwright.compiler.capture import capture
from meshwright.compiler.independence import unproved_ops
from meshwright.compiler.kinds import Kinds
from meshwright.plan import compile
from meshwright.tests.parity import build


class Mixing(torch.nn.Module):
    """A softmax over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x).softmax(0) * x).sum()


def test_plain_models_are_proved() -> None:
    for name in ("llama", "gpt2", "bert", "t5"):
        captured = capture(build(name, layers=2).directory, seq=16, micro_batch=2)
        assert unproved_ops(Kinds(captured.graph)) == {}


def test_what_mixes_rows_is_said() -> None:
    plan = compile(Mixing(), {"x": torch.ones(2, 8)}, micro_batch=2, global_batch=4)
    assert any("aten.softmax.int may mix rows of a batch" in note for note in plan.document.notes)
    whole = compile(Mixing(), {"x": torch.ones(2, 8)}, micro_batch=2, global_batch=2)
    assert not any("mix rows" in note for note in whole.document.notes)


class Contrasts(torch.nn.Module):
    """Similarities between all rows of two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(self.linear(x) @ self.linear(y).T).sum(-1).mean()


def test_pairs_of_rows_are_said() -> None:
    plan = compile(Contrasts(), {"x": torch.ones(2, 8), "y": torch.ones(2, 8)}, micro_batch=2, global_batch=4)
    assert any("may mix rows of a batch" in note for note in plan.document.notes)
