"""Pins: what a declaration gives is marked, a plan compiled to itself marks nothing new, an edit of a plan is marked."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.plan import Plan, compile
from meshwright.plans.errors import InputError
from meshwright.plans.yaml_io import dump, parse
from meshwright.tests.parity import build

MESH: Any = {"mesh": "pp=2,tp=2", "seq": 32, "micro_batch": 2}


def again(plan: Plan, *edits: tuple[str, str], **changes: object) -> Plan:
    """The plan's text, edited, compiled again."""
    text = dump(plan.document)
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    data = parse(text)
    assert isinstance(data, dict)
    options = {k: v for k, v in data.items() if k not in ("schema", "programs", "decisions", "predicted", "model")} | changes
    return compile(plan.document.model.source, None, **options)


def test_pins_are_marked_stay_marked_and_edits_join_them() -> None:
    directory = build("llama").directory
    given = {"model.layers.{0..3}.mlp.gate_proj.weight": "I"}
    layouts = {"mlp.gate_proj": "I", "mlp.act_fn": "I"}
    free = compile(directory, **MESH)
    assert free.document.pinned == ()
    pinned = compile(directory, **MESH, parameters=given, kinds={"layer": {"layouts": layouts}})
    assert pinned.document.pinned == (
        "parameters.model.layers.{0..3}.mlp.gate_proj.weight",
        "kinds.layer.layouts.mlp.gate_proj",
        "kinds.layer.layouts.mlp.act_fn",
    )
    assert dump(again(pinned).document) == dump(pinned.document)
    assert again(free).document.pinned == ()
    moved = again(free, stages=[{"layers": ["embedding"]}, {"layers": ["model.layers.{0..3}", "head"]}])
    assert moved.document.pinned == ("stages",)
    edited = again(free, ("mlp.gate_proj: S(2)@tp", "mlp.gate_proj: I"), ("mlp.gate_proj.weight: S(0)@tp", "mlp.gate_proj.weight: I"))
    assert edited.document.pinned[:2] == ("parameters.model.layers.{0..3}.mlp.gate_proj.weight", "kinds.layer.layouts.mlp.gate_proj")
    assert again(edited).document.pinned == edited.document.pinned


def test_a_pin_that_means_nothing_is_refused() -> None:
    plan = compile(build("llama").directory, **MESH)
    with pytest.raises(InputError, match=r"pinned: found kinds\.layer\.layouts\.mlp\.gate, expected"):
        again(plan, ("pinned: []", "pinned: [kinds.layer.layouts.mlp.gate]"))


def test_a_pinned_weight_lifts_what_is_only_not_chosen() -> None:
    """A product into the residual stream is sliced along the hidden size when its weight is pinned so; a table's columns cannot be."""
    down = "model.layers.{0..3}.mlp.down_proj.weight"
    layouts = compile(build("llama").directory, **MESH, parameters={down: "S(0)@tp"}).document.parameter_layouts
    assert {str(layout) for name, layout in layouts.items() if name.endswith("down_proj.weight")} == {"S(0)@tp"}
    with pytest.raises(InputError, match=r"parameters\.model\.embed_tokens\.weight: S\(1\)@tp cannot be had: the ops that read it"):
        compile(build("llama", tie_word_embeddings=True).directory, **MESH, parameters={"model.embed_tokens.weight": "S(1)@tp"})
