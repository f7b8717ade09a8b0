"""Rows of a batch: proved apart for plain models, said to be unproved where ops may mix them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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


class Rows(nn.Module):
    """A language model of one linear, with a term or a layer that mixes rows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.head, self.how = nn.Embedding(16, 8), nn.Linear(8, 16), how

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        if self.how == "centred":
            x = x - x.mean(0, keepdim=True)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        if self.how == "variance":
            loss = loss + ((x - x.mean((0, 1))) ** 2).mean()
        if self.how == "ratio":
            loss = loss + (x.mean((0, 1)) ** 2).sum() / (labels > -1).sum()
        if self.how == "energy":
            loss = loss + (x**2).mean()
        return loss


@pytest.mark.parametrize(("how", "said"), [("plain", False), ("energy", False), ("centred", True), ("variance", True), ("ratio", True)])
def test_statistics_of_rows_are_said(how: str, said: bool) -> None:
    example = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "labels": torch.ones(2, 4, dtype=torch.int64)}
    plan = compile(Rows(how), example=example, mesh="dp=2", seq=4, micro_batch=2, global_batch=8)
    assert bool(plan.document.notes) is said, plan.document.notes
