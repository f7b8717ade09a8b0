"""16-bit plans on two real ranks: parity, ZeRO, overflows, checkpoints across precisions, 200 steps beside fp32. One launch for all but
the curves."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from meshwright.plan import compile
from meshwright.runtime.engine import Engine
from meshwright.tests.parity import OPTIMIZER, batches, build, relative, single
from meshwright.tests.precision_curves import apart, run, seeded
from meshwright.tests.ranks import run_ranks

ROWS = 8
PLANS: dict[str, dict[str, object]] = {
    "fp32": {"mesh": "tp=2"},
    "bf16, zero 0": {"mesh": "dp=2", "micro_batch": 2, "precision": "bf16"},
    "bf16, zero 3": {"mesh": "dp=2", "micro_batch": 2, "precision": "bf16", "zero": 3, "recompute": "full"},
    "bf16, zb": {"mesh": "pp=2", "schedule": "zb-h1", "precision": "bf16"},
    "fp16, tp": {"mesh": "tp=2", "precision": "fp16", "sequence_parallel": "on"},
    "fp16, zero 2": {"mesh": "dp=2", "micro_batch": 2, "precision": "fp16", "zero": 2, "reduce_dtype": "bf16"},
}
PLANTED = (1, 4)
"""Steps at which one rank's gradients overflow."""


def check_plans(places: dict[str, str], data: list[dict[str, torch.Tensor]], folder: str) -> dict[str, Any]:
    """One rank: a few steps of every plan, then overflows and checkpoints."""
    found: dict[str, Any] = {}
    for name, place in places.items():
        engine = Engine(place, optimizer=OPTIMIZER)
        first = engine.forward_backward(data[0])
        gradients = engine.gradients()
        done = [engine.train_step(batch) for batch in data]
        memory = engine.memory()["peak"]
        found[name] = {
            "losses": [first.loss, *(m.loss for m in done)],
            "norm": first.grad_norm,
            "gradients": gradients,
            "memory": [memory[key] for key in ("parameters", "gradients", "optimizer")],
        }
    found["overflow"] = overflows(places["fp16, tp"], data, folder)
    found["large scale"] = too_large_a_scale(places["fp16, zero 2"], data)
    found["crossed"] = across(places, data, folder)
    return found


def overflows(place: str, data: list[dict[str, torch.Tensor]], folder: str) -> list[tuple[Any, ...]]:
    """(skipped, scale of the step, whether weights moved) of steps in which rank 1 has an infinity; then after a checkpoint."""
    scaling = {"loss_scale": {"initial": 1024, "interval": 2}}
    engine = Engine(place, optimizer={**OPTIMIZER, **scaling})
    flat = engine._parameters
    finish, planted = flat.finish, [False]

    def with_infinity(tied: Any) -> None:
        finish(tied)
        if planted[0] and engine.rank == 1:
            flat.buckets[0].own_gradients[0] = float("inf")

    flat.finish = with_infinity  # type: ignore[method-assign]
    seen: list[tuple[Any, ...]] = []
    for step in range(6):
        planted[0] = step in PLANTED
        before = flat.buckets[0].own_values.clone()
        done = engine.train_step(data[0])
        seen.append((done.skipped, done.loss_scale, not torch.equal(before, flat.buckets[0].own_values), done.step))
    engine.save(f"{folder}/scaled")
    again = Engine(place, optimizer={**OPTIMIZER, **scaling})
    again.load(f"{folder}/scaled")
    assert (again.loss_scale, again.step) == (engine.loss_scale, 6)
    planted[0] = False
    seen.append((engine.train_step(data[0]).loss, again.train_step(data[0]).loss))
    seen.append((engine.train_step(data[0]).loss, again.train_step(data[0]).loss, engine.loss_scale, again.loss_scale))
    return seen


def too_large_a_scale(place: str, data: list[dict[str, torch.Tensor]]) -> list[tuple[bool, float]]:
    """A scale with which the gradients themselves overflow in fp16 comes down until they do not."""
    engine = Engine(place, optimizer={**OPTIMIZER, "loss_scale": {"initial": 2.0**34, "backoff": 2.0**-6}})
    return [(done.skipped, done.loss_scale) for done in (engine.train_step(data[0]) for _ in range(5))]


