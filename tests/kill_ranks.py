"""Kills random ranks of a training job with SIGKILL at random moments: `python -m meshwright.tests.kill_ranks FOLDER --kills 50`.

The job saves after every step, in the background with an odd --seed, so that many kills hit a save; those are counted. torchrun restarts
it, and it must go on by itself within LIMIT_S, every time; at the end the weights and the loss of every step must be those of a job that
was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from meshwright.plans.mesh import Mesh
from meshwright.runtime.checkpoint_files import complete, partial, read_index
from meshwright.runtime.dcp import read_metadata, read_shards, shapes_of
from meshwright.runtime.shards import Shards
from meshwright.tests import toy

LIMIT_S = 60.0
STEPS_PER_KILL = 20


def command(folder: Path, name: str, plan: Path, ranks: int, steps: int, restarts: int, *more: str) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launch += [f"--max-restarts={restarts}", "--monitor-interval=0.1", "-m", "meshwright.run", str(plan), "train"]
    launch += ["--data", str(folder / "ids.npy"), "--steps", str(steps), "--log-every", "100000", "--schedule", "constant"]
    return [*launch, "--save", str(folder / name), "--metrics", str(folder / f"{name}.jsonl"), *more]


def ranks_of(job: int) -> list[int]:
    """Processes that torchrun started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
        except OSError:
            continue
        if fields and int(fields[1]) == job:
            found.append(int(entry.name))
    return found


def num_steps(metrics: Path) -> int:
    return metrics.read_text().count("\n") if metrics.exists() else 0


def await_true(holds: Callable[[], bool], job: subprocess.Popen[bytes], what: str) -> float:
    """Seconds until it holds; AssertionError when that takes too long, or the job has ended badly."""
    start = time.monotonic()
    while not holds():
        assert job.poll() in (None, 0), f"the job ended with {job.returncode} before {what}"
        assert time.monotonic() < start + LIMIT_S, f"{what} took more than {LIMIT_S:g} s"
        time.sleep(0.01)
    return time.monotonic() - start


def kill_and_compare(folder: Path, mesh: Mesh, zero: int, kills: int, seed: int) -> list[float]:
    """Seconds that each recovery took."""
    chance = random.Random(seed)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(0, toy.VOCABULARY, 6000).astype(np.int32))
    plan = toy.write_plan(folder / "plan", mesh, zero=zero)
    steps = STEPS_PER_KILL * (kills + 1)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command(folder, "left-alone", plan, mesh.world_size, steps, 0), check=True, **quiet)  # type: ignore[call-overload]
    every = ["--save-every", "1", "--async-save" if seed % 2 else "--sync-save"]
    words = command(folder, "killed", plan, mesh.world_size, steps, kills, *every)
    job = subprocess.Popen(words, **quiet)  # type: ignore[call-overload]
    metrics = folder / "killed.jsonl"
    recoveries, num_cut = [], 0
    try:
        for number in range(kills):
            await_true(lambda: bool(complete(folder / "killed")), job, "the first checkpoint")
            time.sleep(chance.uniform(0, 0.5))
            before = num_steps(metrics)
            if job.poll() is not None or not (victims := ranks_of(job.pid)):
                break
            os.kill(chance.choice(victims), signal.SIGKILL)
            num_cut += bool(partial(folder / "killed"))
            recoveries.append(await_true(lambda n=before: num_steps(metrics) > n + 1, job, f"recovery {number}"))  # type: ignore[misc]
            print(f"kill {number}: at {before} steps, going on after {recoveries[-1]:.1f} s", flush=True)
        assert job.wait(timeout=600) == 0
    finally:
        job.kill()
    check_same(folder)
    print(f"{num_cut} of {len(recoveries)} kills cut a save off", flush=True)
    return recoveries


def check_same(folder: Path) -> None:
    """Losses and weights of both jobs, bit by bit; nothing is left of saves that died."""
    alone, killed = (
        {r["step"]: (r["loss"], r["grad_norm"]) for r in map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())}
        for name in ("left-alone", "killed")
    )
    assert alone == killed
    (step, left), (other_step, right) = (read_all(folder / name) for name in ("left-alone", "killed"))
    assert step == other_step and left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)
    assert not partial(folder / "killed")


def read_all(directory: Path) -> tuple[int, dict[str, Tensor]]:
    """Steps done and every tensor of the newest checkpoint, which must be sound."""
    index = read_index(directory)
    index.check_files(index.files)
    metadata = read_metadata(index)
    found = {name: torch.full(shape, torch.nan) for name, shape in shapes_of(metadata).items()}
    read_shards(index, metadata, {name: Shards.whole(tensor) for name, tensor in found.items()})
    return index.facts.step, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    recoveries = kill_and_compare(given.folder, Mesh(dp=2), 3, given.kills, given.seed)
    print(f"{len(recoveries)} kills; recovery took {np.mean(recoveries):.1f} s on average, {max(recoveries):.1f} s at most")


if __name__ == "__main__":
    main()
