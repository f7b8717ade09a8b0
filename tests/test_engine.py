"""The engine against one process: loss, gradients, norm, updates, checkpoints, on the toy model of tests/toy.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.passes.simulate import in_flight
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.runtime import ops
from meshwright.runtime.context import Context
from meshwright.runtime.engine import Engine
from meshwright.runtime.schedules import plan_order
from meshwright.tests import toy
from meshwright.tests.ranks import run_ranks

ADAMW: dict[str, object] = {"name": "adamw", "lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 0.5}
SGD: dict[str, object] = {"name": "sgd", "lr": 1e-2, "momentum": 0.9}
STEPS = 4


@pytest.fixture(autouse=True)
def leave_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def train(engine: Engine, steps: range) -> list[tuple[float, float]]:
    metrics = [engine.train_step(toy.batch(8, seed)) for seed in steps]
    return [(m.loss, m.grad_norm) for m in metrics]


def run(plan: str, optimizer: Mapping[str, object]) -> dict[str, object]:
    """Everything a rank finds out: gradients of a first batch, metrics and weights of some steps, memory."""
    engine = Engine(plan, optimizer)
    first = engine.forward_backward(toy.batch(16, 99))
    gradients = {name: g.clone() for name, g in engine.gradients().items()}
    metrics = [(first.loss, first.grad_norm), *train(engine, range(STEPS))]
    assert_own_rows_do(engine)
    return {
        "metrics": metrics,
        "gradients": gradients,
        "weights": engine.state_dict(),
        "memory": engine.memory(),
        "step": engine.step,
        "in flight": (engine.peak_in_flight, simulated_in_flight(engine)),
    }


def assert_own_rows_do(engine: Engine) -> None:
    """A rank that has only its rows finds what it finds with all of them."""
    batch, rows = toy.batch(16, 99), engine.own_rows(16)
    whole = engine.forward_backward(batch)
    own = engine.forward_backward({name: x[rows.start : rows.stop] for name, x in batch.items()}, own_rows=True)
    assert own == whole


def simulated_in_flight(engine: Engine) -> int:
    """The most that this rank keeps in the steps of `run`."""
    mesh = engine.plan.mesh
    orders = [plan_order(engine.plan, rows // mesh.dp) for rows in (8, 16)]
    return max(in_flight(order)[mesh.coordinates(engine.rank)["pp"]] for order in orders)


def check_against_reference(results: list[dict[str, object]], optimizer: dict[str, object]) -> None:
    reference = toy.Reference(optimizer)
    expected = [reference.forward_backward(toy.batch(16, 99))]
    gradients = {name: w.grad.clone() for name, w in reference.trained.items() if w.grad is not None}
    expected += [reference.train_step(toy.batch(8, seed)) for seed in range(STEPS)]
    first = results[0]
    assert all(r["metrics"] == first["metrics"] and r["step"] == STEPS for r in results)
    metrics = first["metrics"]
    assert isinstance(metrics, list)
    for (loss, norm), (loss_there, norm_there) in zip(metrics, expected, strict=True):
        assert loss == pytest.approx(loss_there, abs=2e-6)
        assert norm == pytest.approx(norm_there, rel=5e-6)
    found, whole = first["gradients"], first["weights"]
    assert isinstance(found, dict) and isinstance(whole, dict)
    assert found.keys() == gradients.keys()
    assert max(relative(found[name], gradients[name]) for name in gradients) < 1e-5
    assert whole.keys() == {*toy.weights(), "head.weight"}
    reference.weights["head.weight"] = reference.weights["embed.weight"]
    assert max(relative(whole[name], reference.weights[name].detach()) for name in whole) < 1e-5
    assert torch.equal(whole["extra"], torch.arange(3.0)) and torch.equal(whole["head.weight"], whole["embed.weight"])
    assert all(not r["gradients"] and not r["weights"] for r in results[1:])
    assert all(peak == simulated for peak, simulated in (r["in flight"] for r in results))  # type: ignore[attr-defined]
    memory = first["memory"]
    assert isinstance(memory, dict)
    assert memory["peak"]["activations"] > 0 and memory["now"]["optimizer"] > 0


def run_all(plans: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    return {plan: run(plan, optimizer) for plan, optimizer in plans.items()}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [(Mesh(pp=2), "1f1b", "none", ADAMW), (Mesh(tp=2), "1f1b", "full", SGD), (Mesh(dp=2), "gpipe", "none", ADAMW)]),
        (
            2,
            [
                (Mesh(pp=2), "interleaved", "none", ADAMW),
                (Mesh(pp=2), "zb-h1", "full", ADAMW),
                (Mesh(pp=2), "zb-h2", "none", ADAMW),
                (Mesh(pp=2), "zb-v", "full", ADAMW),
                (Mesh(tp=2), "zb-v", "none", SGD),
            ],
        ),
        (
            4,
            [
                (Mesh(pp=4), "1f1b", "none", ADAMW),
                (Mesh(pp=4), "zb-h1", "none", ADAMW),
                (Mesh(pp=2, tp=2), "zb-v", "full", ADAMW),
                (Mesh(pp=2, dp=2), "interleaved", "none", ADAMW),
                (Mesh(pp=2, tp=2), "gpipe", "full", ADAMW),
                (Mesh(pp=2, dp=2), "1f1b", "none", SGD),
                (Mesh(dp=2, tp=2), "1f1b", "none", ADAMW),
            ],
        ),
    ],
)
def test_parity(tmp_path: Path, ranks: int, cases: list[tuple[Mesh, str, str, dict[str, object]]]) -> None:
    plans = {
        str(toy.write_plan(tmp_path / f"{mesh}-{schedule}", mesh, schedule, recompute)): optimizer
        for mesh, schedule, recompute, optimizer in cases
    }
    results = run_ranks(ranks, run_all, plans)
    for plan, optimizer in plans.items():
        check_against_reference([result[plan] for result in results], optimizer)


def save_after_two_steps(plan: str, checkpoint: str) -> list[tuple[float, float]]:
    engine = Engine(plan, ADAMW)
    train(engine, range(1))
    engine.save(checkpoint)
    train(engine, range(1, 2))
    engine.save(checkpoint)
    expected = train(engine, range(2, STEPS))
    assert load_and_train(plan, checkpoint) == expected
    return expected


def load_and_train(plan: str, checkpoint: str) -> list[tuple[float, float]]:
    engine = Engine(plan, ADAMW)
    engine.load(checkpoint)
    assert engine.step == 2
    return train(engine, range(engine.step, STEPS))


def test_checkpoints_load_into_any_mesh(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    there = toy.write_plan(tmp_path / "there", Mesh(pp=2, tp=2))
    expected = run_ranks(4, save_after_two_steps, str(there), str(checkpoint))[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "there", "weights"]
    here = toy.write_plan(tmp_path / "here", Mesh(tp=2))
    alone = toy.write_plan(tmp_path / "alone", Mesh())
    for found in (run_ranks(2, load_and_train, str(here), str(checkpoint))[0], load_and_train(str(alone), str(checkpoint))):
        assert [x for pair in found for x in pair] == pytest.approx([x for pair in expected for x in pair], rel=2e-6)
    with pytest.raises(InputError, match="has the state of optimizer adamw, the engine runs sgd"):
        Engine(alone, SGD).load(checkpoint)
    with pytest.raises(InputError, match="is no checkpoint"):
        Engine(alone).load(tmp_path)


def test_bad_batches(tmp_path: Path) -> None:
    engine = Engine(toy.write_plan(tmp_path / "plan", Mesh()), ADAMW)
    good = toy.batch(4)

    def refuse(message: str, **changes: Tensor) -> None:
        with pytest.raises(InputError, match=message):
            engine.forward_backward({**good, **changes})

    refuse("found inputs input_ids, labels, mask, expected input_ids, labels", mask=good["labels"])
    refuse(r"labels: found shape \[3, 6\], the plan was compiled for \[4, 6\]", labels=good["labels"][:3])
    refuse(r"input_ids: found shape \[4, 5\]", input_ids=good["input_ids"][:, :5])
    refuse("input_ids: found float32, expected int64", input_ids=good["input_ids"].float())
    refuse("input_ids: found id 32, expected 0 to 31", input_ids=good["input_ids"] + 32 - good["input_ids"].max())
    refuse("labels: found id -7", labels=good["labels"].masked_fill(good["labels"] == -100, -7))
    refuse("0 rows do not divide", **{name: x[:0] for name, x in good.items()})
    ignored = engine.train_step({**good, "labels": torch.full_like(good["labels"], -100)})
    assert (ignored.loss, ignored.grad_norm, ignored.step) == (0.0, 0.0, 1)


def test_bad_options_and_world(tmp_path: Path) -> None:
    plan = toy.write_plan(tmp_path / "plan", Mesh())
    for options, message in (
        ({"name": "adam"}, "optimizer.name: found 'adam', expected one of adamw, sgd"),
        ({"name": "sgd", "betas": (0.9, 0.9)}, "optimizer.betas: unknown option; the options of sgd are lr, momentum"),
        ({"name": "adamw", "lr": "high"}, "optimizer.lr: found 'high', expected a number"),
        ({"name": "adamw", "betas": (0.9, 1.0)}, "optimizer.betas: found"),
    ):
        with pytest.raises(InputError, match=message):
            Engine(plan, options)
    with pytest.raises(InputError, match="train_step needs an optimizer"):
        Engine(plan).train_step(toy.batch(8))
    with pytest.raises(InputError, match="mesh pp=2,tp=2 needs 4 processes, torchrun started 1"):
        Engine(toy.write_plan(tmp_path / "large", Mesh(pp=2, tp=2)), ADAMW)


def test_dropout_can_be_turned_off() -> None:
    x = torch.ones(8)
    seed = Context({}, "cpu", dropout=False).seed(0, 0)
    assert ops.dropout(x, 0.5, seed) is x
    query = torch.ones(1, 1, 2, 4)
    assert torch.equal(ops.sdpa(query, query, query, dropout_p=0.9, seed=seed), query)
