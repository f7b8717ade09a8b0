"""What is recomputed as a plan's key: read, refused, compared, shown."""

from __future__ import annotations

import pytest

from meshwright.plans.diff import diff, diff_lines
from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.reading import read_declaration, read_plan
from meshwright.plans.save import decisions_digest
from meshwright.plans.show import plain
from meshwright.plans.show_memory import show_memory
from meshwright.plans.yaml_io import dump, parse
from meshwright.tests.sample_plan import TEXT, sample_document, sample_signature

RECOMPUTED = """
recomputed:
- segments: ['model.layers.{0..1}']
  regions: all
  frees: 4096
  costs_s: 0.001
- segments: [model.layers.2]
  regions: [[mlp.mul, mlp.mul.1]]
  frees: 1024
  costs_s: 0.0001
"""


def plan(mode: str = "auto", recomputed: str = RECOMPUTED) -> PlanDocument:
    return read_plan(parse(TEXT.replace("recompute: none", f"recompute: {mode}") + recomputed))


def test_a_plan_says_what_is_recomputed() -> None:
    document = plan()
    assert read_plan(parse(dump(document))) == document
    assert decisions_digest(document) != decisions_digest(plan(recomputed=""))
    lines = diff_lines(diff(plan(recomputed=""), document))
    assert lines == ["recomputed", "  model.layers.{0,1}: - -> all", "  model.layers.2: - -> mlp.mul to mlp.mul.1"]
    text = plain(show_memory(document, sample_signature()))
    names = ("model.layers.{0,1}", "model.layers.2 ")
    first, second = (next(line for line in text.splitlines() if line.startswith(name)) for name in names)
    assert "all" in first and "4.00 KiB" in first and "1.00 ms" in first
    assert "mlp.mul to mlp.mul.1" in second and "1.00 KiB" in second
    assert "recomputed" not in dump(sample_document())


@pytest.mark.parametrize(
    ("mode", "edit", "message"),
    [
        ("none", ("", ""), "recomputed: recompute is none, expected selective or auto for this list; or leave recomputed out"),
        ("full", ("", ""), "recomputed: recompute is full, expected selective or auto for this list"),
        ("auto", ("model.layers.2", "model.layers.1"), "recomputed[1].segments: model.layers.1 is given twice"),
        ("auto", ("[[mlp.mul, mlp.mul.1]]", "some"), "recomputed[1].regions"),
    ],
)
def test_what_cannot_be_is_refused(mode: str, edit: tuple[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(mode, RECOMPUTED.replace(*edit))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_another_mode_chooses_anew() -> None:
    data = parse("recompute: auto" + RECOMPUTED)
    assert read_declaration(data, {}, "plan.yaml").recomputed is not None
    assert read_declaration(data, {"recompute": "auto"}, "plan.yaml").recomputed is not None
    assert read_declaration(data, {"recompute": "full"}, "plan.yaml").recomputed is None
