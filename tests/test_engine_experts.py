"""The engine with experts over ep against one process, on the model of tests/toy_experts.py; and where such parameters lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.plans.layout import Layout
from meshwright.plans.mesh import Mesh
from meshwright.plans.save import load_plan
from meshwright.runtime.dryrun import DryReport, dry_run
from meshwright.runtime.engine import Engine
from meshwright.runtime.placement import LAYOUT_AXES, Parameter, Placement
from meshwright.runtime.program import load_program
from meshwright.tests import toy, toy_experts
from meshwright.tests.ranks import run_ranks

ADAMW: dict[str, object] = {"name": "adamw", "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 0.5}
STEPS = 3


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def run(plan: str) -> dict[str, object]:
    """Everything a rank finds out: gradients of a first batch, then metrics and weights of some steps."""
    engine = Engine(plan, ADAMW)
    first = engine.forward_backward(toy.batch(16, 99))
    gradients = {name: g.clone() for name, g in engine.gradients().items()}
    metrics = [(m.loss, m.grad_norm) for m in (first, *(engine.train_step(toy.batch(8, seed)) for seed in range(STEPS)))]
    memory = engine.memory()["now"]["parameters"]
    return {"metrics": metrics, "gradients": gradients, "weights": engine.state_dict(), "memory": memory}


def reference() -> tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor]]:
    """Metrics, the first batch's gradients, and the weights, of plain torch."""
    w = {name: x.requires_grad_() for name, x in toy_experts.weights().items()}
    optimizer = torch.optim.AdamW(list(w.values()), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    metrics, gradients = [], {}
    for data in (toy.batch(16, 99), *(toy.batch(8, seed) for seed in range(STEPS))):
        optimizer.zero_grad()
        loss = toy_experts.reference_loss(w, data)
        loss.backward()
        first = not metrics
        if first:
            gradients = {name: x.grad.clone() for name, x in w.items() if x.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(list(w.values()), 0.5)
        metrics.append((loss.item(), norm.item()))
        if not first:
            optimizer.step()
    return metrics, gradients, {name: x.detach() for name, x in w.items()}


def check_against_reference(results: list[dict[str, object]]) -> None:
    metrics, gradients, weights = reference()
    first = results[0]
    assert all(r["metrics"] == first["metrics"] for r in results)
    found, grads, whole = first["metrics"], first["gradients"], first["weights"]
    assert isinstance(found, list) and isinstance(grads, dict) and isinstance(whole, dict)
    for (loss, norm), (loss_there, norm_there) in zip(found, metrics, strict=True):
        assert loss == pytest.approx(loss_there, abs=2e-6)
        assert norm == pytest.approx(norm_there, rel=5e-6)
    assert grads.keys() == gradients.keys()
    assert max(relative(grads[name], gradients[name]) for name in gradients) < 1e-5
    assert max(relative(whole[name], weights[name]) for name in weights) < 1e-5


def run_all(plans: list[str]) -> dict[str, dict[str, object]]:
    return {plan: run(plan) for plan in plans}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [(Mesh(dp=2, ep=2), "1f1b", "none"), (Mesh(tp=2), "1f1b", "none")]),
        (
            4,
            [
                (Mesh(dp=4, ep=2), "1f1b", "full"),
                (Mesh(dp=4, ep=4), "1f1b", "none"),
                (Mesh(dp=2, tp=2, ep=2), "1f1b", "full"),
                (Mesh(pp=2, dp=2, ep=2), "1f1b", "none"),
            ],
        ),
    ],
)
def test_parity(tmp_path: Path, ranks: int, cases: list[tuple[Mesh, str, str]]) -> None:
    plans = [str(toy_experts.write_plan(tmp_path / str(case[0]), *case)) for case in cases]
    results = run_ranks(ranks, run_all, plans)
    for plan in plans:
        check_against_reference([result[plan] for result in results])


def save_and_train(plan: str, checkpoint: str) -> list[tuple[float, float]]:
    engine = Engine(plan, ADAMW)
    for seed in range(2):
        engine.train_step(toy.batch(8, seed))
    engine.save(checkpoint)
    return train_on(engine)


def train_on(engine: Engine) -> list[tuple[float, float]]:
    return [(m.loss, m.grad_norm) for m in (engine.train_step(toy.batch(8, seed)) for seed in range(2, 5))]


def load_and_train(plans: list[str], checkpoint: str) -> dict[str, list[tuple[float, float]]]:
    found = {}
    for plan in plans:
        engine = Engine(plan, ADAMW)
        engine.load(checkpoint)
        found[plan] = train_on(engine)
    return found


