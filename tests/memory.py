"""Predicted against measured memory, and recomputation against none, on real ranks: run by hand, its results are in docs/memory.md.

    python -m meshwright.tests.memory [RANKS ...]      cases of 1, 2 and 4 ranks, or of those that are named, as a table

A case compiles a model once per way to recompute, runs a step of each with dropout on, and gives for every rank what was predicted and
measured, and whether loss and gradients are bitwise those without recomputation. A row of the table has, for each way, what is saved (of
each rank where ranks differ) and whether it is as predicted to the byte, the peak predicted over measured that is farthest from 1, of
activations and transient and of all that a rank has, and whether loss and gradients are the same to the bit.

    python -m meshwright.tests.memory published        bytes of one GPT layer in bf16 beside those of Korthikanti et al. (arXiv 2205.05198)
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch

from meshwright.plan import compile
from meshwright.plans.units import format_bytes
from meshwright.runtime.engine import Engine
from meshwright.tests.parity import Tiny, batches, build
from meshwright.tests.ranks import run_ranks

DROPOUT = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "t5": {"dropout_rate": 0.1},
    "llama": {"attention_dropout": 0.1},
    "mixtral": {"attention_dropout": 0.1},
}
WAYS = ("none", "selective", "full")
Ran = tuple[dict[str, int], dict[str, int], float, dict[str, torch.Tensor]]
"""Bytes predicted and measured, loss and gradients."""


@dataclass(frozen=True)
class Case:
    """A model on a mesh; `options` of compile, `changes` of its configuration."""

    model: str
    mesh: str
    options: Mapping[str, object] = field(default_factory=dict)
    layers: int = 2
    changes: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        layers = {} if self.layers == 2 else {"layers": self.layers}
        told = {name: value for name, value in {**self.options, **layers}.items() if isinstance(value, str | int)}
        return f"{self.model} {self.mesh} {' '.join(f'{k}={v}' for k, v in told.items())}".strip()


REPEATS = 3
"""Steps of which the least peak counts: gloo's thread may keep what was sent a moment longer than the program does."""


@dataclass(frozen=True)
class Measured:
    """Of one rank and way: bytes predicted of its stages and measured, and whether loss and gradients are those of the first way."""

    way: str
    rank: int
    predicted: Mapping[str, int]
    peak: Mapping[str, int]
    same: bool

    @property
    def exact(self) -> bool:
        return self.predicted["activations"] == self.peak["activations"]

    @property
    def peak_ratio(self) -> float:
        """Predicted activations and moment's need by the measured ones."""
        return self._ratio("activations", "transient")

    @property
    def total_ratio(self) -> float:
        """Of all that a rank has without an optimizer. What a sum over dp needs counts in the measured transient."""
        return self._ratio("parameters", "gradients", "activations", "buffers", "transient", "communication")

    def _ratio(self, *parts: str) -> float:
        found, told = (sum(m.get(part, 0) for part in parts) for m in (self.peak, self.predicted))
        return told / found


def compile_ways(case: Case, folder: Path, ways: Sequence[str] = WAYS) -> list[tuple[str, str]]:
    """(way, plan directory) of a case."""
    tiny: Tiny = build(case.model, layers=case.layers, **{**DROPOUT[case.model], **case.changes})
    found = []
    for way in ways:
        path = folder / f"{case}-{way}".replace(" ", "_")
        options = {"micro_batch": 2, "hardware": "h100", "seq": tiny.seq, **case.options, "recompute": way}
        compile(tiny.directory, mesh=case.mesh, **options).save(path)
        found.append((way, str(path)))
    return found


def run_plans(cases: Sequence[Sequence[tuple[str, str]]]) -> list[list[Ran]]:
    """On one rank, of each case and way: predicted and measured bytes, loss and gradients."""
    results = []
    for ways in cases:
        found = []
        for _, plan in ways:
            peaks = []
            for _ in range(REPEATS):
                engine = Engine(plan)
                document = engine.plan
                metrics = engine.forward_backward(batches(document.global_batch, document.seq, 1)[0])
                peaks.append(engine.memory()["peak"])
            told: Counter[str] = Counter()
            for stage in document.stages_of(document.mesh.coordinates(engine.rank)["pp"]):
                told.update(document.stages[stage].memory.model_dump())
            peak = min(peaks, key=lambda each: each["activations"] + each["transient"])
            found.append((dict(told), peak, metrics.loss, engine.gradients()))
        results.append(found)
    return results


