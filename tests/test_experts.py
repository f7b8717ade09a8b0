"""Regions of experts: found, refused, edited; what the programs then contain. Numbers are in test_parity and test_runtime_experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from meshwright.driver import compile_plan
from meshwright.dry import dry_run_rank
from meshwright.plan import compile
from meshwright.plans.document import Declaration
from meshwright.plans.errors import InputError
from meshwright.plans.reading import read_declaration
from meshwright.tests.parity import build


class Experts(nn.Module):
    """Every expert sees every token; `mix` makes rows depend on each other between the products."""

    def __init__(self, experts: int = 4, mix: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.gate = nn.Linear(16, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 16, 24) / 4)
        self.down = nn.Parameter(torch.randn(experts, 24, 16) / 4)
        self.head = nn.Linear(16, 32, bias=False)
        self.mix = mix

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        scores = self.gate(x).softmax(-1)
        inner = torch.bmm(x.expand(self.up.shape[0], -1, -1), self.up)
        inner = torch.softmax(inner, 1) if self.mix else torch.relu(inner)
        out = torch.bmm(inner, self.down)
        x = x + (out * scores.t().unsqueeze(-1)).sum(0)
        return nn.functional.cross_entropy(self.head(x), labels.flatten())


EXAMPLE = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "labels": torch.zeros(2, 8, dtype=torch.int64)}


@pytest.fixture(scope="module")
def sparse() -> str:
    return build("mixtral", layers=3).directory


def test_whole_experts_and_their_hidden_size_are_sliced_at_once(sparse: str, tmp_path: Path) -> None:
    plan = compile(sparse, mesh="pp=1,dp=4,tp=2,ep=2", seq=32)
    layouts = {p: str(layout) for p, layout in plan.document.parameter_layouts.items()}
    assert layouts["model.layers.1.mlp.experts.gate_up_proj"] == "S(1:96+96)@tp S(0)@ep"
    assert layouts["model.layers.1.mlp.experts.down_proj"] == "S(2)@tp S(0)@ep"
    assert "ep" not in layouts["model.layers.1.mlp.gate.weight"]
    plan.save(tmp_path / "plan")
    text = (tmp_path / "plan/programs/stage_0.py").read_text()
    assert text.count("ops.route(") == text.count("ops.dispatch(") == text.count("ops.combine(") == 1
    assert dry_run_rank(tmp_path / "plan", 5)


def test_a_dense_model_has_nothing_for_ep() -> None:
    with pytest.raises(InputError, match=r"mesh: ep=2 spreads whole experts.*no expert weights.*use ep=1"):
        compile(build("llama", layers=2).directory, mesh="dp=2,ep=2", seq=32)


def test_experts_that_do_not_divide_are_named() -> None:
    with pytest.raises(InputError, match=r"ep=3.*4 experts do not divide by ep=3"):
        compile(build("mixtral", layers=2).directory, mesh="dp=3,ep=3", seq=32)


def test_batched_experts_move_too_but_not_when_rows_mix(tmp_path: Path) -> None:
    plan = compile(Experts(), example=EXAMPLE, mesh="dp=2,ep=2", seq=8, micro_batch=2)
    assert str(plan.document.parameter_layouts["up"]) == str(plan.document.parameter_layouts["down"]) == "S(0)@ep"
    plan.save(tmp_path / "plan")
    text = (tmp_path / "plan/programs/stage_0.py").read_text()
    assert "ep, 0, 1)" in text and "ep, 1, 0)" in text
    with pytest.raises(InputError, match="between the experts' products does not keep rows apart"):
        compile(Experts(mix=True), example=EXAMPLE, mesh="dp=2,ep=2", seq=8, micro_batch=2)


def edited(plan_file: Path, old: str, new: str) -> Declaration:
    text = plan_file.read_text()
    assert old in text
    document = yaml.safe_load(text.replace(old, new))
    keys = ("mesh", "seq", "micro_batch", "global_batch", "parameters", "kinds")
    return read_declaration({k: document[k] for k in keys}, {}, "plan.yaml")


def test_a_plan_may_keep_experts_whole_but_not_half(sparse: str, tmp_path: Path) -> None:
    compile(sparse, mesh="dp=2,ep=2", seq=32).save(tmp_path / "plan")
    file = tmp_path / "plan/plan.yaml"
    whole = compile_plan(sparse, declaration=edited(file, "S(0)@ep", "I"))
    assert "dispatch" not in whole.programs["stage_0.py"]
    with pytest.raises(InputError, match=r"down_proj: I is not on ep, its experts are; make it S\(0\)@ep, or none of them"):
        compile_plan(sparse, declaration=edited(file, "experts.down_proj: S(0)@ep", "experts.down_proj: I"))
    with pytest.raises(InputError, match=r"gate.weight: S\(0\)@ep is legal for experts that divide by ep=2 alone; leave it out"):
        compile_plan(sparse, declaration=edited(file, "mlp.gate.weight: I", "mlp.gate.weight: S(0)@ep"))
    with pytest.raises(InputError, match=r"S\(1\)@ep is not possible; on ep a layout is S\(0\) or I"):
        compile_plan(sparse, declaration=edited(file, "experts.down_proj: S(0)@ep", "experts.down_proj: S(1)@ep"))