def test_checkpoints_load_into_any_mesh(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    there = toy_experts.write_plan(tmp_path / "there", Mesh(dp=4, ep=2))
    expected = run_ranks(4, save_and_train, str(there), checkpoint)[0]
    plans = [str(toy_experts.write_plan(tmp_path / str(m), m)) for m in (Mesh(dp=2), Mesh(dp=2, ep=2), Mesh(tp=2))]
    found = run_ranks(2, load_and_train, plans, checkpoint)
    assert found[0] == found[1]
    for metrics in found[0].values():
        assert [x for pair in metrics for x in pair] == pytest.approx([x for pair in expected for x in pair], rel=3e-6)


def placement(mesh: Mesh, rank: int, layouts: Mapping[str, str], stages: tuple[int, ...] = (0,)) -> Placement:
    parameters = {n: Parameter(n, (4, 8), Layout.parse(text), stages) for n, text in layouts.items()}
    return Placement(mesh, rank, parameters)


def test_every_element_has_one_owner_and_its_replicas_sum_it() -> None:
    mesh = Mesh(dp=4, tp=2, ep=2)
    layouts = {"whole": "I", "expert": "S(0)@ep", "both": "S(1)@tp S(0)@ep", "partial": "R@tp S(0)@ep", "cut": "S(0)@tp"}
    ranks = [placement(mesh, rank, layouts) for rank in range(mesh.world_size)]
    owners = {p.name: ranks[0].owners(p) for p in ranks[0].held}
    assert owners == {"whole": (0,), "expert": (0, 2), "both": (0, 2, 1, 3), "partial": (0, 2), "cut": (0, 1)}
    assert {n: p.replica_axes for n, p in ranks[0].parameters.items()}["both"] == ("edp", "cp")
    for parameter in ranks[0].held:
        seen = torch.zeros(4, 8)
        for rank in ranks:
            rows, columns = rank.ranges(parameter)
            if parameter.name in rank.owned:
                seen[slice(*rows[0]), slice(*columns[0])] += 1
            replicas = {rank.rank}
            for axis in (*parameter.replica_axes, *(a for a in LAYOUT_AXES if parameter.layout.on(a).kind == "I" and a != "ep")):
                replicas = {other for r in replicas for other in mesh.group(r, axis)}
            if parameter.layout.on("tp").kind != "R":
                assert replicas == {r.rank for r in ranks if r.ranges(parameter) == rank.ranges(parameter)}
        assert seen.eq(1).all()
    assert mesh.group(5, "edp") == (1, 5) and mesh.groups("edp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.size("edp") == 2 and Mesh(pp=2, dp=2).group(3, "edp") == (2, 3) and Mesh(dp=2, ep=2).group(1, "edp") == (1,)


def test_experts_are_no_sum_over_ep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parameter w: found R@ep, expected S or nothing on ep"):
        Parameter("w", (4,), Layout.parse("R@ep"), (0,))
    with pytest.raises(ValueError, match="shards dim 0 twice"):
        placement(Mesh(dp=2, tp=2, ep=2), 0, {"w": "S(0)@tp S(0)@ep"}).ranges(Parameter("w", (4, 8), Layout.parse("S(0)@tp S(0)@ep"), (0,)))
    plan = toy_experts.write_plan(tmp_path / "plan", Mesh(dp=2, ep=2))
    text = (plan / "plan.yaml").read_text()
    assert "S(0)@ep" in text
    (plan / "plan.yaml").write_text(text.replace("R@tp S(0)@ep", "R@ep", 1))
    with pytest.raises(InputError, match="found R@ep, expected S or nothing on ep: its ranks are part of dp"):
        load_plan(plan)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dry_run(tmp_path: Path, recompute: str) -> None:
    mesh = Mesh(dp=8, tp=2, ep=4)

    def report(rank: int) -> DryReport:
        program = load_program(toy_experts.stage_text(0, mesh, recompute), 0, tmp_path / "stage_0.py")
        shapes = toy_experts.shapes().items()
        parameters = {n: (Layout.parse(toy_experts.layout(n)).local_shape(s, mesh), "float32") for n, s in shapes}
        inputs = {name: ((1, toy.SEQ), "int64") for name in ("input_ids", "labels")}
        return dry_run(program, mesh, rank, parameters, inputs, {})

    found = report(13)
    again = 4 if recompute == "full" else 0
    assert found.calls["ep", "all-to-all", "forward"] == toy.LAYERS * 4
    assert found.calls["ep", "all-to-all", "backward"] == toy.LAYERS * (2 + again)
