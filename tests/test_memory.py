"""Memory to the byte: what is predicted is measured, and recomputation changes no bit of loss and gradients. tests.memory has the grid."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from meshwright.choosing import choose, with_casts
from meshwright.compiler.capture import capture
from meshwright.compiler.footprint import Measurer
from meshwright.compiler.hardware import load_hardware
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.precision import DTYPES
from meshwright.compiler.recomputation import NOTHING, op_texts
from meshwright.passes.choose_regions import Regions
from meshwright.plan import compile
from meshwright.plans.document import Declaration
from meshwright.plans.errors import InputError
from meshwright.plans.yaml_io import dump, parse
from meshwright.setting import settle
from meshwright.tests.memory import WAYS, Case, measure
from meshwright.tests.parity import build

CASES = [
    Case("llama", "tp=2", {"sequence_parallel": "on"}),
    Case("gpt2", "pp=2", {"schedule": "zb-h1", "attention": "eager"}),
    Case("llama", "pp=2", {"schedule": "zb-v"}),
]


def test_predicted_bytes_are_measured_and_recomputation_changes_no_bit() -> None:
    """Dropout is on. The last two cases put weight gradients off, in one and in two stages a rank: from B to W their operands are kept."""
    for case, results in zip(CASES, measure(CASES, 2), strict=True):
        saved = {way: sum(r.predicted["activations"] for r in results if r.way == way) for way in WAYS}
        assert saved["full"] <= saved["selective"] < saved["none"], (str(case), saved)
        for r in results:
            assert r.exact and r.predicted["buffers"] == r.peak["buffers"], (str(case), r)
            assert 0.95 < r.peak_ratio < 1.05, (str(case), r)
            assert r.same, (str(case), r.way, r.rank)


@pytest.mark.parametrize("tp", [1, 8])
def test_the_published_case_of_selective_recomputation(tmp_path: Path, tp: int) -> None:
    """Korthikanti et al. (arXiv 2205.05198), their 175-billion model: a layer keeps s b h (34 + 5 a s / h) / t bytes, with selective
    recomputation s b h 34 / t.

    In bf16, as theirs. Dropout masks (1 byte an element: 2 s b h, and a s^2 b in the core) are not kept here, since a seed makes them
    again; mean and deviation of two norms' rows are kept in addition. tests.memory measures such a layer on real ranks.
    """
    seq, hidden, heads = 2048, 12288, 96
    config = transformers.GPT2Config(
        n_embd=hidden, n_head=heads, n_layer=2, n_positions=seq, vocab_size=256, activation_function="gelu", use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    options = {"mesh": f"tp={tp}", "seq": seq, "sequence_parallel": "on" if tp > 1 else "auto", "hardware": "h100", "precision": "bf16"}
    setting = settle(Declaration.model_validate(options))
    captured = capture(str(tmp_path / "config.json"), None, task=None, seq=seq, micro_batch=1, attention="eager", dtype=DTYPES["bf16"])
    kinds = Kinds(with_casts(captured, setting.declaration)[0])
    regions = Regions(Measurer(choose(kinds, setting).assignment, setting.mesh), load_hardware("h100"))
    (kind,) = regions.layers
    selective = regions.selective(kind)
    cores = [[op_texts(kinds, kind)[p] for p in region] for region in selective.regions]
    assert any("softmax" in " ".join(core) for core in cores), cores
    unit, scores, norms = seq * hidden // tp, heads * seq * seq // tp, 2 * 2 * 2 * seq // tp
    assert regions.footprint(kind, NOTHING).kept_bytes == unit * (34 - 2) + scores * (5 - 1) + norms
    assert regions.footprint(kind, selective).kept_bytes == unit * (34 - 2) + norms


def test_a_plan_repeats_what_it_recomputes_and_edits_are_applied_or_refused() -> None:
    directory = build("llama", layers=2).directory
    plan = compile(directory, seq=32, micro_batch=2, recompute="selective", hardware="h100")
    assert plan.document.recomputed and "rt.recompute(" in plan.programs["stage_0.py"]
    data = parse(dump(plan.document))
    assert isinstance(data, dict)
    options = {k: v for k, v in data.items() if k not in ("schema", "programs", "decisions", "predicted", "model")}
    again = compile(directory, **options)
    assert again.programs == plan.programs and again.document.recomputed == plan.document.recomputed
    one = compile(directory, **{**options, "recomputed": [{"segments": ["model.layers.1"], "regions": "all"}]})
    assert "rt.recomputed_layer(run_layer, w.at(\"model.layers.1.\")" in one.programs["stage_0.py"]
    assert one.document.recomputed[0].frees > 0 and one.document.recomputed[0].costs_s > 0
    with pytest.raises(InputError, match=r"plan.yaml: recomputed\[0\].regions: layer has no op mlp.exp; its ops are "):
        compile(directory, **{**options, "recomputed": [{"segments": ["model.layers.1"], "regions": [["mlp.exp"]]}]})
