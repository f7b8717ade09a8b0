"""The plan's bytes of parameters, gradients and optimizer state are those that ranks measure, for every ZeRO stage; in 16 bits they are
those of the ZeRO paper."""

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
    ("llama", "dp=4", 4, {"tie_word_embeddings": True}, {"precision": "bf16", "reduce_dtype": "bf16"}, (0, 1, 2, 3)),
    ("llama", "dp=4", 4, {"tie_word_embeddings": True}, {"precision": "fp16"}, (0, 1, 2, 3)),
]
REPLICAS = 4
PER_PARAMETER = {
    ("bf16", 0): (2 + 2 + 12, 0),
    ("bf16", 1): (2 + 2, 12),
    ("bf16", 2): (2, 2 + 12),
    ("bf16", 3): (0, 2 + 12),
    ("fp16", 0): (2 + 4 + 12, 0),
    ("fp16", 1): (2 + 4, 12),
    ("fp16", 2): (2, 4 + 12),
    ("fp16", 3): (0, 4 + 12),
}
"""Bytes a parameter, by precision (fp16 with sums in FP32) and ZeRO stage: whole on every rank, and shared among the replicas
(arXiv 1910.02054, section 5). With ZeRO 3 the 16-bit values are made from the masters when they are gathered: two bytes less."""
WHAT = ("parameters", "gradients", "optimizer")


def measure(plans: list[tuple[str, int, int]]) -> list[tuple[dict[str, int], dict[str, int], int, int]]:
    """Peaks of two steps, what the plan says of this rank's stage, model states after the steps, and elements with padding."""
    found = []
    for plan, rows, seq in plans:
        engine = Engine(plan, OPTIMIZER)
        for batch in batches(rows, seq, 2):
            engine.train_step(batch)
        (stage,) = engine.plan.stages_of(engine.plan.mesh.coordinates(engine.rank)["pp"])
        memory, elements = engine.memory(), sum(bucket.size for bucket in engine._arrangement.own)
        states = sum(memory["now"][what] for what in WHAT)
        found.append((memory["peak"], engine.plan.stages[stage].memory.model_dump(), states, elements))
    return found


def test_predicted_and_measured_bytes_are_equal(tmp_path: Path) -> None:
    plans, promised = [], []
    for case, (name, mesh, rows, changes, options, zeros) in enumerate(CASES):
        tiny = build(name, layers=2, **changes)
        for zero in zeros:
            directory = tmp_path / f"{case}-{zero}"
            compile(tiny.directory, mesh=mesh, seq=tiny.seq, global_batch=rows, zero=zero, **options).save(directory)
            plans.append((str(directory), rows, tiny.seq))
            promised.append(PER_PARAMETER[options["precision"], zero] if "precision" in options else None)
    for rank, found in enumerate(run_ranks(4, measure, plans, timeout=300)):
        for (plan, *_), (measured, told, states, elements), promise in zip(plans, found, promised, strict=True):
            assert {w: measured[w] for w in WHAT} == {w: told[w] for w in WHAT}, (rank, plan)
            if promise is not None:
                assert states == elements * promise[0] + elements * promise[1] // REPLICAS, (rank, plan)
