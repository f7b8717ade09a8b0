"""Meshwright beside its peers, on two processes of this machine: `python -m meshwright.benchmarks.compare --rounds 3`.

Every round runs all jobs one after the other, so that what else the machine does meets them alike. A job's figure is the
CPU seconds of a step, summed over ranks, relative to the single process of the same round; the table has the median over
rounds, and the largest difference of a loss from the single process's. Two copies of the single process that run at once
show what sharing the machine alone costs. megatron-core and DeepSpeed take part where they can be imported (`pip install --no-deps
megatron-core einops`; DeepSpeed also wants py-cpuinfo hjson msgpack psutil ninja, DS_BUILD_OPS=0 and --no-build-isolation).
`--only tp=2` runs one group.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.benchmarks.common import ROWS, SEQ, Result, make_model
from meshwright.plan import compile

TIMEOUT_S = 300
PEERS = {
    "gpipe": ("GPipe",),
    "1f1b": ("1F1B",),
    "interleaved": ("Interleaved1F1B",),
    "zb-h1": (),
    "zb-v": ("ZBVZeroBubble", "DualPipeV"),
    "pipedream-2bw": (),
}
"""Schedules on pp=2, with those of torch.distributed.pipelining that do the same."""
PLANS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": "tp=2", "micro_batch": 8, "sequence_parallel": "off"},
    "tp-sequence": {"mesh": "tp=2", "micro_batch": 8, "sequence_parallel": "on"},
    "pp": {"mesh": "pp=2", "micro_batch": 2},
    **{f"pp-{name}": {"mesh": "pp=2", "micro_batch": 2, "schedule": name} for name in PEERS},
    "dp": {"mesh": "dp=2", "micro_batch": 4},
    **{f"zero-{stage}": {"mesh": "dp=2", "micro_batch": 4, "zero": stage} for stage in (1, 2, 3)},
}
"""Options of the plans: one micro-batch, or 4 for the pipeline."""


@dataclass(frozen=True)
class Job:
    """A row of the table. `goal`: the figure that Meshwright is to stay under."""

    group: str
    name: str
    module: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    goal: float | None = None


SINGLE = Job("single", "transformers, one process", "peers.single", ranks=1)
JOBS = (
    Job("none", "transformers, two copies at once (each)", "peers.single"),
    Job("tp=2", "Meshwright", "meshwright_run", ("tp",), goal=1.25),
    Job("tp=2", "Meshwright, sequence parallel", "meshwright_run", ("tp-sequence",)),
    Job("tp=2", "DTensor", "peers.dtensor_tp"),
    Job("tp=2", "megatron-core", "peers.megatron_core", ("tp",)),
    Job("pp=2", "Meshwright", "meshwright_run", ("pp",), goal=1.10),
    Job("pp=2", "torch 1F1B", "peers.pipeline", ("1F1B",)),
    Job("pp=2", "megatron-core 1F1B", "peers.megatron_core", ("pp",)),
    *(job for ours, theirs in PEERS.items() for job in (
        Job("schedules", f"Meshwright {ours}", "meshwright_run", (f"pp-{ours}",)),
        *(Job("schedules", f"torch {name}", "peers.pipeline", (name,)) for name in theirs),
    )),
    Job("dp=2", "Meshwright", "meshwright_run", ("dp",), goal=1.15),
    Job("dp=2", "torch DDP", "peers.ddp"),
    *(Job("zero", f"Meshwright, ZeRO {n}", "meshwright_run", (f"zero-{n}",), goal=1.15 if n < 3 else 1.30) for n in (1, 2, 3)),
    Job("zero", "FSDP2", "peers.fsdp2"),
    Job("zero", "FSDP2, kept gathered", "peers.fsdp2", ("keep",)),
    *(Job("zero", f"DeepSpeed, ZeRO {n}", "peers.deepspeed_zero", (f"{n}",)) for n in (1, 2, 3)),
)
OPTIONAL = {"peers.megatron_core": "megatron", "peers.deepspeed_zero": "deepspeed"}
"""Modules that runs need and that may be absent."""


def choose(only: str | None) -> list[Job]:
    """The jobs to run; says which are left out."""
    jobs = [job for job in JOBS if only in (None, job.group)]
    absent = {run for run, module in OPTIONAL.items() if find_spec(module) is None}
    for run in sorted(absent):
        print(f"{run} left out: the module {OPTIONAL[run]} is not installed", file=sys.stderr)
    return [job for job in jobs if job.module not in absent]


def prepare(folder: Path, jobs: list[Job]) -> None:
    """The model, and the plans that jobs name, in a folder."""
    make_model(folder / "model")
    named = {job.arguments[0] for job in jobs if job.module == "meshwright_run"}
    for name, choices in ((n, c) for n, c in PLANS.items() if n in named):
        compile(folder / "model", seq=SEQ, global_batch=ROWS, **choices).save(folder / name)


def run(job: Job, folder: Path) -> Result:
    """One run, by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.ranks)]
    command += ["-m", f"meshwright.benchmarks.{job.module}", "model", *job.arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"losses"')]
    if done.returncode or not lines:
        raise SystemExit(f"error: {job.name} ({job.group}) failed:\n{done.stderr[-3000:]}")
    return Result(**json.loads(lines[-1]))


def distance(result: Result, single: Result) -> float:
    """Largest difference of a step's loss."""
    return max(abs(a - b) for a, b in zip(result.losses, single.losses, strict=True))


def table(jobs: list[Job], rounds: list[dict[Job, Result]]) -> str:
    """Markdown."""
    lines = [
        "| mesh | run | CPU s of a step relative to single (lowest, highest) | goal | loss difference |",
        "| --- | --- | --- | --- | --- |",
    ]
    for job in jobs:
        factors = [results[job].cpu_s / results[SINGLE].cpu_s for results in rounds]
        apart = max(distance(results[job], results[SINGLE]) for results in rounds)
        spread = f"{statistics.median(factors):.2f} ({min(factors):.2f}, {max(factors):.2f})"
        goal = "" if job.goal is None else f"≤ {job.goal:.2f}"
        lines.append(f"| {job.group} | {job.name} | {spread} | {goal} | {apart:.0e} |")
    return "\n".join(lines)


def main() -> None:
    """Prepares, runs the rounds, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("none", "tp=2", "pp=2", "schedules", "dp=2", "zero"), help="one group of runs")
    options = parser.parse_args()
    jobs = choose(options.only)
    rounds: list[dict[Job, Result]] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        prepare(Path(folder), jobs)
        for number in range(options.rounds):
            results = {}
            for job in (SINGLE, *jobs):
                results[job] = run(job, Path(folder))
                print(f"round {number + 1}: {job.group} {job.name}: {results[job].cpu_s:.3f} CPU s", file=sys.stderr)
            rounds.append(results)
    print(f"single process: {statistics.median(r[SINGLE].cpu_s for r in rounds):.3f} CPU s per step\n")
    print(table(jobs, rounds))


if __name__ == "__main__":
    main()
