"""torch.distributed.checkpoint: saved from any plan, loaded into any other, and into DTensors by torch alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.runtime.dcp import FACTS, METADATA, parts_of
from meshwright.runtime.engine import Engine
from meshwright.tests import test_checkpoints, toy, toy_experts
from meshwright.tests.ranks import run_ranks

ADAMW = test_checkpoints.ADAMW


@pytest.fixture(autouse=True)
def leave_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def save_load_and_read(plans: list[str], experts: str, folder: str) -> float:
    """Each plan saves after two steps; the next one goes on from that for two; all end alike. DTensors of torch get the same values."""
    ends = []
    for number, plan in enumerate(plans):
        engine = Engine(plan, ADAMW)
        test_checkpoints.train(engine, 0, 2)
        engine.data = {"sequences": 16}
        engine.save(f"{folder}/{number}", dcp=True)
        again = Engine(plans[(number + 1) % len(plans)], ADAMW)
        again.load(f"{folder}/{number}")
        assert (again.step, again.data) == (2, {"sequences": 16})
        ends.append(test_checkpoints.train(again, 2, 4))
        with pytest.raises(InputError, match="found something else"):
            engine.save(f"{folder}/{number}", dcp=True)
    for end in ends[1:]:
        test_checkpoints.check_close(end, ends[0])
    engine = Engine(experts, ADAMW)
    engine.save(f"{folder}/experts", dcp=True)
    whole = [engine.state_dict()]
    dist.broadcast_object_list(whole)
    tied = engine.signature.tied
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    views = {n: distribute_tensor(torch.zeros_like(x), mesh, [Shard(0)]) for n, x in whole[0].items() if x.dim() > 1 and n not in tied}
    dcp.load(dict(views), checkpoint_id=f"{folder}/experts")
    return max(float((view.full_tensor() - whole[0][n]).abs().max()) for n, view in views.items())


def test_any_plan_loads_any_others_and_torch_loads_dtensors(tmp_path: Path) -> None:
    cases = [(Mesh(dp=4), 3), (Mesh(dp=2, tp=2), 2), (Mesh(pp=2, dp=2), 1), (Mesh(pp=2, tp=2), 0)]
    plans = [str(toy.write_plan(tmp_path / f"{m}-{z}", m, zero=z)) for m, z in cases]
    (tmp_path / "experts-plan").mkdir()
    experts = str(toy_experts.write_plan(tmp_path / "experts-plan" / "plan", Mesh(dp=2, tp=2, ep=2), "1f1b", "none", 3))
    assert run_ranks(4, save_load_and_read, plans, experts, str(tmp_path)) == [0.0] * 4
    saved = json.loads((tmp_path / "0" / FACTS).read_text())
    assert saved["step"] == 2 and (tmp_path / "0" / METADATA).is_file()
    one = Engine(toy.write_plan(tmp_path / "one", Mesh()), {"name": "sgd", "lr": 0.1, "momentum": 0.9})
    with pytest.raises(InputError, match="has the state of optimizer adamw, the engine runs sgd"):
        one.load(tmp_path / "0")
    (tmp_path / "0" / FACTS).write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        one.load(tmp_path / "0")


def test_portions_become_boxes_of_the_whole_tensor() -> None:
    """Rows 0, 1 and 4, 5 of a tensor of 6 x 4, of which elements 3 to 13 are a rank's."""
    whole = torch.arange(24.0).view(6, 4)
    want = (((0, 2), (4, 6)), ((0, 4),))
    flat = torch.cat((whole[0:2], whole[4:6])).flatten()[3:14].clone()
    found = dict(parts_of(want, flat, 3))
    assert sum(view.numel() for view in found.values()) == 11
    for box, view in found.items():
        assert torch.equal(view, whole[tuple(slice(low, high) for low, high in box)])
        view.zero_()
    assert not flat.any(), "views are of the portion itself"
