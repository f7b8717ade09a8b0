"""torch.distributed.checkpoint: saved from any plan, loaded into any other, and by torch alone."""

from __future__ import annotations

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
from meshwright.runtime.checkpoint_files import complete
from meshwright.runtime.engine import Engine
from meshwright.runtime.shards import cut, parts_of
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
        engine.save(f"{folder}/{number}")
        again = Engine(plans[(number + 1) % len(plans)], ADAMW)
        again.load(f"{folder}/{number}")
        assert (again.step, again.data) == (2, {"sequences": 16})
        ends.append(test_checkpoints.train(again, 2, 4))
    for end in ends[1:]:
        test_checkpoints.check_close(end, ends[0])
    engine = Engine(experts, ADAMW)
    engine.save(f"{folder}/experts")
    whole = [engine.state_dict()]
    dist.broadcast_object_list(whole)
    tied = engine.signature.tied
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    views = {n: distribute_tensor(torch.zeros_like(x), mesh, [Shard(0)]) for n, x in whole[0].items() if x.dim() > 1 and n not in tied}
    dcp.load(dict(views), checkpoint_id=complete(Path(folder) / "experts")[0])
    return max(float((view.full_tensor() - whole[0][n]).abs().max()) for n, view in views.items())


def test_any_plan_loads_any_others_and_torch_loads_dtensors(tmp_path: Path) -> None:
    cases = [(Mesh(dp=4), 3), (Mesh(dp=2, tp=2), 2), (Mesh(pp=2, dp=2), 1), (Mesh(pp=2, tp=2), 0)]
    plans = [str(toy.write_plan(tmp_path / f"{m}-{z}", m, zero=z)) for m, z in cases]
    (tmp_path / "experts-plan").mkdir()
    experts = str(toy_experts.write_plan(tmp_path / "experts-plan" / "plan", Mesh(dp=2, tp=2, ep=2), "1f1b", "none", 3))
    assert run_ranks(4, save_load_and_read, plans, experts, str(tmp_path)) == [0.0] * 4
    one = Engine(toy.write_plan(tmp_path / "one", Mesh()), ADAMW)
    one.load(tmp_path / "0")
    expected = {name: x for name, x in one.state_dict().items() if name not in one.signature.tied}
    dist.destroy_process_group()
    alone = {name: torch.empty_like(x) for name, x in expected.items()}
    dcp.load(alone, checkpoint_id=complete(tmp_path / "0")[0], no_dist=True)
    assert all(torch.equal(x, alone[name]) for name, x in expected.items()), "without Meshwright or a process group"
    other = Engine(tmp_path / "one", {"name": "sgd", "lr": 0.1, "momentum": 0.9})
    with pytest.raises(InputError, match="has the state of optimizer adamw, the engine runs sgd"):
        other.load(tmp_path / "0")


def test_portions_become_boxes_of_the_whole_tensor() -> None:
    """Rows 0, 1 and 4, 5 of a tensor of 6 x 4, of which elements 3 to 13 are a rank's."""
    whole = torch.arange(24.0).view(6, 4)
    want = (((0, 2), (4, 6)), ((0, 4),))
    flat = torch.cat((whole[0:2], whole[4:6])).flatten()[3:14].clone()
    found = dict(parts_of(want, flat, 3))
    assert sum(view.numel() for view in found.values()) == 11
    for box, view in found.items():
        assert torch.equal(view, whole[tuple(slice(low, high) for low, high in box)])
        for small, piece in cut(box, view, 3):
            assert piece.numel() <= 3 and torch.equal(piece, whole[tuple(slice(low, high) for low, high in small)])
            piece.zero_()
    assert not flat.any(), "views are of the portion itself, and pieces make up the view"
