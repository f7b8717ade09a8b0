"""Reading slices of weights: layouts and sections, what is missing, and copies that are made first."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshwright.plans.errors import InputError
from meshwright.plans.layout import Layout
from meshwright.plans.mesh import Mesh
from meshwright.plans.programs import stage_parameters
from meshwright.plans.save import load_plan, load_signature, save_plan_dir
from meshwright.plans.signature import ParameterSpec, Signature
from meshwright.runtime import weight_copy
from meshwright.runtime.axes import take_shard
from meshwright.runtime.engine import Engine
from meshwright.runtime.weights import Place, Reader, copy_overlap, find_weights, local_ranges, overlaps, whole
from meshwright.tests import toy
from meshwright.tests.ranks import run_ranks

TP3 = Mesh(tp=3)


def signature_of(**shapes: tuple[int, ...]) -> Signature:
    specs = {name: ParameterSpec(shape=shape, dtype="float32") for name, shape in shapes.items()}
    return Signature(inputs=(), parameters=specs, tied={"alias": next(iter(shapes))})


@pytest.mark.parametrize("layout", ["I", "R@tp", "S(0)@tp", "S(1)@tp", "S(1:6+3+9)@tp"])
def test_a_rank_reads_its_slices_as_fp32(tmp_path: Path, layout: str) -> None:
    tensor = torch.arange(6 * 18).view(6, 18).to(torch.bfloat16)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    source = find_weights(tmp_path, signature_of(w=(6, 18)))
    assert source is not None
    parsed = Layout.parse(layout)
    for rank in range(3):
        ranges = local_ranges((6, 18), parsed, TP3, {"tp": rank})
        target = torch.empty(parsed.local_shape((6, 18), TP3))
        with Reader() as reader:
            reader.read(target, source["w"], ranges)
        type_ = parsed.on("tp")
        expected = take_shard(tensor, type_.dim, 3, rank, type_.sections) if type_.kind == "S" else tensor
        assert torch.equal(target, expected.float())


def test_any_layout_is_read_from_any_other() -> None:
    tensor = torch.arange(4 * 24.0).view(4, 24)
    for text_have, text_want in (("S(1:12+12)@tp", "S(1)@tp"), ("S(0)@tp", "S(1:6+18)@tp"), ("S(1)@tp", "I")):
        have, want, two = Layout.parse(text_have), Layout.parse(text_want), Mesh(tp=2)
        for rank in range(2):
            ranges = local_ranges((4, 24), want, two, {"tp": rank})
            target = torch.full(want.local_shape((4, 24), two), -1.0)
            for other in range(2):
                there = local_ranges((4, 24), have, two, {"tp": other})
                part = torch.empty(have.local_shape((4, 24), two))
                copy_overlap(part, there, tensor, whole((4, 24)))
                copy_overlap(target, ranges, part, there)
            expected = torch.empty_like(target)
            copy_overlap(expected, ranges, tensor, whole((4, 24)))
            assert torch.equal(target, expected) and (target >= 0).all()
    assert list(overlaps([(0, 4), (8, 12)], [(2, 9)])) == [
        (slice(2, 4), slice(0, 2)),
        (slice(4, 5), slice(6, 7)),
    ]
    with pytest.raises(ValueError, match="shards dim 0 twice"):
        local_ranges((4,), Layout.parse("S(0)@cp S(0)@tp"), Mesh(cp=2, tp=2), {"cp": 0, "tp": 0})


def test_directories(tmp_path: Path) -> None:
    signature = signature_of(w=(2, 3), scalar=())
    assert find_weights(tmp_path, signature) is None
    tensors = {"alias": torch.ones(2, 3), "scalar": torch.tensor(7.0)}
    save_file({"alias": tensors["alias"]}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"alias": "a.safetensors", "scalar": "b.safetensors"}}))
    with pytest.raises(InputError, match=r"index.json: names b.safetensors, which is not in"):
        find_weights(tmp_path, signature)
    save_file({"scalar": tensors["scalar"]}, tmp_path / "b.safetensors")
    source = find_weights(tmp_path, signature)
    assert source is not None and source["w"].key == "alias"
    target = torch.zeros(())
    with Reader() as reader:
        reader.read(target, source["scalar"], ())
        with pytest.raises(InputError, match="alias: found 6 of 12 elements"):
            reader.read(torch.empty(4, 3), source["w"], whole((4, 3)))
    assert target.item() == 7
    assert find_weights(tmp_path, signature_of(w=(3, 2), scalar=())) is None
    assert find_weights(tmp_path, signature_of(other=(2, 3))) is not None  # under its alias
    (tmp_path / "b.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"b.safetensors: cannot be read"), Reader() as reader:
        reader.read(target, Place(tmp_path / "b.safetensors", "scalar"), ())
    index.write_text("[]")
    with pytest.raises(InputError, match="is no index of safetensors files"):
        find_weights(tmp_path, signature)


def test_programs_are_checked(tmp_path: Path) -> None:
    plan = toy.write_plan(tmp_path / "plan", Mesh())
    program = plan / "programs" / "stage_0.py"
    names = stage_parameters(program.read_text(), program)
    assert set(names) == set(toy.shapes())
    program.write_text(program.read_text() + "\n")
    with pytest.raises(InputError, match=r"stage_0.py: does not match its digest .* --from"):
        Engine(plan)
    program.unlink()
    with pytest.raises(InputError, match=r"stage_0.py: is missing"):
        Engine(plan)
    text = "PARAMETERS = ('embed.weight',)\n"
    document = load_plan(plan)
    save_plan_dir(plan, document, {"stage_0.py": text}, {"signature.json": load_signature(plan).to_json().encode()})
    with pytest.raises(InputError, match="no stage holds parameter scale"):
        Engine(plan)


def plan_of_config(tmp_path: Path) -> Path:
    """A toy plan for two tp ranks whose weights are not to be read directly."""
    plan = toy.write_plan(tmp_path / "plan", Mesh(tp=2))
    source = tmp_path / "config.json"
    source.write_text("{}")
    document = load_plan(plan)
    model = document.model.model_copy(update={"kind": "config", "source": str(source)})
    document = document.model_copy(update={"model": model})
    programs = {"stage_0.py": (plan / "programs" / "stage_0.py").read_text()}
    save_plan_dir(plan, document, programs, {"signature.json": load_signature(plan).to_json().encode()})
    return plan


def load_with(plan: str, script: str, polls: float = 0.2) -> str:
    """Loads with a copy that `script` makes; the error, or the loss."""
    weight_copy.POLL_S = polls
    weight_copy._start = lambda plan_dir, target: subprocess.Popen(  # type: ignore[assignment]
        [sys.executable, "-c", script, str(target)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        return f"{Engine(plan).forward_backward(toy.batch(8)).loss:.5f}"
    except InputError as error:
        return str(error)


def load_all(plan: str, scripts: Mapping[str, str]) -> dict[str, str]:
    return {name: load_with(plan, script) for name, script in scripts.items()}


def test_a_copy_is_made_once_and_failures_reach_all(tmp_path: Path) -> None:
    plan = plan_of_config(tmp_path)
    weights = toy.write_weights(tmp_path / "weights")
    scripts = {
        "broken": "import sys, time; time.sleep(0.5); print('x\\nerror: no such thing', file=sys.stderr); sys.exit(2)",
        "made": f"import shutil, sys, time; time.sleep(0.7); shutil.copytree({str(weights)!r}, sys.argv[1])",
        "cached": "raise SystemExit('must not run')",
    }
    found = run_ranks(2, load_all, str(plan), scripts, env={"MESHWRIGHT_CACHE": str(tmp_path / "cache")})
    loss = toy.reference_loss(toy.weights(), toy.batch(8)).item()
    assert found[0] == found[1]
    assert found[0] == {
        "broken": "the model's weights cannot be made: no such thing",
        "made": f"{loss:.5f}",
        "cached": f"{loss:.5f}",
    }
    assert len(list((tmp_path / "cache").iterdir())) == 1
    (tmp_path / "config.json").unlink()
    assert "no such config, which model.source" in run_ranks(2, load_with, str(plan), "")[1]