def measure(cases: Sequence[Case], ranks: int, ways: Sequence[str] = WAYS) -> list[list[Measured]]:
    """All cases, which have `ranks` ranks, in one process group."""
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        plans = [compile_ways(case, Path(folder), ways) for case in cases]
        by_rank = run_ranks(ranks, run_plans, plans, timeout=1800)
    return [
        [
            Measured(way, rank, *by_rank[rank][c][w][:2], equal(by_rank[rank][c][0], by_rank[rank][c][w]))
            for w, way in enumerate(ways)
            for rank in range(ranks)
        ]
        for c in range(len(cases))
    ]


def equal(first: Ran, other: Ran) -> bool:
    """Bitwise the same loss and gradients."""
    return first[2] == other[2] and all(torch.equal(g, other[3][name]) for name, g in first[3].items())


def grid() -> dict[int, list[Case]]:
    """By ranks."""
    models = ("llama", "gpt2", "mixtral", "t5")
    eager = {"attention": "eager"}
    sequence = [{"sequence_parallel": "off"}, {"sequence_parallel": "on"}]
    late = [{"schedule": name} for name in ("interleaved", "zb-h1", "zb-h2", "zb-v", "synthesised")]
    return {
        1: [*(Case(m, "tp=1") for m in models), *(Case(m, "tp=1", {"precision": "bf16", **eager}) for m in ("llama", "gpt2"))],
        2: [
            *(Case(m, "tp=2", s) for m in models for s in sequence),
            *(Case(m, "tp=2", {"precision": "bf16", **sequence[1]}) for m in ("llama", "gpt2")),
            *(Case(m, "pp=2") for m in models),
            Case("llama", "pp=2", {"precision": "bf16"}),
            *(Case("llama", "pp=2", options, layers=4) for options in late),
            *(Case("gpt2", "pp=2", {"schedule": name, **eager}) for name in ("zb-h1", "zb-v")),
            Case("mixtral", "pp=2", {"schedule": "zb-h1"}),
            Case("t5", "pp=2", {"schedule": "zb-h1"}),
            Case("llama", "pp=2", {"schedule": "zb-h1", "precision": "bf16"}),
            *(Case("llama", "dp=2", {"zero": zero}) for zero in (0, 1, 2, 3)),
        ],
        4: [Case("llama", "pp=2,dp=2", {"zero": 3}), Case("mixtral", "dp=2,ep=2,tp=2"), Case("t5", "pp=2,tp=2")],
    }


def main(ranks: Sequence[int]) -> None:
    print(f"| case | {' | '.join(WAYS)} |\n|{' --- |' * (1 + len(WAYS))}")
    for count in ranks:
        for case in grid()[count]:
            found = measure([case], count)[0]
            cells = [cell([each for each in found if each.way == way]) for way in WAYS]
            print(f"| {case} | {' | '.join(cells)} |", flush=True)


def cell(found: Sequence[Measured]) -> str:
    """A way's results on all ranks in words."""
    saved = dict.fromkeys(format_bytes(each.peak["activations"]) for each in found)
    worst, total = (max(ratios, key=lambda r: abs(r - 1)) for ratios in zip(*((f.peak_ratio, f.total_ratio) for f in found), strict=True))
    exact = "exact" if all(each.exact for each in found) else "**differs**"
    same = "" if all(each.same for each in found) else ", **other bits**"
    return f"{', '.join(saved)} {exact}, {worst:.3f}, {total:.3f}{same}"


CORE = ["attn.matmul", "attn.mul", "attn.add", "attn.softmax", "attn.dropout", "attn.matmul.1"]


def published(seq: int = 256, hidden: int = 256, heads: int = 8) -> None:
    """One layer's bytes, which a second layer adds to what is measured, in s b h; the core is recomputed by a pin, since of so small a
    layer `selective` would not take all of it."""
    shape = {"n_embd": hidden, "n_head": heads, "n_positions": seq, "activation_function": "gelu", "vocab_size": 256}
    common = {"precision": "bf16", "attention": "eager", "micro_batch": 1, "seq": seq, "sequence_parallel": "off"}
    print("| t | way | measured | published |\n| --- | --- | --- | --- |")
    for tp, way in product((1, 2), ("none", "selective")):
        found = []
        for layers in (1, 2):
            names = [f"transformer.h.{i}" for i in range(layers)]
            core = {} if way == "none" else {"recomputed": [{"segments": names, "regions": [CORE]}]}
            found.append(measure([Case("gpt2", f"tp={tp}", {**common, **core}, layers, shape)], tp, (way,))[0][0].peak["activations"])
        theirs = 10 + 24 / tp + (5 * heads * seq / hidden / tp if way == "none" else 0)
        print(f"| {tp} | {way} | {(found[1] - found[0]) / (seq * hidden):.4f} | {theirs:.4f} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1:] == ["published"]:
        published()
        sys.exit()
    main([int(text) for text in sys.argv[1:]] or [1, 2, 4])
