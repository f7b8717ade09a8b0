"""Predicted against measured: profile this machine, run ten plans, compare step times and memory.

    python -m meshwright.benchmarks.predict [--steps N] [--out FILE]

Plans differ in model, mesh, micro-batches, schedule, recomputation and ZeRO stage; meshes have 2 and 4 ranks, and each number of ranks
has its own profile. Every plan runs under torchrun with `bench`; its measured step is the median. A machine that does other work is
slower than it was profiled: the load average is printed beside every row, and a run counts as quiet where its own ranks account for it.
CPU is that of a step on all ranks together, which other work lengthens less.

    error      predicted / measured - 1, of step times; the median of absolute values is the figure to judge
    ranking    of pairs of plans of one model whose measured steps differ by CLEAR or more, the share that is predicted in the same order
    memory     predicted bytes of the fullest rank over measured ones: parameters, gradients and optimizer state; and activations
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from meshwright.plan import compile
from meshwright.plans.document import PlanDocument
from meshwright.profiling import profile

CLEAR = 0.2
TIMEOUT_S = 900
VOCABULARY = 4096


@dataclass(frozen=True)
class Case:
    """A plan to run: a model by name and options of compile."""

    model: str
    options: Mapping[str, object]

    @property
    def ranks(self) -> int:
        sizes = dict(part.split("=") for part in str(self.options["mesh"]).split(","))
        found = 1
        for axis, size in sizes.items():
            found *= int(size) if axis != "ep" else 1
        return found


@dataclass(frozen=True)
class Row:
    """What a plan was predicted to do and did. Bytes are of the fullest rank; `load` is the load average after the run."""

    model: str
    mesh: str
    options: str
    ranks: int
    predicted_s: float
    measured_s: float
    fastest_s: float
    cpu_s: float
    load: float
    predicted_states: int
    measured_states: int
    predicted_activations: int
    measured_activations: int

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


BATCH = {"seq": 128, "global_batch": 8}
CASES = (
    Case("llama", {**BATCH, "mesh": "dp=2", "micro_batch": 4}),
    Case("llama", {**BATCH, "mesh": "tp=2", "micro_batch": 8}),
    Case("llama", {**BATCH, "mesh": "tp=2", "micro_batch": 2, "sequence_parallel": "on"}),
    Case("llama", {**BATCH, "mesh": "pp=2", "micro_batch": 2}),
    Case("llama", {**BATCH, "mesh": "pp=2", "micro_batch": 2, "schedule": "gpipe", "recompute": "full"}),
    Case("gpt2", {**BATCH, "mesh": "tp=2", "micro_batch": 8}),
    Case("gpt2", {**BATCH, "mesh": "dp=2", "micro_batch": 2, "zero": 1}),
    Case("mixtral", {**BATCH, "mesh": "tp=2", "micro_batch": 4}),
    Case("llama", {**BATCH, "mesh": "pp=2,dp=2", "micro_batch": 2}),
    Case("llama", {**BATCH, "mesh": "dp=2,tp=2", "micro_batch": 4}),
)
"""Ten plans."""


def models() -> dict[str, PreTrainedModel]:
    """Random models of a few million parameters, seed 0."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "use_cache": False,
        "vocab_size": VOCABULARY,
    }
    llama = LlamaConfig(hidden_size=256, intermediate_size=704, **shape)
    mixtral = MixtralConfig(hidden_size=192, intermediate_size=256, num_local_experts=4, num_experts_per_tok=2, **shape)
    dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    gpt2 = GPT2Config(n_embd=384, n_layer=3, n_head=6, n_positions=128, vocab_size=VOCABULARY, use_cache=False, **dropout)
    return {"llama": LlamaForCausalLM(llama), "gpt2": GPT2LMHeadModel(gpt2), "mixtral": MixtralForCausalLM(mixtral)}


