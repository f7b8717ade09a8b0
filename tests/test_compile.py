"""What compile decides, without ranks: Megatron's layouts are found, fallbacks are said, edits are applied or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers

from meshwright.dry import dry_run_rank
from meshwright.plan import Plan, compile
from meshwright.plans.errors import InputError
from meshwright.plans.reading import read_declaration
from meshwright.plans.yaml_io import dump, parse
from meshwright.tests.parity import build

TP2 = {"mesh": "tp=2", "seq": 32, "micro_batch": 2}


def layouts(plan: Plan) -> dict[str, str]:
    return {name: str(layout) for name, layout in plan.document.parameters.items()}


def found(plan: Plan, tail: str) -> set[str]:
    return {layout for name, layout in layouts(plan).items() if name.endswith(tail)}


def config(folder: Path, name: str, **fields: object) -> str:
    """A config.json without weights."""
    made = getattr(transformers, f"{name}Config")(**fields)
    made.architectures = [f"{name}ForCausalLM"]
    made.save_pretrained(folder)
    return str(folder / "config.json")


def llama_8b(folder: Path, **changes: object) -> str:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32, "vocab_size": 128256}
    return config(folder, "Llama", **{**shape, "num_key_value_heads": 8, "max_position_embeddings": 8192, **changes})


def test_llama_is_sharded_as_megatron_does_by_hand() -> None:
    plan = compile(build("llama").directory, **TP2)
    for column in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        assert found(plan, f"{column}.weight") == {"S(0)@tp"}
    for row in ("o_proj", "down_proj"):
        assert found(plan, f"{row}.weight") == {"S(1)@tp"}
    assert found(plan, "embed_tokens.weight") == found(plan, "lm_head.weight") == {"S(0)@tp"}
    program = plan.programs["stage_0.py"]
    assert "ops.vocab_embedding" in program and "ops.vocab_cross_entropy_sum" in program
    assert "is_causal=True" in program


@pytest.mark.parametrize(("hardware", "precision"), [("h100", "fp32"), ("h100", "bf16"), ("cpu", "fp32")])
def test_real_shapes_take_sequence_parallelism_with_megatrons_collectives(tmp_path: Path, hardware: str, precision: str) -> None:
    """Two gathers and two reduce-scatters a layer and direction (Korthikanti et al., section 4.2.2)."""
    options = {"mesh": "tp=8", "seq": 4096, "hardware": hardware, "precision": precision}
    plan = compile(llama_8b(tmp_path), **options)
    layer = plan.programs["stage_0.py"].split("def run_layer")[1].split("def ")[0]
    assert len(re.findall("# all-gather; backward reduce-scatter", layer)) == 2
    assert len(re.findall("# reduce-scatter; backward all-gather", layer)) == 2
    assert "all-reduce" not in layer and "all-to-all" not in layer
    off = compile(llama_8b(tmp_path), sequence_parallel="off", **options)
    layer = off.programs["stage_0.py"].split("def run_layer")[1].split("def ")[0]
    assert len(re.findall("# all-reduce; backward identity", layer)) == 2
    assert len(re.findall("# identity; backward all-reduce", layer)) == 2
    assert "all-gather" not in layer and "reduce-scatter" not in layer and "all-to-all" not in layer


def test_gpt2_packed_projection_is_sharded_by_head() -> None:
    plan = compile(build("gpt2").directory, **TP2)
    assert found(plan, "c_attn.weight") == {"S(1:64+64+64)@tp"}
    assert found(plan, "attn.c_proj.weight") == {"S(0)@tp"}
    assert found(plan, "c_fc.weight") == {"S(1)@tp"} and found(plan, "mlp.c_proj.weight") == {"S(0)@tp"}
    assert any("vocabulary of 257" in note for note in plan.document.notes)


def test_bert_and_t5_are_sharded_by_head_and_column_row() -> None:
    bert = compile(build("bert").directory, **TP2)
    assert found(bert, "self.query.weight") == found(bert, "intermediate.dense.weight") == {"S(0)@tp"}
    assert found(bert, "attention.output.dense.weight") == {"S(1)@tp"}
    t5 = compile(build("t5", layers=2).directory, **TP2)
    assert found(t5, "EncDecAttention.k.weight") == found(t5, "DenseReluDense.wi.weight") == {"S(0)@tp"}
    assert found(t5, "SelfAttention.o.weight") == found(t5, "DenseReluDense.wo.weight") == {"S(1)@tp"}


def test_nine_heads_fall_back_on_two_ranks_and_shard_on_three() -> None:
    directory = build("nine-heads").directory
    two = compile(directory, **TP2)
    assert any("9 heads do not divide by tp=2" in note for note in two.document.notes)
    assert found(two, "gate_proj.weight") == {"S(0)@tp"}
    three = compile(directory, **{**TP2, "mesh": "tp=3"})
    assert found(three, "q_proj.weight") == {"S(0)@tp"} and found(three, "o_proj.weight") == {"S(1)@tp"}
    assert not any("heads" in note for note in three.document.notes)


def test_a_plan_compiles_to_itself_and_an_edit_is_applied() -> None:
    directory = build("llama").directory
    plan = compile(directory, mesh="pp=2,tp=2", seq=32, micro_batch=2)
    text = dump(plan.document)
    again = compile(directory, **options(text))
    assert dump(again.document) == text and again.programs == plan.programs
    edited = text.replace("mlp.gate_proj: S(2)@tp", "mlp.gate_proj: I").replace("mlp.act_fn: S(2)@tp", "mlp.act_fn: I")
    changed = compile(directory, **options(edited.replace("mlp.gate_proj.weight: S(0)@tp", "mlp.gate_proj.weight: I")))
    assert found(changed, "gate_proj.weight") == {"I"} and found(changed, "up_proj.weight") == {"S(0)@tp"}


def options(text: str) -> dict[str, object]:
    """A plan's text as options of compile."""
    data = parse(text)
    assert isinstance(data, dict)
    return {key: value for key, value in data.items() if key not in ("schema", "programs", "decisions", "predicted", "model")}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("mlp.gate_proj: S(2)@tp", "mlp.gate_proj: S(3)@tp"), "kinds.layer.layouts.mlp.gate_proj: linear of shape"),
        (("mlp.gate_proj.weight: S(0)@tp", "mlp.gate_proj.weight: S(4)@tp"), "gate_proj.weight: S(4)@tp is not legal"),
        (("mlp.gate_proj: S(2)@tp", "mlp.gate_projection: S(2)@tp"), "no such module"),
        (("mlp.gate_proj: S(2)@tp", "mlp.gate_proj: S(2)@dp"), "layouts inside a program are on tp"),
        (("mlp.gate_proj: S(2)@tp", "mlp.gate_proj: P@tp"), "kinds.layer.layouts.mlp.gate_proj.linear: P@tp contradicts"),
        (("model.norm.weight:", "model.nrom.weight:"), "trains no such parameter"),
        (("mesh: {pp: 1, dp: 1, cp: 1, tp: 2, ep: 1}", "mesh: {pp: 1, dp: 1, cp: 1, tp: 1, ep: 1}"), "tp=1"),
    ],
    ids=["layout", "storage", "module", "axis", "contradiction", "parameter", "mesh"],
)
def test_illegal_edits_name_their_key(edit: tuple[str, str], said: str) -> None:
    directory = build("llama", layers=2).directory
    text = dump(compile(directory, **TP2).document)
    assert edit[0] in text
    with pytest.raises(InputError, match=re.escape(said)) as error:
        compile(directory, **options(text.replace(*edit)))
    assert "\n" not in str(error.value)


