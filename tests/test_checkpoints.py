"""Checkpoints: exact resumption, any plan from any other, saves that die, damage, what stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint_files import INDEX, complete, folders, read_index
from meshwright.runtime.engine import Engine
from meshwright.tests import toy, toy_experts
from meshwright.tests.ranks import run_ranks

ADAMW: dict[str, object] = {"name": "adamw", "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 0.5}
HALF, STEPS = 5, 10
Outcome = tuple[list[float], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def leave_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def train(engine: Engine, first: int, last: int) -> Outcome:
    metrics = [engine.train_step(toy.batch(8, step)) for step in range(first, last)]
    return [x for m in metrics for x in (m.loss, m.grad_norm)], engine.state_dict()


def straight_and_in_halves(plans: list[str], directory: str) -> list[Outcome]:
    """Each plan: HALF steps, a save in the background, the rest; and the rest again from the save: bit by bit the same."""
    found = []
    for number, plan in enumerate(plans):
        engine = Engine(plan, ADAMW)
        train(engine, 0, HALF)
        engine.data = {"sequences": 8 * HALF}
        engine.save(f"{directory}/{number}", wait=False)
        metrics, weights = train(engine, HALF, STEPS)
        engine.wait_saved()
        again = Engine(plan, ADAMW)
        again.load(f"{directory}/{number}")
        assert (again.step, again.data) == (HALF, {"sequences": 8 * HALF})
        metrics_again, weights_again = train(again, HALF, STEPS)
        assert metrics == metrics_again
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
        found.append((metrics, weights))
    return found


def go_on(plan_and_saves: list[tuple[str, str]]) -> list[Outcome]:
    found = []
    for plan, save in plan_and_saves:
        engine = Engine(plan, ADAMW)
        engine.load(save)
        found.append(train(engine, HALF, STEPS))
    return found


def check_close(found: Outcome, expected: Outcome) -> None:
    assert found[0] == pytest.approx(expected[0], rel=5e-6)
    assert all(torch.allclose(found[1][name], x, rtol=1e-4, atol=1e-6) for name, x in expected[1].items())


def test_resuming_is_exact_on_the_same_plan_and_to_rounding_on_others(tmp_path: Path) -> None:
    """Ten pairs: four plans of four ranks to plans of two ranks and of one, of other meshes and ZeRO stages."""
    there = [(Mesh(dp=4), 3), (Mesh(dp=2, tp=2), 1), (Mesh(pp=2, dp=2), 2), (Mesh(pp=2, tp=2), 0)]
    plans = [str(toy.write_plan(tmp_path / f"there{i}", m, zero=z)) for i, (m, z) in enumerate(there)]
    expected = run_ranks(4, straight_and_in_halves, plans, str(tmp_path))[0]
    here = [(Mesh(dp=2), 1), (Mesh(tp=2), 0), (Mesh(dp=2), 3), (Mesh(pp=2), 0)]
    pairs = [(i, j) for i in range(4) for j in ((0, 1) if i % 2 else (2, 3))]
    loads = [(str(toy.write_plan(tmp_path / f"here{i}{j}", here[j][0], zero=here[j][1])), str(tmp_path / str(i))) for i, j in pairs]
    for (i, _), found in zip(pairs, run_ranks(2, go_on, loads)[0], strict=True):
        check_close(found, expected[i])
    alone = [(str(toy.write_plan(tmp_path / "alone", Mesh())), str(tmp_path / str(i))) for i in (0, 2)]
    for i, found in zip((0, 2), go_on(alone), strict=True):
        check_close(found, expected[i])


def test_experts_too(tmp_path: Path) -> None:
    plans = [str(toy_experts.write_plan(tmp_path / "there", Mesh(dp=4, ep=2), zero=3))]
    expected = run_ranks(4, straight_and_in_halves, plans, str(tmp_path))[0]
    loads = [(str(toy_experts.write_plan(tmp_path / f"here{z}", Mesh(dp=2, ep=2), zero=z)), str(tmp_path / "0")) for z in (0, 1)]
    for found in run_ranks(2, go_on, loads)[0]:
        check_close(found, expected[0])


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    engine = Engine(toy.write_plan(tmp_path / "plan", Mesh()), ADAMW)
    engine.train_step(toy.batch(8))
    engine.save(tmp_path / "saves")
    (folder,) = complete(tmp_path / "saves")
    file, index = folder / "rank_0.safetensors", folder / INDEX
    before = engine.state_dict()
    for path in (file, index):
        for place in (9, path.stat().st_size // 2, path.stat().st_size - 3):
            flip(path, place)
            with pytest.raises(InputError, match=f"{path}: is damaged"):
                engine.load(tmp_path / "saves")
            flip(path, place)
    assert all(torch.equal(x, before[name]) for name, x in engine.state_dict().items())
    engine.load(tmp_path / "saves")
    file.unlink()
    with pytest.raises(InputError, match=f"{file}: is missing"):
        engine.load(folder)


def test_a_save_that_dies_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(toy.write_plan(tmp_path / "plan", Mesh()), ADAMW)
    saves = tmp_path / "saves"
    engine.save(saves)
    engine.train_step(toy.batch(8))

    def die(*_: object) -> None:
        raise OSError("no space left")

    for name in ("save_file", "write_part", "write_index"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, name, die)
            engine.save(saves, wait=False)
            with pytest.raises(InputError, match="rank 0: the checkpoint was not saved: no space left"):
                engine.wait_saved()
        assert read_index(saves).facts.step == 0
    engine.save(saves, keep=2)
    engine.save(saves, keep=2)
    assert [f.name for f in folders(saves)] == ["step_00000001", "step_00000001-1"], "a second save of a step"
    engine.step = 12
    engine.save(saves, keep=2)
    assert [f.name for f in folders(saves)] == ["step_00000001-1", "step_00000012"] and read_index(saves).facts.step == 12
    assert json.loads((saves / "step_00000012" / INDEX).read_text())["index"]["facts"]["optimizer"] == "adamw"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(InputError, match="other: found something else, expected a new path"):
        engine.save(tmp_path / "other")