def run(case: Case, source: Path, hardware: Path, folder: Path, steps: int) -> Row:
    """Compiles and benches one plan."""
    plan = compile(source, None, **{**case.options, "hardware": str(hardware)})
    plan.save(folder)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    bench = ["-m", "meshwright.run", str(folder), "bench", "--steps", str(steps), "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *bench], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return compared(case, plan.document, found)


def compared(case: Case, document: PlanDocument, found: Mapping[str, object]) -> Row:
    """A row of the table."""
    memory = found["memory"]
    assert isinstance(memory, list)
    states = [int(m["parameters"]) + int(m["gradients"]) + int(m["optimizer"]) for m in memory]
    predicted = [s.memory for s in document.stages]
    given = {k: v for k, v in case.options.items() if k not in ("mesh", *BATCH)}
    return Row(
        case.model,
        str(document.mesh),
        " ".join(f"{k}={v}" for k, v in given.items()),
        case.ranks,
        document.predicted.step_s,
        float(str(found["step_s"])),
        float(str(found["fastest_s"])),
        float(str(found["cpu_s"])),
        os.getloadavg()[0],
        max(m.parameters + m.gradients + m.optimizer for m in predicted),
        max(states),
        max(m.activations for m in predicted),
        max(int(m["activations"]) for m in memory),
    )


def ranking(rows: list[Row]) -> tuple[int, int]:
    """(pairs in the right order, pairs that differ clearly), among plans of one model and number of ranks."""
    clear = right = 0
    for one, other in combinations(rows, 2):
        alike = (one.model, one.ranks) == (other.model, other.ranks)
        if alike and max(one.measured_s, other.measured_s) >= (1 + CLEAR) * min(one.measured_s, other.measured_s):
            clear += 1
            right += (one.measured_s < other.measured_s) == (one.predicted_s < other.predicted_s)
    return right, clear


def table(rows: list[Row]) -> str:
    """The rows and the figures to judge, as Markdown."""
    lines = [
        "| model | mesh | options | predicted | measured (fastest) | error | CPU | states | activations | load |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        activations = f"{r.predicted_activations / r.measured_activations:.2f}" if r.measured_activations else "-"
        lines.append(
            f"| {r.model} | {r.mesh} | {r.options} | {1e3 * r.predicted_s:.0f} ms | {1e3 * r.measured_s:.0f} ms ({1e3 * r.fastest_s:.0f}) "
            f"| {r.error:+.0%} | {1e3 * r.cpu_s:.0f} ms | {r.predicted_states / r.measured_states:.3f} | {activations} | {r.load:.1f} |"
        )
    right, clear = ranking(rows)
    quiet = sum(r.load < r.ranks + 1 for r in rows)
    lines += [
        "",
        f"Median absolute error of step times: {statistics.median(abs(r.error) for r in rows):.0%}. "
        f"Of {clear} pairs that differ by {CLEAR:.0%} or more, {right} are in the right order. {quiet} of {len(rows)} runs were quiet.",
    ]
    return "\n".join(lines)


def main(
    steps: Annotated[int, typer.Option(min=1, help="steps to measure of every plan")] = 10,
    out: Annotated[Path | None, typer.Option(help="rows as JSON")] = None,
) -> None:
    """Profiles, runs all plans and prints the table."""
    with tempfile.TemporaryDirectory(prefix="predict-") as name:
        folder = Path(name)
        for model, module in models().items():
            module.save_pretrained(folder / model)
        hardware = {ranks: folder / f"{ranks}.yaml" for ranks in sorted({case.ranks for case in CASES})}
        for ranks, path in hardware.items():
            profile(path, ranks, lambda text: None)
        rows = []
        for number, case in enumerate(CASES):
            rows.append(run(case, folder / case.model, hardware[case.ranks], folder / f"plan-{number}", steps))
            print(f"{rows[-1].model} {rows[-1].mesh}: {rows[-1].error:+.0%}", file=sys.stderr, flush=True)
        if out is not None:
            out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(table(rows))


if __name__ == "__main__":
    typer.run(main)
