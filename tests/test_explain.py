"""Explanations: choices, cost splits, alternatives by re-solving, reasons, what a pin costs, names that do not exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.explain import explain_plan
from meshwright.plan import compile
from meshwright.plans.errors import InputError
from meshwright.tests.parity import build

GATE = "model.layers.{0..3}.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def plan_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explained") / "plan"
    compile(build("llama").directory, None, mesh="pp=2,tp=2", seq=32, micro_batch=2, parameters={GATE: "I"}).save(folder)
    return folder


def test_a_parameter_has_its_alternatives(plan_dir: Path) -> None:
    found = explain_plan(plan_dir, "model.layers.{0..3}.mlp.up_proj.weight")
    assert found.choice == "S(0)@tp" and not found.pinned
    others = {a.choice: a for a in found.alternatives}
    assert set(others) == {"I", "R@tp", "S(1)@tp"}
    whole, columns = others["I"].outcome, others["S(1)@tp"].outcome
    assert whole is not None and columns is not None
    assert whole.memory_bytes > found.outcome.memory_bytes
    assert columns.step_s > found.outcome.step_s
    assert any(label == "read by" and "mlp.up_proj.linear" in text for label, text in found.costs)


def test_a_pin_has_its_price(plan_dir: Path) -> None:
    found = explain_plan(plan_dir, "model.layers.3.mlp.gate_proj.weight")
    assert found.choice == "I" and found.pinned
    assert found.without_pin is not None and found.without_pin.memory_bytes < found.outcome.memory_bytes
    assert any(line.startswith("the pin costs: +") for line in found.lines())


def test_an_op_has_conversions_and_reasons(plan_dir: Path) -> None:
    by_kind = explain_plan(plan_dir, "layer.self_attn.q_proj")
    by_layer = explain_plan(plan_dir, "model.layers.2.self_attn.q_proj.linear")
    assert by_kind.choice == by_layer.choice == "S(2)@tp"
    assert by_kind.alternatives == by_layer.alternatives
    assert any("-> R" in label and "all-reduce" in text for label, text in by_kind.costs)
    (batch,) = (a for a in by_kind.alternatives if a.choice == "S(0)@tp")
    assert batch.outcome is None and "the batch is dp's to cut" in batch.reason


def test_a_segment_and_a_stage_have_their_neighbours(plan_dir: Path) -> None:
    stage = explain_plan(plan_dir, "stage_1")
    first = stage.choice.split(" to ")[0]
    segment = explain_plan(plan_dir, first)
    assert [a.choice for a in segment.alternatives] == ["in stage 0"]
    assert {a.choice.split(" in ")[1] for a in stage.alternatives} == {"stage 0", "stage 1"}
    assert all(a.outcome is not None and a.outcome.step_s >= stage.outcome.step_s for a in stage.alternatives)
    assert any(label == "all-reduce" for label, _ in segment.costs)


def test_unknown_names_are_refused_with_near_ones(plan_dir: Path) -> None:
    with pytest.raises(InputError, match=r"did you mean .*up_proj\.weight"):
        explain_plan(plan_dir, "model.layers.1.mlp.upproj.weight")


def test_sizes_that_do_not_divide_are_the_reason(tmp_path: Path) -> None:
    compile(build("nine-heads").directory, None, mesh="tp=2", seq=32, micro_batch=2).save(tmp_path / "plan")
    found = explain_plan(tmp_path / "plan", "layer.self_attn.scaled_dot_product_attention")
    reasons = [a.reason for a in found.alternatives if a.outcome is None]
    assert any("of 9 does not divide by tp=2" in reason for reason in reasons)


def test_the_command_prints_text_and_json(plan_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(plan_dir), "head"]) == 0
    assert "segment of kind head" in capsys.readouterr().out
    assert main(["explain", str(plan_dir), "stage_0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["name"] == "stage_0" and facts["alternatives"]
    assert main(["explain", str(plan_dir), "nothing-like-it"]) == 2
    assert capsys.readouterr().err.startswith("error: NAME: ")
