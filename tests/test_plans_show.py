"""What people see of a plan: show, diff and the timeline, as plain text."""

from __future__ import annotations

import pytest

from meshwright.plans.diff import diff, diff_lines
from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.reading import read_plan
from meshwright.plans.show import plain, show_layer, show_plan, show_rank, summary
from meshwright.plans.timeline import draw, simulate
from meshwright.plans.yaml_io import parse
from meshwright.tests.sample_plan import TEXT, sample_document, sample_signature

GPIPE = [["0F0", "0SEND_F0", "0F1", "0B0", "0B1", "0REDUCE"], ["1RECV_F0", "1F0", "1F1", "1B0", "1B1", "1REDUCE"]]
ONE_F_ONE_B = [["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]


def edited(*changes: tuple[str, str]) -> PlanDocument:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return read_plan(parse(text))


def test_timeline() -> None:
    assert draw(GPIPE, 100) == [
        "stage 0  F0 F1 .  .  .  B0    B1",
        "stage 1  .  F0 F1 B0    B1",
    ]
    assert draw(ONE_F_ONE_B, 100) == [
        "stage 0  F0 F1 .  .  B0    F2 B1    .  B2",
        "stage 1  .  F0 B0    F1 B1    F2 B2",
    ]
    assert draw(GPIPE, 20) == []
    assert draw(["0F0 0B0".split(), "1F0 1B0".split()], 15, 3) == [
        "stage 0  F0 .", "stage 1  .  F0", "", "stage 0  .  .", "stage 1  B0", "", "stage 0  B0", "stage 1",
    ]  # fmt: skip
    assert draw(["0F0 0B0 0W0".split(), "1F0 1B0 1W0".split()], 100) == ["stage 0  F0 .  .  B0 W0", "stage 1  .  F0 B0 W0"]
    assert draw(["0F0 3F0 3B0 0B0".split(), "1F0 2F0 2B0 1B0".split()], 100) == [
        "rank 0  0F0 .   .   3F0 3B0     .   .   .   .   0B0",
        "rank 1  .   1F0 2F0 .   .   .   2B0     1B0",
    ]
    assert [len(spans) for spans in simulate([[], []])] == [0, 0]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([["0B0", "0F0"]])


def test_show_plan() -> None:
    text = plain(show_plan(sample_document(), ONE_F_ONE_B))
    assert "pp=2,tp=2 (4 ranks on cpu)" in text
    assert "4 sequences of 16 tokens: 4 micro-batches of 1 on 1 dp rank" in text
    assert "0      embedding, model.layers.{0..1}  10.0 ms   20.0 ms" in text
    assert "stage 1  .  F0 B0" in text
    assert "model.layers.{0..3}.mlp.down_proj.weight  S(1)@tp" in text
    assert "- model.layers.{0..3}.self_attn: 9 heads do not divide by tp=2" in text
    assert max(map(len, text.splitlines())) <= 110
    assert "\x1b" not in text


def test_show_layer() -> None:
    text = plain(show_layer(sample_document(), "3", sample_signature()))
    assert "model.layers.3 (kind layer, stage 1)" in text
    assert "mlp.up_proj.weight    S(0)@tp  16 x 8  8 x 8" in text
    assert "mlp mul      S(2)@tp" in text
    assert "embedding (kind embedding, stage 0)" in plain(show_layer(sample_document(), "embedding", sample_signature()))
    with pytest.raises(InputError, match=r"--layer: found 9, expected a layer's index or one of embedding, model.layers"):
        show_layer(sample_document(), "9", sample_signature())


def test_show_rank() -> None:
    held = {1: [f"model.layers.{i}.mlp.up_proj.weight" for i in (2, 3)]}
    text = plain(show_rank(sample_document(), 3, sample_signature(), held))
    assert "3 of 4: pp=1, dp=0, cp=0, tp=1" in text
    assert "pp group    1, 3" in text
    assert "128 in 2 tensors, 512 B" in text
    assert "model.layers.{2,3}.mlp.up_proj.weight  S(0)@tp  16 x 8  8 x 8" in text
    with pytest.raises(InputError, match="--rank: found 4, expected 0 to 3 on the mesh pp=2,tp=2"):
        show_rank(sample_document(), 4, sample_signature(), held)


def test_summary() -> None:
    assert "stage 1: model.layers.{2..3}, head" in summary(sample_document())


def test_diff_of_equal_plans() -> None:
    norm = "model.layers.{}.norm.weight: R@tp"
    split = edited((norm.format("{0..3}"), f"{norm.format('{0..2}')}\n  {norm.format(3)}"))
    assert diff(sample_document(), split) == ()
    assert diff_lines(()) == ["identical"]


def test_diff_names_decisions() -> None:
    new = edited(
        ("schedule: 1f1b", "schedule: gpipe"),
        ("memory_limit: null", "memory_limit: 2GiB"),
        ("'model.layers.{0..1}'", "model.layers.0"),
        ("'model.layers.{2..3}'", "'model.layers.{1..3}'"),
        ("norm.weight: R@tp", "norm.weight: I"),
        ("mul: S(2)@tp", "mul: S(1)@tp"),
        ("step_s: 0.2", "step_s: 0.3"),
        ("activations: 512", "activations: 1024"),
        ("9 heads", "7 heads"),
    )
    assert diff_lines(diff(sample_document(), new)) == [
        "options",
        "  memory_limit: - -> 2.00 GiB",
        "  schedule: 1f1b -> gpipe",
        "stages",
        "  model.layers.1: stage 0 -> stage 1",
        "parameters",
        "  model.layers.{0..3}.norm.weight: R@tp -> I",
        "results",
        "  model.layers.{0..3} mlp mul: S(2)@tp -> S(1)@tp",
        "notes",
        "  model.layers.{0..3}.self_attn: 9 heads do not divide by tp=2: computed on every tp rank: given -> -",
        "  model.layers.{0..3}.self_attn: 7 heads do not divide by tp=2: computed on every tp rank: - -> given",
        "predicted",
        "  step: 200 ms -> 300 ms (+50.0%)",
        "  stage 1 memory: 8.50 KiB -> 9.00 KiB (+5.9%)",
    ]
