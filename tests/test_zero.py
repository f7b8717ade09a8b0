"""ZeRO 0 to 3 on the toy models against one process: parity, what a rank holds, checkpoints between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.plans.mesh import Mesh
from meshwright.runtime.engine import Engine
from meshwright.tests import test_engine, test_engine_experts, toy, toy_experts
from meshwright.tests.ranks import run_ranks

ADAMW, SGD = test_engine.ADAMW, test_engine.SGD
Case = tuple[Mesh, int, str, dict[str, object]]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [(Mesh(dp=2), 1, "none", SGD), (Mesh(dp=2), 2, "full", ADAMW), (Mesh(dp=2), 3, "none", ADAMW)]),
        (
            4,
            [
                (Mesh(dp=4), 1, "none", ADAMW),
                (Mesh(dp=4), 3, "full", SGD),
                (Mesh(dp=2, tp=2), 2, "none", ADAMW),
                (Mesh(dp=2, tp=2), 3, "full", ADAMW),
                (Mesh(pp=2, dp=2), 1, "none", ADAMW),
                (Mesh(pp=2, dp=2), 3, "none", ADAMW),
            ],
        ),
    ],
)
def test_parity(tmp_path: Path, ranks: int, cases: list[Case]) -> None:
    plans = {
        str(toy.write_plan(tmp_path / f"{mesh}-{zero}", mesh, "1f1b", recompute, zero)): optimizer
        for mesh, zero, recompute, optimizer in cases
    }
    results = run_ranks(ranks, test_engine.run_all, plans)
    for plan, optimizer in plans.items():
        test_engine.check_against_reference([result[plan] for result in results], optimizer)


def test_parity_of_experts(tmp_path: Path) -> None:
    cases = [(Mesh(dp=4, ep=2), 1), (Mesh(dp=4, ep=2), 3), (Mesh(dp=2, tp=2, ep=2), 2)]
    plans = [str(toy_experts.write_plan(tmp_path / f"{m}-{z}", m, "1f1b", "full", z)) for m, z in cases]
    results = run_ranks(4, test_engine_experts.run_all, plans)
    for plan in plans:
        test_engine_experts.check_against_reference([result[plan] for result in results])


def memory(plans: list[str], rows: int) -> list[dict[str, dict[str, int]]]:
    found = []
    for plan in plans:
        engine = Engine(plan, ADAMW)
        for step in range(2):
            engine.train_step(toy.batch(rows, step))
        found.append(engine.memory())
    return found


def test_a_rank_holds_what_zero_promises(tmp_path: Path) -> None:
    """The embedding has 256 elements, the final norm 16 (8 and padding), each of four layers 16 + 192 + 32 + 192; `scale`, 8, is
    frozen. Buckets are padded to 32 (two shards of 16)."""
    plans = [str(toy.write_plan(tmp_path / str(zero), Mesh(dp=2), zero=zero)) for zero in range(4)]
    embedding, layer, frozen = 4 * 256, 4 * 448, 4 * 8
    whole = {0: 4 * 2016, 1: 4 * 2016, 2: 4 * 2016, 3: embedding + 4 * 32 + 4 * layer}
    for zero, found in enumerate(run_ranks(2, memory, plans, 2)[0]):
        now, peak, size = found["now"], found["peak"], whole[zero]
        assert now["parameters"] == frozen + (size // 2 if zero == 3 else size), zero
        assert now["gradients"] == (size // 2 if zero >= 2 else size), zero
        assert now["optimizer"] == 2 * (size // 2 if zero else size), zero
        if zero < 2:
            assert peak == {**now, "activations": peak["activations"]}
        if zero == 3:  # the embedding is tied; a layer and the next one
            assert peak["parameters"] - now["parameters"] == embedding + 2 * layer
            assert peak["gradients"] - now["gradients"] == embedding + 2 * layer
