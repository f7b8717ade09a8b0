"""16-bit plans over meshes, ZeRO stages, schedules and models, beside the model in fp32; run by hand.

    python -m meshwright.tests.precision_grid [TEXT ...]        cases that have one of the texts in their line

Each line has the largest distance of three losses from fp32's, the worst gradient (relative, in Frobenius norm), the gradient norm's error,
and predicted minus measured bytes of parameters, gradients and optimizer on every pipeline rank.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch

from meshwright.plan import compile
from meshwright.runtime.engine import Engine
from meshwright.tests.parity import OPTIMIZER, Tiny, Trace, batches, build, relative, single
from meshwright.tests.ranks import run_ranks

ROWS, STEPS, LAYERS = 8, 3, 4
LEAST = 1e-3
"""Share of the largest gradient below which one is rounding."""
CASES: tuple[tuple[str, str, str, dict[str, object]], ...] = (
    *(("llama", "bf16", "dp=2", {"micro_batch": 2, "zero": zero}) for zero in (0, 1, 2, 3)),
    ("llama", "bf16", "dp=2", {"zero": 1, "reduce_dtype": "bf16"}),
    ("llama", "fp16", "tp=2", {"sequence_parallel": "on"}),
    ("llama", "bf16", "tp=4", {}),
    ("llama", "bf16", "pp=2", {"schedule": "zb-h1"}),
    ("llama", "bf16", "pp=2", {"schedule": "interleaved", "recompute": "full"}),
    ("llama", "bf16", "dp=2,tp=2", {"zero": 3, "sequence_parallel": "on", "recompute": "full"}),
    ("llama", "fp16", "pp=2,dp=2", {"zero": 2, "schedule": "zb-h1"}),
    ("gpt2", "bf16", "pp=2", {"micro_batch": 2, "schedule": "zb-v"}),
    ("gpt2", "fp16", "tp=2", {"micro_batch": 2, "attention": "eager"}),
    ("bert", "bf16", "tp=2", {"micro_batch": 2}),
    ("t5", "fp16", "tp=2", {"micro_batch": 2}),
    ("t5", "bf16", "pp=2", {"micro_batch": 2}),
    ("mixtral", "bf16", "tp=2", {"micro_batch": 2}),
    ("mixtral", "bf16", "dp=2,ep=2", {"micro_batch": 2, "zero": 1}),
)


def steps(plan_dir: str, data: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """One rank: losses, the first gradients and norm, and bytes at their peak."""
    engine = Engine(plan_dir, optimizer=OPTIMIZER)
    norm, gradients = engine.forward_backward(data[0]).grad_norm, engine.gradients()
    losses = [engine.train_step(batch).loss for batch in data]
    return {"losses": losses, "norm": norm, "gradients": gradients, "memory": engine.memory()["peak"]}


def line(tiny: Tiny, truth: Trace, data: list[dict[str, torch.Tensor]], precision: str, mesh: str, options: dict[str, object]) -> str:
    """A case's numbers."""
    plan = compile(tiny.directory, seq=tiny.seq, global_batch=ROWS, precision=precision, mesh=mesh, **options)
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        plan.save(f"{folder}/plan")
        found = run_ranks(plan.document.mesh.world_size, steps, f"{folder}/plan", data, timeout=900)
    first = found[0]
    assert all(other["losses"] == first["losses"] for other in found), "ranks report different losses"
    least = LEAST * max(float(g.norm()) for g in truth.gradients.values())
    errors = {n: relative(first["gradients"][n], g, least) for n, g in truth.gradients.items()}
    worst = max(errors, key=lambda n: errors[n])
    loss = max(abs(a - b) for a, b in zip(first["losses"], truth.losses, strict=True))
    off = []
    for coordinate in range(plan.document.mesh.pp if plan.document.chunks == 1 else 0):
        memory, measured = plan.document.stages[coordinate].memory, found[plan.document.mesh.rank(pp=coordinate)]["memory"]
        off.append([getattr(memory, key) - measured[key] for key in ("parameters", "gradients", "optimizer")])
    norm = abs(first["norm"] / truth.norms[0] - 1)
    return f"loss {loss:.1e}  gradient {errors[worst]:.1e} ({worst})  norm {norm:.1e}  bytes {off or '-'}"


def main() -> None:
    """Prints a line for every case asked for."""
    models: dict[str, tuple[Tiny, list[dict[str, torch.Tensor]], Trace]] = {}
    for name, precision, mesh, options in CASES:
        title = " ".join([name, precision, mesh, *(f"{key}={value}" for key, value in options.items())])
        if sys.argv[1:] and not any(text in title for text in sys.argv[1:]):
            continue
        if name not in models:
            tiny = build(name, layers=LAYERS)
            data = batches(ROWS, tiny.seq, STEPS)
            models[name] = tiny, data, single(tiny, data)
        tiny, data, truth = models[name]
        print(f"{title:62}{line(tiny, truth, data, precision, mesh, options)}", flush=True)


if __name__ == "__main__":
    main()
