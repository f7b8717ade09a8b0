"""Weights that a rank cannot read as they are: a copy is made once per machine, by a process of its own.

Needed for GGUF files, factories, hub ids, models without weights (initialised from the plan's seed) and directories
whose tensors have other names than the model's parameters. `python -m meshwright.materialize PLAN_DIR OUT_DIR` writes
the copy. It is kept in $MESHWRIGHT_CACHE, else $XDG_CACHE_HOME/meshwright, else ~/.cache/meshwright, under a digest of
all that it depends on; a factory's code can depend on anything, so its copy lives as long as the job.

While the first local rank waits for that process, the others wait in short collectives: a failure reaches all ranks at
once, and a dead rank is noticed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch.distributed as dist

from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.signature import Signature
from meshwright.runtime.weights import Source, find_weights

BESIDE_PLAN = "weights.safetensors"
"""In PLAN_DIR/model, the weights of a model that was compiled as an object and has no other home."""
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
POLL_S = 5.0
"""How long one collective waits for the copy."""
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class WeightSource:
    """Where the weights are. `keep` holds a temporary directory alive."""

    places: Source
    keep: tempfile.TemporaryDirectory[str] | None = None


@dataclass(frozen=True)
class _Status:
    """What a rank tells the others: where its machine's copy will be, and what went wrong."""

    running: bool
    directory: Path | None = None
    problem: str | None = None


def locate_weights(plan_dir: Path, plan: PlanDocument, signature: Signature) -> WeightSource:
    """The model's weights, copied first where necessary. Every rank calls it; InputError is raised on all or none."""
    keep: tempfile.TemporaryDirectory[str] | None = None
    process: subprocess.Popen[str] | None = None
    places: Source | None = None
    status = _Status(running=False)
    try:
        places = _direct(plan_dir, plan, signature)
        if places is None and _local_rank() == 0:
            if plan.model.kind == "factory":
                keep = tempfile.TemporaryDirectory(prefix="weights-", dir=_cache())
            place = Path(keep.name) / "copy" if keep else _cache() / f"weights-{_digest(plan_dir, plan, signature)}"
            process = None if place.exists() else _start(plan_dir, place)
            status = _Status(process is not None, place)
    except InputError as error:
        status = _Status(running=False, problem=str(error))
    statuses = list(_until_done(status, process))
    if problem := next((s.problem for s in statuses if s.problem), None):
        raise InputError(problem)
    if places is None:
        leader = statuses[_rank() - _local_rank()].directory
        assert leader is not None
        places = _copied(leader, signature)
    return WeightSource(places, keep)


def _direct(plan_dir: Path, plan: PlanDocument, signature: Signature) -> Source | None:
    beside = plan_dir / "model" / BESIDE_PLAN
    if beside.is_file():
        return find_weights(beside, signature)
    if plan.model.kind not in ("directory", "config", "gguf"):
        return None
    source = Path(plan.model.source)
    if not source.exists():
        raise InputError(f"{source}: no such {plan.model.kind}, which model.source of the plan names")
    if plan.model.kind != "directory":
        return None
    if not any(found for pattern in WEIGHT_FILES for found in source.glob(pattern)):
        raise InputError(f"{source}: holds no weights, which it did when the plan was compiled; expected {' or '.join(WEIGHT_FILES)}")
    return find_weights(source, signature)


def _copied(directory: Path, signature: Signature) -> Source:
    places = find_weights(directory, signature)
    if places is None:
        raise InputError(f"{directory}: is no copy of the weights that model/signature.json names; delete it")
    return places


def _start(plan_dir: Path, target: Path) -> subprocess.Popen[str]:
    """Starts to write the copy, without this job's place in torchrun."""
    env = {k: v for k, v in os.environ.items() if k not in _LAUNCHER and not k.startswith("TORCHELASTIC")}
    command = [sys.executable, "-m", "meshwright.materialize", str(plan_dir), str(target)]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _until_done(status: _Status, process: subprocess.Popen[str] | None) -> Iterator[_Status]:
    """All ranks' statuses, when no rank's process runs any more."""
    while True:
        if process is not None and status.running:
            status = _poll(process, status)
        statuses: list[_Status] = [status] * dist.get_world_size()
        dist.all_gather_object(statuses, status)
        if not any(s.running for s in statuses):
            yield from statuses
            return


def _poll(process: subprocess.Popen[str], status: _Status) -> _Status:
    try:
        _, errors = process.communicate(timeout=POLL_S)
    except subprocess.TimeoutExpired:
        return status
    if process.returncode == 0:
        return _Status(False, status.directory)
    lines = [line for line in errors.splitlines() if line.strip()] or [f"ended with status {process.returncode}"]
    return _Status(False, problem=f"the model's weights cannot be made: {lines[-1].removeprefix('error: ')}")


def _cache() -> Path:
    xdg = os.environ.get("XDG_CACHE_HOME")
    default = Path(xdg) / "meshwright" if xdg else Path.home() / ".cache" / "meshwright"
    cache = Path(os.environ.get("MESHWRIGHT_CACHE") or default)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{cache}: cannot be made: {error.strerror}; set MESHWRIGHT_CACHE to a directory") from None
    return cache


def _digest(plan_dir: Path, plan: PlanDocument, signature: Signature) -> str:
    """Of everything that the copied weights depend on."""
    source = Path(plan.model.source)
    files = sorted(p for p in (source.iterdir() if source.is_dir() else [source]) if p.is_file())
    config = plan_dir / "model" / "config.json"
    parts = {
        "source": plan.model.source,
        "files": [(p.name, (stat := p.stat()).st_size, stat.st_mtime_ns) for p in files],
        "config": config.read_text(encoding="utf-8") if config.is_file() else "",
        "signature": signature.to_json(),
        "seed": plan.seed,
        "task": plan.task,
        "versions": [_version(name) for name in ("torch", "transformers")],
    }
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _rank() -> int:
    return dist.get_rank()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", _rank()))
