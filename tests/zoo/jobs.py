"""Architectures one after another, or several at a time in a process each, with a time limit.

A worker process takes one architecture after another; one that is late or dies is replaced. Results lie in a folder, a JSON file per
architecture, as soon as there are any: a sweep that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from meshwright.tests.zoo.sweep import FAILS, GOOD, Outcome, Report, save_report, sweep_arch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["meshwright.tests.zoo.sweep", "meshwright.tests.ranks", "meshwright.run", "transformers"])


@dataclass(frozen=True)
class Job:
    """One architecture to do: the meshes that are left, and where its results go."""

    arch: str
    meshes: tuple[str, ...]
    steps: int
    path: Path


@dataclass
class Worker:
    """A process, the end of its pipe, and what it does since when."""

    process: ForkServerProcess
    pipe: Connection
    job: Job | None = None
    start: float = 0.0

    @classmethod
    def launch(cls) -> Worker:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=work, args=(theirs,))
        process.start()
        theirs.close()
        return cls(process, ours)

    def give(self, job: Job) -> None:
        self.job, self.start = job, time.monotonic()
        self.pipe.send(job)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def work(pipe: Connection) -> None:
    """A worker's process: jobs until None comes."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    while (job := pipe.recv()) is not None:
        sweep_arch(job.arch, list(job.meshes), job.steps, lambda report, job=job: merge(report, job.path))  # type: ignore[misc]
        pipe.send(job.arch)
    os._exit(0)


def merge(report: Report, path: Path) -> None:
    """Saves a report over what is known of other meshes."""
    before = load(path.parent, report.arch)
    merged = Report.from_json(report.to_json())
    merged.outcomes = {**before.outcomes, **report.outcomes}
    if "tp=2" not in report.outcomes:
        merged.notes, merged.whole = before.notes, before.whole
    save_report(merged, path)


def load(folder: Path, arch: str) -> Report:
    """What is known of an architecture."""
    path = folder / file_name(arch)
    return Report.from_json(json.loads(path.read_text())) if path.is_file() else Report(arch)


def file_name(arch: str) -> str:
    return arch.replace(":", "--") + ".json"


def pending_jobs(asked: Mapping[str, list[str]], folder: Path, steps: int, again: str) -> list[Job]:
    """What has no result yet; `again`: what to do that has one (none, failed, all). What will be done again is forgotten."""
    jobs = []
    for arch, meshes in asked.items():
        report = load(folder, arch)
        known = report.outcomes
        left = [m for m in meshes if m not in known or again == "all" or (again == "failed" and known[m].verdict not in GOOD)]
        if left:
            report.outcomes = {mesh: outcome for mesh, outcome in known.items() if mesh not in left}
            save_report(report, folder / file_name(arch))
            jobs.append(Job(arch, tuple(left), steps, folder / file_name(arch)))
    return jobs


def run_all(jobs: list[Job], num_workers: int, timeout: float) -> None:
    """Does all jobs, `num_workers` at a time."""
    pending = list(jobs)
    workers: list[Worker] = []
    while pending or any(worker.job for worker in workers):
        while pending and len(workers) < num_workers:
            workers.append(Worker.launch())
        for worker in workers:
            if worker.job is None and pending:
                worker.give(pending.pop(0))
        wait([worker.pipe for worker in workers], timeout=1.0)
        workers = [worker for worker in workers if attend(worker, timeout)]
    for worker in workers:
        worker.end()


def attend(worker: Worker, timeout: float) -> bool:
    """Takes a worker's result if it has one; ends a worker that is late or dead, and then gives False."""
    job = worker.job
    if job is None:
        return True
    if worker.pipe.poll() and worker.process.exitcode is None:
        worker.pipe.recv()
        worker.job = None
        finish(job, "left out", time.monotonic() - worker.start)
        return True
    if worker.process.exitcode is None and time.monotonic() - worker.start < timeout:
        return True
    status = worker.process.exitcode
    worker.end()
    finish(job, f"took more than {timeout:g} s" if status is None else f"ended with exit status {status}", time.monotonic() - worker.start)
    return False


def finish(job: Job, how: str, seconds: float) -> None:
    """Marks what was left undone, prints the results."""
    report = load(job.path.parent, job.arch)
    for mesh in job.meshes:
        report.outcomes.setdefault(mesh, Outcome(FAILS, how))
    save_report(report, job.path)
    for mesh in job.meshes:
        outcome = report.outcomes[mesh]
        times = f"plan {outcome.plan_s:.1f} s, run {outcome.run_s:.1f} s"
        print(f"{report.arch:32} {mesh:10} {outcome.verdict}{' ~' if outcome.rounding else ''}  {outcome.reason}  [{times}]")
    print(f"{report.arch:32} capture {report.capture_s:.1f} s, {report.num_ops} ops, {seconds:.0f} s in all", flush=True)
