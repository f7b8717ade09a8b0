"""ZeRO 0 to 3 on five meshes, one and four micro-batches, with two parameter groups: `python -m meshwright.tests.zero_grid [--meshes ...]`.

Every case is three steps of AdamW with clipping against the single process: first loss, norm and gradients by the gates of
meshwright.tests.parity, losses of all steps, and the weights after the last one. One launch per mesh runs all of its cases.
"""

from __future__ import annotations

import argparse
import fnmatch
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.plan import compile
from meshwright.runtime.engine import Engine
from meshwright.tests import parity
from meshwright.tests.ranks import run_ranks

MESHES = ("dp=2", "dp=4", "dp=2,tp=2", "pp=2,dp=2", "pp=2,dp=2,tp=2")
MICRO_BATCHES = (1, 4)
STEPS, ROWS_PER_RANK = 3, 4
BARE = ("*norm*",)
GROUPS = [{"match": list(BARE), "weight_decay": 0.0, "lr_scale": 0.5}]
WEIGHTS = 1e-5
"""Relative difference that is allowed of updated weights."""
NOISE = 1e-3
"""Share of a gradient's root mean square below which an element is rounding noise: AdamW's first step moves it by its sign alone."""

Found = dict[str, dict[str, object]]


def single(tiny: parity.Tiny, data: list[dict[str, torch.Tensor]]) -> tuple[parity.Trace, dict[str, torch.Tensor]]:
    """The model itself in one process, with the same groups; and its weights after the last step."""
    model = tiny.load()
    named = dict(model.named_parameters())
    bare = {n for n in named if any(fnmatch.fnmatchcase(n, pattern) for pattern in BARE)}
    groups = [
        {"params": [p for n, p in named.items() if n not in bare]},
        {"params": [p for n, p in named.items() if n in bare], "weight_decay": 0.0, "lr": 5e-4},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    trace = parity.Trace()
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        trace.gradients = trace.gradients or {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        trace.losses.append(float(loss.detach()))
        optimizer.step()
    return trace, {n: p.detach().clone() for n, p in named.items()}


def run_all(plans: list[str], data: list[dict[str, torch.Tensor]]) -> Found:
    """On every rank: what each plan computes."""
    found: Found = {}
    for plan in plans:
        engine = Engine(plan, optimizer={**parity.OPTIMIZER, "groups": GROUPS})
        engine.forward_backward(data[0])
        trace = parity.Trace(gradients=engine.gradients())
        for batch in data:
            metrics = engine.train_step(batch)
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
        found[plan] = {"trace": trace, "weights": engine.state_dict()}
    dist.barrier()
    return found


def check_mesh(tiny: parity.Tiny, mesh: str, folder: Path) -> int:
    """Cases of a mesh; AssertionError at the first that differs."""
    sizes = dict(part.split("=") for part in mesh.split(","))
    dp = int(sizes["dp"])
    data = parity.batches(ROWS_PER_RANK * dp, tiny.seq, STEPS)
    expected, weights = single(tiny, data)
    plans = []
    ranks = 1
    for zero in range(4):
        for count in MICRO_BATCHES:
            options = {"mesh": mesh, "seq": tiny.seq, "global_batch": ROWS_PER_RANK * dp, "micro_batch": ROWS_PER_RANK // count}
            plan = compile(tiny.directory, **options, zero=zero)
            plan.save(folder / f"{mesh}-{zero}-{count}")
            plans.append(str(folder / f"{mesh}-{zero}-{count}"))
            ranks = plan.document.mesh.world_size
    results = run_ranks(ranks, run_all, plans, data, timeout=600)
    for plan in plans:
        traces = [result[plan]["trace"] for result in results]
        parity.check(expected, traces)  # type: ignore[arg-type]
        updated = results[0][plan]["weights"]
        assert isinstance(updated, dict)
        clear = {n: g.abs() > NOISE * float(g.square().mean().sqrt()) for n, g in expected.gradients.items()}
        worst = max(parity.relative(updated[n][clear[n]], w[clear[n]], 1e-3) for n, w in weights.items())
        assert worst <= WEIGHTS, f"{plan}: weights are {worst:.1e} apart"
        print(f"{Path(plan).name}: match, weights {worst:.1e}", flush=True)
    return len(plans)


def main() -> None:
    """Runs the meshes that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="*", default=MESHES)
    parser.add_argument("--tied", action="store_true", help="tied embeddings")
    options = parser.parse_args()
    tiny = parity.build("llama", layers=4, tie_word_embeddings=options.tied)
    start, cases = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="zero-grid-") as folder:
        for mesh in options.meshes:
            cases += check_mesh(tiny, mesh, Path(folder))
    print(f"{cases} cases match, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
