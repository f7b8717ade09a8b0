"""Checkpoints: exact resumption, any plan from any other, saves in the background and saves that die, damage, what stays."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.runtime import checkpoint_files, dcp
from meshwright.runtime.checkpoint_files import INDEX, complete, partial, read_index
from meshwright.runtime.dcp import METADATA, HashedFile, read_metadata
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


@contextmanager
def held_back() -> Iterator[Event]:
    """No file of a checkpoint is completed before the event."""
    event, close = Event(), HashedFile.close

    def wait_and_close(file: HashedFile) -> None:
        assert event.wait(60)
        close(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HashedFile, "close", wait_and_close)
        yield event


def straight_and_in_halves(plans: list[str], directory: str) -> list[Outcome]:
    """Each plan: HALF steps, a save that is under way during the rest; and the rest again from the save: bit by bit the same."""
    found = []
    for number, plan in enumerate(plans):
        folder = Path(directory) / str(number)
        engine = Engine(plan, ADAMW)
        train(engine, 0, HALF)
        engine.data = {"sequences": 8 * HALF}
        with held_back() as event:
            engine.save(folder, wait=False)
            metrics, weights = train(engine, HALF, STEPS)
            assert not complete(folder) and len(partial(folder)) == 1, "steps do not wait for a save"
            event.set()
            engine.wait_saved()
        assert len(complete(folder)) == 1 and not partial(folder)
        again = Engine(plan, ADAMW)
        again.load(folder)
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


def test_damage_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(toy.write_plan(tmp_path / "plan", Mesh()), ADAMW)
    engine.train_step(toy.batch(8))
    engine.save(tmp_path / "saves")
    (folder,) = complete(tmp_path / "saves")
    file, metadata, index = (folder / name for name in ("__0_0.distcp", METADATA, INDEX))
    before = engine.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(dcp._Records, "load", None)
        for path in (file, metadata, index):
            size = path.stat().st_size
            for place in (9, size // 3, size // 2, size - 3, size - 1):
                flip(path, place)
                with pytest.raises(InputError, match=f"{path}: is damaged") as problem:
                    read_index(folder).check_files([METADATA, file.name])
                assert "\n" not in str(problem.value)
                flip(path, place)
        flip(metadata, 9)
        with pytest.raises(InputError, match=f"{metadata}: is damaged"):
            engine.load(folder)
        flip(metadata, 9)
    for path in (file, metadata, index):
        flip(path, path.stat().st_size // 2)
        with pytest.raises(InputError, match=f"{path}: is damaged"):
            engine.load(tmp_path / "saves")
        flip(path, path.stat().st_size // 2)
    assert all(torch.equal(x, before[name]) for name, x in engine.state_dict().items())
    engine.load(tmp_path / "saves")
    file.unlink()
    with pytest.raises(InputError, match=f"{file}: is missing"):
        engine.load(folder)


def test_metadata_runs_no_code(tmp_path: Path) -> None:
    """Also where whoever made it could make digests for it."""

    class Bad:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path}/ran",)

    engine = Engine(toy.write_plan(tmp_path / "plan", Mesh()), ADAMW)
    engine.save(tmp_path / "saves")
    index = read_index(tmp_path / "saves")
    (index.folder / METADATA).write_bytes(pickle.dumps(Bad()))
    work = checkpoint_files.begin(tmp_path / "bad", 0)
    digest = sha256((index.folder / METADATA).read_bytes()).hexdigest()
    (index.folder / METADATA).rename(work / METADATA)
    checkpoint_files.publish(work, index.facts, {METADATA: digest})
    with pytest.raises(InputError, match=r"\.metadata: cannot be read: posix.system is no record of torch.distributed.checkpoint"):
        engine.load(tmp_path / "bad")
    assert not (tmp_path / "ran").exists()


def test_a_save_that_dies_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(toy.write_plan(tmp_path / "plan", Mesh()), ADAMW)
    saves = tmp_path / "saves"
    engine.save(saves)
    engine.train_step(toy.batch(8))

    calls: list[int] = []

    def dying(act: Callable[..., None]) -> Callable[..., None]:
        def act_or_die(*args: object) -> None:
            calls.append(0)
            if len(calls) == last:
                raise OSError("no space left")
            act(*args)

        return act_or_die

    for last in range(1, 7):
        calls.clear()
        with monkeypatch.context() as patch:
            for name in ("fsync", "rename"):
                patch.setattr(os, name, dying(getattr(os, name)))
            with pytest.raises(InputError, match=f"{saves}: rank 0 could not save a checkpoint: no space left"):
                engine.save(saves, wait=last % 2 == 0)
                engine.wait_saved()
        assert [f.name for f in saves.iterdir() if not f.name.startswith(".")] == ["step_00000000"] and len(partial(saves)) == 1
        index = read_index(saves)
        index.check_files(index.files)
        assert index.facts.step == 0
    engine.save(saves, keep=2)
    assert not partial(saves), "the next save removes what was left"
    engine.save(saves, keep=2)
    assert [f.name for f in complete(saves)] == ["step_00000001", "step_00000001-1"], "a second save of a step"
    engine.step = 12
    engine.save(saves, keep=2)
    assert [f.name for f in complete(saves)] == ["step_00000001-1", "step_00000012"] and read_index(saves).facts.step == 12
    assert json.loads((saves / "step_00000012" / INDEX).read_text())["index"]["facts"]["optimizer"] == "adamw"
    engine.step = 3
    engine.save(saves)
    assert [f.name for f in complete(saves)] == ["step_00000003", "step_00000012"], "what was just written stays"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    for folder in (tmp_path / "other", saves / "step_00000012"):
        with pytest.raises(InputError, match=f"{folder}: found something else, expected a new path"):
            engine.save(folder)


def save_where_one_cannot(plan: str, directory: str) -> tuple[list[str], list[float]]:
    """Rank 1 can write nothing; every rank is told, and goes on."""
    engine = Engine(plan, ADAMW)
    problems = []
    for wait in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if engine.rank == 1:
                patch.setattr(HashedFile, "write", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
            with pytest.raises(InputError) as problem:
                engine.save(directory, wait=wait)
                engine.train_step(toy.batch(8))
                engine.wait_saved()
            problems.append(str(problem.value))
    engine.save(directory)
    return problems, train(engine, 0, 1)[0]


def test_all_ranks_hear_of_a_full_disk(tmp_path: Path) -> None:
    plan = toy.write_plan(tmp_path / "plan", Mesh(dp=2))
    (problems, metrics), other = run_ranks(2, save_where_one_cannot, str(plan), str(tmp_path / "saves"))
    assert problems == [f"{tmp_path}/saves: rank 1 could not save a checkpoint: [Errno 28] No space left on device"] * 2
    assert other == (problems, metrics)
    index = read_index(tmp_path / "saves")
    assert len(read_metadata(index).state_dict_metadata) > 1 and sorted(index.files) == [METADATA, "__0_0.distcp", "__1_0.distcp"]