def across(places: dict[str, str], data: list[dict[str, torch.Tensor]], folder: str) -> dict[str, Any]:
    """Masters and moments of a bf16 run with ZeRO 3 in fp32 and fp16 plans of other meshes."""
    engine = Engine(places["bf16, zero 3"], optimizer=OPTIMIZER)
    for batch in data:
        engine.train_step(batch)
    engine.save(f"{folder}/crossed")
    truth = engine.state_dict()
    found = {}
    for name in ("fp32", "fp16, tp"):
        other = Engine(places[name], optimizer=OPTIMIZER)
        other.load(f"{folder}/crossed")
        states = other.state_dict()
        assert all(torch.equal(truth[key], states[key]) and states[key].dtype == torch.float32 for key in truth)
        found[name] = other.train_step(data[0]).loss
    found["bf16"] = engine.train_step(data[0]).loss
    return found


def test_sixteen_bits_on_ranks(tmp_path: Path) -> None:
    tiny = build("llama", layers=4, tie_word_embeddings=True)
    data = batches(ROWS, tiny.seq, 3)
    truth = single(tiny, data)
    places, documents = {}, {}
    for name, options in PLANS.items():
        plan = compile(tiny.directory, seq=tiny.seq, global_batch=ROWS, **options)
        places[name], documents[name] = str(tmp_path / name), plan.document
        plan.save(places[name])
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(2, check_plans, places, data, folder, timeout=600)
    for name, document in documents.items():
        one, other = (found[name] for found in ranks)
        assert one["losses"] == other["losses"] and one["norm"] == other["norm"]
        for rank, found in enumerate((one, other)):
            memory = document.stages[rank if document.mesh.pp > 1 else 0].memory
            assert found["memory"] == [memory.parameters, memory.gradients, memory.optimizer], name
        unit = {"fp32": 2.0**-18, "bf16": 2.0**-8, "fp16": 2.0**-11}[document.precision]
        assert abs(one["losses"][0] - truth.losses[0]) < unit * truth.losses[0], name
        least = 0.03 * max(float(g.norm()) for g in truth.gradients.values())
        for path, exact in truth.gradients.items():
            assert one["gradients"][path].dtype == torch.float32
            assert relative(one["gradients"][path], exact, least) < 8 * unit, (name, path)
    assert ranks[0]["bf16, zero 0"]["losses"] == ranks[0]["bf16, zero 3"]["losses"]
    check_overflows(ranks)
    for found in ranks:
        assert found["large scale"] == [(True, 2.0**34), (True, 2.0**28), (True, 2.0**22), (False, 2.0**16), (False, 2.0**16)]
        crossed = found["crossed"]
        assert max(abs(crossed["fp32"] - loss) for loss in crossed.values()) < 0.01


def check_overflows(ranks: list[dict[str, Any]]) -> None:
    """Both ranks skip the planted steps and no other; the scale halves then, and doubles after two good steps."""
    for found in ranks:
        steps, loads = found["overflow"][:6], found["overflow"][6:]
        assert [(skipped, scale, step) for skipped, scale, _, step in steps] == [
            (False, 1024, 1), (True, 1024, 2), (False, 512, 3), (False, 512, 4), (True, 1024, 5), (False, 512, 6),
        ]  # fmt: skip
        assert [moved for _, _, moved, _ in steps] == [True, False, True, True, False, True]
        for here, there, *scales in loads:
            assert here == there
            assert len(set(scales)) < 2


def test_two_hundred_steps_follow_fp32() -> None:
    """Curves of bf16 and fp16 stay nearer to fp32's than those of fp32 from other weights."""
    first, second = seeded(0), seeded(1)
    found = run({
        "fp32": (first, {"mesh": "dp=2"}),
        "seed": (second, {"mesh": "dp=2"}),
        "bf16": (first, {"mesh": "dp=2", "precision": "bf16", "zero": 2}),
        "fp16": (first, {"mesh": "tp=2", "precision": "fp16"}),
    })
    assert found["fp32"][-1] < 0.5 * found["fp32"][0]
    noise = apart(found["fp32"], found["seed"])
    assert apart(found["fp32"], found["bf16"]) < noise, noise
    assert apart(found["fp32"], found["fp16"]) < noise, noise
