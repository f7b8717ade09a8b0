"""The plan's bytes of parameters, gradients and optimizer state are those that ranks measure, for every ZeRO stage."""

from __future__ import annotations

from pathlib import Path

from meshwright.plan import compile
from meshwright.runtime.engine import Engine
from meshwright.tests.parity import OPTIMIZER, batches, build
from meshwright.tests.ranks import run_ranks

CASES = [
    ("llama", "dp=4", 4, {"tie_word_embeddings": True}, {}, (1, 2, 3)),
    ("llama", "pp=2,dp=2", 8, {}, {}, (2, 3)),
    ("llama", "pp=2,dp=2", 4, {}, {"schedule": "zb-h1"}, (3,)),
    ("llama", "pp=2,dp=2", 8, {"tie_word_embeddings": True}, {"schedule": "pipedream-2bw"}, (0,)),
    ("mixtral", "dp=4,ep=2", 8, {}, {}, (3,)),
]
WHAT = ("parameters", "gradients", "optimizer")


def measure(plans: list[tuple[str, int, int]]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Peaks of two steps, and what the plan says of this rank's stage."""
    found = []
    for plan, rows, seq in plans:
        engine = Engine(plan, OPTIMIZER)
        for batch in batches(rows, seq, 2):
            engine.train_step(batch)
        (stage,) = engine.plan.stages_of(engine.plan.mesh.coordinates(engine.rank)["pp"])
        found.append((engine.memory()["peak"], engine.plan.stages[stage].memory.model_dump()))
    return found


def test_predicted_and_measured_bytes_are_equal(tmp_path: Path) -> None:
    plans = []
    for case, (name, mesh, rows, changes, options, zeros) in enumerate(CASES):
        tiny = build(name, layers=2, **changes)
        for zero in zeros:
            directory = tmp_path / f"{case}-{zero}"
            compile(tiny.directory, mesh=mesh, seq=tiny.seq, global_batch=rows, zero=zero, **options).save(directory)
            plans.append((str(directory), rows, tiny.seq))
    for rank, found in enumerate(run_ranks(4, measure, plans, timeout=300)):
        for plan, (measured, told) in zip(plans, found, strict=True):
            assert {w: measured[w] for w in WHAT} == {w: told[w] for w in WHAT}, (rank, plan[0])
