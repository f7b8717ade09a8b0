"""Training in bf16 and fp16 beside fp32: a tiny Llama on text with a pattern, 200 steps of AdamW on two ranks.

    python -m meshwright.tests.precision_curves

prints, for each precision and mesh, the largest distance of its loss curve (means of WINDOW steps) from fp32's, beside the distance of fp32
curves that start from other weights: the noise of seeds.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from meshwright.plan import compile
from meshwright.runtime.engine import Engine
from meshwright.tests.parity import VOCABULARY, Tiny, build
from meshwright.tests.ranks import run_ranks

STEPS = 200
WINDOW = 20
ROWS, SEQ = 8, 32
OPTIMIZER = {"name": "adamw", "lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 1.0, "loss_scale": {"interval": 50}}


def patterned(steps: int) -> list[dict[str, torch.Tensor]]:
    """Global batches in which a token mostly says which comes next."""
    random = torch.Generator().manual_seed(5)
    follows = torch.randperm(VOCABULARY, generator=random)
    found = []
    for _ in range(steps):
        columns = [torch.randint(0, VOCABULARY, (ROWS,), generator=random)]
        for _ in range(SEQ - 1):
            noise = torch.randint(0, VOCABULARY, (ROWS,), generator=random)
            columns.append(torch.where(torch.rand(ROWS, generator=random) < 0.1, noise, follows[columns[-1]]))
        ids = torch.stack(columns, 1)
        found.append({"input_ids": ids, "labels": ids.clone()})
    return found


def losses(plan_dirs: list[str], steps: int) -> list[list[float]]:
    """One rank: the losses of every plan. A skipped step's loss counts, since only its gradients overflow."""
    data = patterned(steps)
    found = []
    for plan_dir in plan_dirs:
        engine = Engine(plan_dir, optimizer=OPTIMIZER)
        found.append([engine.train_step(batch).loss for batch in data])
    return found


def smooth(curve: list[float]) -> list[float]:
    """Means of WINDOW steps."""
    places = range(0, len(curve) + 1, WINDOW)
    return [sum(curve[start:stop]) / WINDOW for start, stop in pairwise(places)]


def apart(one: list[float], other: list[float]) -> float:
    """The largest distance of two smoothed curves."""
    return max(abs(a - b) for a, b in zip(smooth(one), smooth(other), strict=True))


def seeded(seed: int) -> Tiny:
    """A tiny Llama whose weights start from a seed."""
    tiny = build("llama", layers=2)
    config = tiny.load().config
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(tiny.directory)
    return tiny


def run(cases: dict[str, tuple[Tiny, dict[str, object]]], steps: int = STEPS) -> dict[str, list[float]]:
    """Loss curves on two ranks, by the name of the case: a model and options of compile."""
    with tempfile.TemporaryDirectory(prefix="curves-") as folder:
        places = {name: str(Path(folder) / str(i)) for i, name in enumerate(cases)}
        for name, (tiny, options) in cases.items():
            compile(tiny.directory, seq=SEQ, global_batch=ROWS, micro_batch=4, **options).save(places[name])
        found = run_ranks(2, losses, list(places.values()), steps, timeout=1200)
    return dict(zip(cases, found[0], strict=True))


def main() -> None:
    """Prints the table."""
    first, *others = (seeded(seed) for seed in range(4))
    cases: dict[str, tuple[Tiny, dict[str, object]]] = {"fp32": (first, {"mesh": "dp=2"})}
    cases |= {f"fp32, seed {i + 1}": (tiny, {"mesh": "dp=2"}) for i, tiny in enumerate(others)}
    for precision in ("bf16", "fp16"):
        cases[f"{precision}, dp=2, zero 2"] = (first, {"mesh": "dp=2", "zero": 2, "precision": precision})
        cases[f"{precision}, tp=2"] = (first, {"mesh": "tp=2", "precision": precision})
        cases[f"{precision}, pp=2, zb-h1"] = (first, {"mesh": "pp=2", "schedule": "zb-h1", "precision": precision})
    cases["bf16, dp=2, sums in bf16"] = (first, {"mesh": "dp=2", "precision": "bf16", "reduce_dtype": "bf16"})
    found = run(cases)
    print(f"{'':28}{'apart from fp32':>16}{'first':>9}{'last':>9}")
    for name, curve in found.items():
        ends = smooth(curve)
        print(f"{name:28}{apart(found['fp32'], curve):16.4f}{ends[0]:9.4f}{ends[-1]:9.4f}")


if __name__ == "__main__":
    main()
