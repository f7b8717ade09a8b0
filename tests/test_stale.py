"""PipeDream-2BW: the engine against one process that makes the same delayed update, W(t+1) = W(t) - lr g(W(t-1)); its actions as data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.passes.simulate import in_flight, simulate
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.plans.reading import read_plan
from meshwright.runtime.actions import Action, Kind
from meshwright.runtime.endless import lead, order, unrolled
from meshwright.runtime.engine import Engine
from meshwright.runtime.metrics import NonFiniteError
from meshwright.runtime.soundness import UnsoundError, check_schedule
from meshwright.tests import toy
from meshwright.tests.ranks import run_ranks

ADAMW: dict[str, object] = {"name": "adamw", "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 0.5}
SGD: dict[str, object] = {"name": "sgd", "lr": 1e-2, "momentum": 0.9}
ROWS = (8, 8, 8, 6, 2, 2, 2, 8, 8)
"""Of every batch; the run is looked at after batch LOOK, and goes on."""
LOOK = 2


class DelayedReference(toy.Reference):
    """A single process whose gradients are those of the weights before the last update."""

    def __init__(self, optimizer: dict[str, object]) -> None:
        super().__init__(optimizer)
        self.before = {n: w.detach().clone() for n, w in self.trained.items()}

    def train_step(self, data: dict[str, Tensor]) -> tuple[float, float]:
        now = {n: w.detach().clone() for n, w in self.trained.items()}
        self.put(self.before)
        found = self.forward_backward(data)
        self.put(now)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.trained.values()), float(str(self.clip)))
        self.optimizer.step()
        self.before = now
        return found

    def put(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.trained[name].copy_(value)


def run(plan: str, optimizer: dict[str, object]) -> dict[str, object]:
    """One rank: losses of all batches, norms of the updates that the calls made, weights on the way and at the end. An engine before it
    is left with a batch under way."""
    Engine(plan, optimizer).train_step(toy.batch(8, 99))
    engine = Engine(plan, optimizer)
    metrics = []
    weights = []
    for batch, rows in enumerate(ROWS):
        metrics.append(engine.train_step(toy.batch(rows, batch)))
        if batch == LOOK:
            weights.append(engine.state_dict())
    weights.append(engine.state_dict())
    coordinate = engine.plan.mesh.coordinates(engine.rank)["pp"]
    kept = (in_flight(order(engine.plan.mesh.pp, rows // engine.plan.mesh.dp, 4))[coordinate] for rows in set(ROWS))
    with pytest.raises(NonFiniteError, match="nothing was updated"):
        engine.learning_rate = float("inf")
        for batch in range(4):
            engine.train_step(toy.batch(8, batch))
    return {
        "losses": [m.loss for m in metrics],
        "norms": [m.grad_norm for m in metrics],
        "weights": weights,
        "in flight": (engine.peak_in_flight, max(kept)),
        "memory": engine.memory()["peak"],
        "steps": [m.step for m in metrics],
    }


def run_all(plans: dict[str, dict[str, object]]) -> list[dict[str, object]]:
    return [run(plan, optimizer) for plan, optimizer in plans.items()]


@pytest.mark.parametrize("meshes", [(Mesh(pp=2), Mesh(tp=2)), (Mesh(pp=4), Mesh(pp=2, dp=2), Mesh(pp=2, tp=2))], ids=["2", "4"])
def test_a_delayed_single_process_is_matched(tmp_path: Path, meshes: tuple[Mesh, ...]) -> None:
    plans = {str(toy.write_plan(tmp_path / f"{mesh}", mesh, "pipedream-2bw")): ADAMW if i else SGD for i, mesh in enumerate(meshes)}
    ranks = run_ranks(meshes[0].world_size, run_all, plans)
    for place, (plan, optimizer) in enumerate(plans.items()):
        found = [rank[place] for rank in ranks]
        reference = DelayedReference(optimizer)
        expected, weights = [], []
        for batch, rows in enumerate(ROWS):
            expected.append(reference.train_step(toy.batch(rows, batch)))
            if batch in (LOOK, len(ROWS) - 1):
                weights.append({n: w.detach().clone() for n, w in reference.trained.items()})
        first = found[0]
        assert all(f["losses"] == first["losses"] and f["norms"] == first["norms"] for f in found), plan
        assert first["losses"] == pytest.approx([loss for loss, _ in expected], abs=2e-6)
        check_norms(first["norms"], [norm for _, norm in expected])  # type: ignore[arg-type]
        for there, here in zip(weights, first["weights"], strict=True):  # type: ignore[call-overload]
            assert max(float((here[n] - there[n]).norm() / there[n].norm()) for n in there) < 1e-5, plan
        assert all(f["in flight"][0] == f["in flight"][1] for f in found), [f["in flight"] for f in found]  # type: ignore[index]
        assert first["steps"] == [*range(1, len(ROWS) + 1)]


def check_norms(found: list[float], expected: list[float]) -> None:
    """A call reports the update that it made: of the batch before, where that was under way."""
    for batch, norm in enumerate(found):
        alone = batch in (0, LOOK + 1)
        resized = batch and ROWS[batch] != ROWS[batch - 1]
        assert norm == (0.0 if alone else pytest.approx(expected[batch - 1], rel=5e-6)) or resized, (batch, found, expected)


def test_memory_has_two_versions(tmp_path: Path) -> None:
    def peak(schedule: str) -> dict[str, int]:
        engine = Engine(toy.write_plan(tmp_path / schedule, Mesh(), schedule), ADAMW)
        engine.train_step(toy.batch(8))
        return engine.memory()["peak"]

    once, twice = peak("1f1b"), peak("pipedream-2bw")
    frozen = 4 * toy.HIDDEN
    assert twice["parameters"] == 2 * once["parameters"] - frozen
    assert twice["gradients"] == 2 * once["gradients"] and twice["optimizer"] == once["optimizer"]
    document = toy.document(tmp_path / "weights", Mesh(pp=2, dp=2), "pipedream-2bw", "none").model_dump(mode="json", by_alias=True)
    with pytest.raises(InputError, match="zero: found 1, pipedream-2bw keeps two whole versions of the weights"):
        read_plan({**document, "zero": 1})


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_no_rank_waits_for_ever_and_versions_are_two(ranks: int, micro_batches: int) -> None:
    schedule = unrolled(ranks, micro_batches, 4)
    check_schedule(schedule, batch=micro_batches)
    for rank, actions in enumerate(schedule):
        assert in_flight(order(ranks, micro_batches, 4))[rank] == 1 + lead(ranks, rank, micro_batches)
        open_batches: set[int] = set()
        for action in actions:
            if action.kind is Kind.F:
                open_batches.add(action.micro_batch // micro_batches)
            elif action.kind is Kind.UPDATE:
                open_batches.discard(action.micro_batch)
            assert len(open_batches) <= 2
    late = [list(actions) for actions in schedule]
    moved = Action(0, Kind.UPDATE, 0)
    late[0].remove(moved)
    late[0].insert(late[0].index(Action(0, Kind.F, 2 * micro_batches)) + 1, moved)
    with pytest.raises(UnsoundError, match=f"0F{2 * micro_batches} comes before 0UPDATE0"):
        check_schedule(tuple(map(tuple, late)), batch=micro_batches)


def test_no_bubble_with_even_stages() -> None:
    found = simulate("pipedream-2bw", stages=4, micro_batches=4, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    assert found.bubble == pytest.approx(0) and found.in_flight == (4, 3, 2, 1)
