"""What a rank sets up before it runs: device, process groups, and where parameters lie."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.plans.programs import program_name, stage_parameters
from meshwright.plans.signature import Signature
from meshwright.runtime.actions import Kind, StageRanks
from meshwright.runtime.axes import Axis, ProcessAxis, build_axes
from meshwright.runtime.placement import Parameter, Placement
from meshwright.runtime.rendezvous import session_store

MALLOPT = {-1: 2**31 - 1, -2: 64 * 2**20, -3: 2**30}
"""glibc's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD (malloc.h), in bytes."""


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device asked for; else this rank's GPU if every rank of the machine has one, else the CPU."""
    if device is not None:
        chosen = torch.device(device)
    elif torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    else:
        chosen = torch.device("cpu")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    else:
        keep_freed_memory()
    return chosen


def keep_freed_memory() -> None:
    """Tells glibc to keep the memory of freed tensors for the next ones.

    By default it gives memory of this size back, and each step pays for the same pages again: 5 to 10% of CPU time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in MALLOPT.items():
            mallopt(option, value)


def join_processes(mesh: Mesh, device: torch.device, timeout_s: float) -> dict[str, Axis]:
    """This rank's axes, in the process group that torchrun's variables describe, or the one that exists.

    InputError on every rank, before any communication, when their number is not the mesh's.
    """
    started = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if started != mesh.world_size:
        raise InputError(f"mesh {mesh} needs {mesh.world_size} processes, torchrun started {started}")
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if started > 1:
            store, rank, size = session_store(timeout)
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
        else:
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, timeout=timeout, store=alone, rank=0, world_size=1)
    return build_axes(mesh, dist.get_rank(), timeout)


def place(
    directory: Path, texts: Mapping[str, str], plan: PlanDocument, signature: Signature, rank: int
) -> Placement:
    """Placement of all parameters from the plan and the programs' PARAMETERS."""
    stages: dict[str, list[int]] = {name: [] for name in signature.parameters}
    for stage, coordinate in enumerate(plan.ranks_of_stages):
        file = program_name(stage)
        if file not in texts:
            raise InputError(f"{directory}: plan.yaml: programs: {file} is missing; compile again with --from")
        for name in stage_parameters(texts[file], directory / "programs" / file):
            if name not in stages:
                raise InputError(f"{directory}/programs/{file}: {name} is not in model/signature.json; compile again")
            if coordinate not in stages[name]:
                stages[name].append(coordinate)
    if orphan := next((name for name, held in stages.items() if not held), None):
        raise InputError(f"{directory}/programs: no stage holds parameter {orphan}; compile again with --from")
    parameters = {
        name: Parameter(name, spec.shape, plan.parameter_layouts[name], tuple(sorted(stages[name])), spec.trainable)
        for name, spec in signature.parameters.items()
    }
    return Placement(plan.mesh, rank, parameters)


def tied_groups(
    placement: Placement, axes: Mapping[str, Axis], timeout_s: float, own: bool = False
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """For each set of stages that share a parameter and has this rank's: the group that sums its gradient. `own`: a group for nothing
    else, since a sum may be under way while ranks come to other collectives."""
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    pipeline = axes["pp"]
    for stages in placement.tied_stages:
        if isinstance(pipeline, ProcessAxis) and len(stages) == len(pipeline.ranks) and not own:
            found[stages] = pipeline.group
            continue
        for along in placement.mesh.groups("pp"):
            ranks = [along[stage] for stage in stages]
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
            if dist.get_rank() in ranks:
                found[stages] = group
    return found


def boundary_groups(
    mesh: Mesh, stage_ranks: StageRanks, axis: Axis, device: torch.device, timeout_s: float, apart: bool = False
) -> dict[tuple[int, Kind], dist.ProcessGroup]:
    """Group for the messages of every boundary between stages on two ranks, forward (F) and backward (B).

    On NCCL each has a group of its own, since messages of a group block each other; elsewhere tags tell them apart, in a new group if
    `apart`: messages that an engine leaves under way are then not taken for those of the next one.
    """
    if not isinstance(axis, ProcessAxis):
        return {}
    boundaries = [b for b, (here, there) in enumerate(pairwise(stage_ranks)) if here != there]
    keys = [(boundary, kind) for boundary in boundaries for kind in (Kind.F, Kind.B)]
    if device.type != "cuda":
        made = [(ranks, dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))) for ranks in mesh.groups("pp")] if apart else []
        return dict.fromkeys(keys, next((group for ranks, group in made if ranks == axis.ranks), axis.group))
    found: dict[tuple[int, Kind], dist.ProcessGroup] = {}
    for ranks in mesh.groups("pp"):
        for boundary, kind in keys:
            pair = sorted(ranks[stage_ranks[stage]] for stage in (boundary, boundary + 1))
            group = dist.new_group(pair, timeout=timedelta(seconds=timeout_s))
            if ranks == axis.ranks and dist.get_rank() in pair:
                found[boundary, kind] = group
    return found