def test_any_rank_of_thousands_runs_dry(tmp_path: Path) -> None:
    """16,384 ranks, real layer shapes; the plan is small and the same for every layer."""
    source = llama_8b(tmp_path / "model", num_hidden_layers=16)
    plan = compile(source, mesh="pp=16,dp=128,tp=8", seq=2048, global_batch=4096, hardware="h100")
    plan.save(tmp_path / "plan")
    assert (tmp_path / "plan" / "plan.yaml").stat().st_size < 20_000
    for rank in (0, 8191, 16383):
        assert dry_run_rank(tmp_path / "plan", rank)[0].stage == rank // 1024
    with pytest.raises(InputError, match="rank 16384 is not on the mesh"):
        dry_run_rank(tmp_path / "plan", 16384)


def test_summary_and_files(tmp_path: Path) -> None:
    plan = compile(build("llama", layers=2).directory, **TP2)
    plan.save(tmp_path / "plan")
    loaded = Plan.load(tmp_path / "plan")
    assert loaded.programs == plan.programs and loaded.summary()
    signature = json.loads((tmp_path / "plan" / "model" / "signature.json").read_text())
    assert [i["name"] for i in signature["inputs"]] == ["input_ids", "labels"]
    assert read_declaration(parse((tmp_path / "plan" / "plan.yaml").read_text()), {}, "plan.yaml").mesh == plan.document.mesh


def test_regions_that_share_a_statement_are_refused_by_name() -> None:
    """Gate and up are one call on the gathered input."""
    regions = [["mlp.gate_proj.linear"], ["mlp.up_proj.linear"]]
    said = r"recomputed: regions of layer \(mlp.gate_proj.linear; mlp.up_proj.linear\): one statement makes ops of two .*column_linear"
    with pytest.raises(InputError, match=said):
        compile(build("llama").directory, **TP2, recompute="selective", recomputed=[{"segments": ["model.layers.1"], "regions": regions}])
