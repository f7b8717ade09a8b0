"""The document checks itself, and says what is wrong in one line that names the key."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from meshwright.plans.document import Declaration, PlanDocument, validate
from meshwright.plans.errors import InputError
from meshwright.plans.layout import Layout
from meshwright.plans.mesh import Mesh
from meshwright.plans.reading import EXPECTED, read_declaration, read_plan
from meshwright.plans.schema import schema_text
from meshwright.plans.yaml_io import parse
from meshwright.tests.sample_plan import TEXT, sample_document, sample_signature

Edit = Callable[[dict[str, Any]], object]


def put(path: str, value: object) -> Edit:
    """An edit that sets one key; `/` between keys."""

    def edit(data: Any) -> None:
        *parents, last = [int(k) if k.isdigit() else k for k in path.split("/")]
        for key in parents:
            data = data[key]
        data[last] = value

    return edit


def drop(path: str) -> Edit:
    """An edit that removes one key."""

    def edit(data: Any) -> None:
        *parents, last = [int(k) if k.isdigit() else k for k in path.split("/")]
        for key in parents:
            data = data[key]
        del data[last]

    return edit


UP = "parameters/model.layers.{0..3}.mlp.up_proj.weight"
BAD: list[tuple[Edit, str]] = [
    (put("stages/1/layers", 3), "stages[1].layers: found 3, expected a list of segment names such as 'model.layers.{0..15}'"),
    (put("stages/1/layers", ["head", 3]), "stages[1].layers[1]: found 3, expected a list of segment names"),
    (put("stages/1/layers", []), "stages[1].layers: found a list of 0, expected a list of segment names"),
    (put("micro_bacth", 3), "micro_bacth: unknown key; did you mean micro_batch?"),
    (put("stages/0/layer", []), "stages[0].layer: unknown key; did you mean layers?"),
    (put("xyz", 3), "xyz: unknown key; the keys are schema, model, "),
    (drop("mesh"), "mesh: missing; expected sizes by axis such as {pp: 2, tp: 2}"),
    (drop("schema"), "schema: missing; expected 1, the version of this format"),
    (drop("stages/1/layers"), "stages[1].layers: missing; expected a list of segment names"),
    (drop("stages/0/memory/optimizer"), "stages[0].memory.optimizer: missing; expected bytes, 0 or more"),
    (put("schema", 2), "schema: found 2, expected 1"),
    (put("mesh/pp", -1), "mesh.pp: found -1, expected a whole number of 1 or more"),
    (put("mesh/tp", True), "mesh.tp: found true, expected a whole number of 1 or more"),
    (put("mesh/xp", 2), "mesh.xp: unknown axis; the axes are pp, dp, cp, tp, ep"),
    (put("mesh", 3), "mesh: found 3, expected sizes by axis"),
    (put("mesh/cp", 2), "mesh: cp=2 is not in this version, which has cp=1"),
    (put("mesh/ep", 2), "mesh: mesh ep=2 does not divide dp=1"),
    (put("seq", "128"), "seq: found '128', expected a whole number of 1 or more"),
    (put("seq", True), "seq: found true, expected a whole number of 1 or more"),
    (put("seq", None), "seq: found nothing, expected a whole number of 1 or more"),
    (put("global_batch", 0), "global_batch: found 0, expected a whole number of 1 or more"),
    (put("stages/0/forward_s", -1.0), "stages[0].forward_s: found -1.0, expected predicted seconds"),
    (put("stages/0/forward_s", float("nan")), "stages[0].forward_s: found nan, expected predicted seconds"),
    (put("stages/0/layers/1", "model.layers.{0..2}"), "stages[1].layers: model.layers.2 is in stages[0] already"),
    (put("stages/0/layers/1", "model.layers.{0..0}"), "stages: model.layers.1 is in no stage"),
    (put("stages/1/layers/0", "model.layers.{2..5}"), "stages[1].layers: model.layers.{4,5} is no segment of the kinds"),
    (put("stages/0/layers/1", "model.layers.{-1..1}"), "stages[0].layers: pattern 'model.layers.{-1..1}': {-1..1} is none of"),
    (lambda d: d["stages"].reverse(), "stages[0].layers: model.layers.2 comes before model.layers.1 of stages[1]"),
    (lambda d: d["stages"].pop(), "stages: found a list of 1, expected pp * chunks = 2 * 1 = 2 stages"),
    (put("kinds/head/segments", ["embedding"]), "kinds.head.segments: embedding is of kind embedding already"),
    (put(UP, "S(0)"), "parameters.model.layers.{0..3}.mlp.up_proj.weight: layout 'S(0)': 'S(0)' has no axis"),
    (put(UP, "S(-1)@tp"), "parameters.model.layers.{0..3}.mlp.up_proj.weight: layout type 'S(-1)' is none of"),
    (put(UP, "S(0)@xp"), "parameters.model.layers.{0..3}.mlp.up_proj.weight: layout names axis 'xp'; the axes are"),
    (put(UP, "P@tp"), "parameters.model.layers.{0..3}.mlp.up_proj.weight: found P@tp, expected S, I or R"),
    (put(UP, 3), "parameters.model.layers.{0..3}.mlp.up_proj.weight: found 3, expected a layout such as S(0)@tp"),
    (put("parameters/model.layers.1.norm.weight", "I"), "parameters.model.layers.1.norm.weight: model.layers.1"),
    (put("parameters/model.layers.{1.w", "I"), "parameters.model.layers.{1.w: pattern 'model.layers.{1.w' has a brace"),
    (put("kinds/layer/layouts/mlp/mul", "Q@tp"), "kinds.layer.layouts.mlp: mul: layout type 'Q' is none of"),
    (put("kinds/layer", None), "kinds.layer: found nothing, expected segments and layouts"),
    (put("precision", "fp64"), "precision: found 'fp64', expected fp32, bf16 or fp16"),
    (put("recompute", "some"), "recompute: found 'some', expected none, selective, full or auto"),
    (put("recomputed", [{"segments": ["model.layers.0"], "regions": "all", "frees": 1, "costs_s": 0.1}]), "recomputed: recompute is none"),
    (put("chunks", 2), "stages: found a list of 2, expected pp * chunks = 2 * 2 = 4 stages"),
    (put("stage_ranks", [0, 0]), "stage_ranks: found 0 0, expected each pp rank 0 to 1 1 times, in the stages' order"),
    (put("devices", 0), "devices: found 0, expected a whole number of 1 or more"),
    (put("memory_limit", "40 gigs"), "memory_limit: found '40 gigs', expected an amount of memory such as 40GiB"),
    (put("memory_limit", -3), "memory_limit: found -3, expected bytes or an amount such as 40GiB"),
    (put("programs", {"stage_0.py": 1}), "programs.stage_0.py: found 1, expected digests by file name"),
]


@pytest.mark.parametrize(("edit", "message"), BAD, ids=[message[:50] for _, message in BAD])
def test_bad_plan_is_one_line_that_names_the_key(edit: Edit, message: str) -> None:
    data = copy.deepcopy(parse(TEXT))
    assert isinstance(data, dict)
    edit(data)
    with pytest.raises(InputError) as caught:
        read_plan(data)
    assert str(caught.value).startswith(f"plan.yaml: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [None, [], 3, "text"])
def test_what_is_no_plan_at_all(data: object) -> None:
    with pytest.raises(InputError, match=r"^plan.yaml: found .*, expected keys of a plan such as mesh and stages$"):
        read_plan(data)


def test_indivisible_batch_names_both_sides() -> None:
    data = copy.deepcopy(parse(TEXT))
    assert isinstance(data, dict)
    data["mesh"]["dp"], data["global_batch"] = 2, 7
    with pytest.raises(InputError, match=r"global_batch: found 7, expected a multiple of dp \* micro_batch = 2 \* 1 = 2"):
        read_plan(data)


def test_values_of_a_plan() -> None:
    document = sample_document()
    assert document.mesh == Mesh(pp=2, tp=2)
    assert document.num_micro_batches == 4
    assert document.parameter_layouts["model.layers.3.norm.weight"] == Layout.parse("R@tp")
    assert len(document.parameter_layouts) == 13
    assert document.stage_segments[1] == ("model.layers.2", "model.layers.3", "head")
    assert document.stage_of["model.layers.1"] == 0
    assert document.kind_of["model.layers.1"] == "layer"
    with pytest.raises(ValidationError):
        document.seq = 3  # type: ignore[misc]


def test_memory_limit_in_words() -> None:
    assert read_declaration({"memory_limit": "40GiB"}, {}, "f").memory_limit == 40 * 2**30
    assert read_declaration({"memory_limit": 123}, {}, "f").memory_limit == 123


def test_declaration_is_any_subset_and_options_win() -> None:
    data = parse(TEXT)
    assert isinstance(data, dict)
    for key, value in data.items():
        assert isinstance(read_declaration({key: value}, {}, "f.yaml"), Declaration)
    declared = read_declaration({"mesh": {"tp": 2}, "seq": 64}, {"mesh": "tp=4", "model": "hub/id"}, "f.yaml")
    assert (declared.mesh, declared.seq, declared.schedule) == (Mesh(tp=4), 64, None)
    assert declared.model is not None and declared.model.source == "hub/id"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 4}, "--zero: found 4, expected 0, 1, 2 or 3"),
        ({"mesh": "xp=2"}, "--mesh: unknown mesh axis 'xp'"),
        ({"mesh": {"xp": 2}}, "--mesh: xp: unknown axis"),
        ({"mesh": "pp=4"}, "f.yaml: stages: found a list of 2, expected pp * chunks = 4 * 1 = 4 stages; leave stages out"),
        ({"global_batch": 7, "micro_batch": 2}, "--global-batch: found 7, expected a multiple"),
        ({"memory_limit": "x"}, "--memory-limit: found 'x', expected an amount of memory"),
    ],
)
def test_bad_option_is_named_as_an_option(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_declaration(parse(TEXT), options, "f.yaml")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("parameters/model.layers.{0..3}.norm.weight", "S(0)@tp S(0)@dp"), None),
        (put("parameters/model.layers.9.w", "I"), "layers.9.w: the model trains no parameter model.layers.9.w"),
        (put("parameters/lm_head.weight", "I"), "it is tied to model.embed_tokens.weight"),
        (drop("parameters/model.embed_tokens.weight"), "parameters: model.embed_tokens.weight is missing"),
        (put(UP, "S(2)@tp"), "model.layers.0.mlp.up_proj.weight of shape (16, 8): layout S(2)@tp shards dim 2"),
        (put("mesh/tp", 3), "tokens.weight of shape (64, 8): layout S(0)@tp: 64 of shape (64, 8) does not divide by tp=3"),
    ],
)
def test_validate_against_the_model(edit: Edit, message: str | None) -> None:
    data = copy.deepcopy(parse(TEXT))
    assert isinstance(data, dict)
    edit(data)
    document = read_plan(data)
    if message is None:
        validate(document, sample_signature())
        return
    with pytest.raises(InputError) as caught:
        validate(document, sample_signature())
    assert message in str(caught.value)


def test_keys_of_plan_and_declaration_agree() -> None:
    assert list(PlanDocument.model_fields) == list(Declaration.model_fields)
    keys = {field.alias or name for name, field in Declaration.model_fields.items()}
    assert keys == {key for key in EXPECTED if "." not in key}


def test_schema_file_is_up_to_date(request: pytest.FixtureRequest) -> None:
    text = (request.config.rootpath / "plans" / "schema.json").read_text()
    assert text == schema_text(), "run: python -m meshwright.plans.schema > plans/schema.json"
    assert json.loads(text)["$ref"] == "#/$defs/PlanDocument"
