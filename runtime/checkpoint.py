"""Checkpoints that any plan of the same model can read.

    DIR/checkpoint.json        step, optimizer, and of every tensor shape and pieces: file and ranges of global indices
    DIR/rank_R.safetensors     what rank R owns: "parameters/NAME", "exp_avg/NAME", ...

The directory appears whole or not at all: ranks write into a sibling directory (which they must all see), which takes
its name last. A rank of another mesh reads the runs of every piece that it holds (runtime.weights).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.runtime.agreement import together
from meshwright.runtime.buckets import Arrangement
from meshwright.runtime.placement import Placement
from meshwright.runtime.weights import Piece, Ranges, Reader

INDEX = "checkpoint.json"
SCHEMA = 1
PARAMETERS = "parameters"

State = Mapping[str, Mapping[str, Tensor]]
"""This rank's parts by kind ("parameters", "exp_avg") and parameter."""


@dataclass(frozen=True)
class Progress:
    """What a checkpoint knows beside tensors."""

    step: int
    optimizer: str | None


def save_checkpoint(directory: Path, arrangement: Arrangement, state: State, progress: Progress) -> None:
    """Writes a checkpoint, in place of an older one. Every rank calls it."""
    placement = arrangement.placement
    target = directory.absolute()
    work = target.parent / f".{target.name}.saving"
    together(lambda: _prepare(target, work) if placement.rank == 0 else None)
    owned = {
        f"{kind}/{name}": part.detach().contiguous()
        for kind, parts in state.items()
        for name, part in parts.items()
        if part.numel() and arrangement.counts(placement.parameters[name], placement.rank)
    }
    file = f"rank_{placement.rank}.safetensors"
    together(lambda: save_file(owned, work / file) if owned else None)
    owners = {key: placement.parameters[key.partition("/")[2]] for key in owned}
    ranges = {key: (placement.ranges(p), arrangement.portion(p, placement.rank)) for key, p in owners.items()}
    everyone: list[Mapping[str, tuple[Ranges, tuple[int, int]]]] = [{}] * placement.mesh.world_size
    dist.all_gather_object(everyone, ranges)
    together(lambda: _finish(target, work, placement, progress, everyone) if placement.rank == 0 else None)


def _prepare(target: Path, work: Path) -> None:
    if target.exists() and not (target / INDEX).is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise InputError(f"{target}: found something else, expected a new path or an older checkpoint")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)


def _finish(
    target: Path, work: Path, placement: Placement, progress: Progress, everyone: list[Mapping[str, tuple[Ranges, tuple[int, int]]]]
) -> None:
    tensors: dict[str, dict[str, object]] = {}
    for rank, ranges in enumerate(everyone):
        for key, (part, portion) in ranges.items():
            shape = placement.parameters[key.partition("/")[2]].shape
            entry = tensors.setdefault(key, {"shape": shape, "pieces": []})
            pieces = entry["pieces"]
            assert isinstance(pieces, list)
            pieces.append({"file": f"rank_{rank}.safetensors", "ranges": part, "portion": portion})
    index = {"schema": SCHEMA, "step": progress.step, "optimizer": progress.optimizer, "tensors": tensors}
    (work / INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")
    if target.exists():
        old = target.parent / f".{target.name}.replaced"
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        work.rename(target)
        shutil.rmtree(old)
    else:
        work.rename(target)


def load_checkpoint(directory: Path, arrangement: Arrangement, state: State, optimizer: str | None) -> Progress:
    """Fills this rank's parts from a checkpoint. Every rank calls it; nothing is changed when it does not fit."""
    progress, pieces = together(lambda: _read_index(directory, arrangement.placement, state, optimizer))
    together(lambda: _read_tensors(arrangement, state, pieces))
    return progress


def _read_index(
    directory: Path, placement: Placement, state: State, optimizer: str | None
) -> tuple[Progress, Mapping[str, list[Piece]]]:
    path = directory / INDEX
    if not path.is_file():
        raise InputError(f"{directory}: is no checkpoint; it has no {INDEX}")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        progress = Progress(int(index["step"]), index["optimizer"])
        shapes = {str(key): tuple(entry["shape"]) for key, entry in index["tensors"].items()}
        pieces = {str(key): [_piece(directory, key, p) for p in e["pieces"]] for key, e in index["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is no index of a checkpoint: {error!r}") from None
    if len(state) > 1 and progress.optimizer != optimizer:
        raise InputError(f"{path}: has the state of optimizer {progress.optimizer}, the engine runs {optimizer}")
    for key in (f"{kind}/{name}" for kind, parts in state.items() for name in parts):
        kind, _, name = key.partition("/")
        if key not in pieces:
            raise InputError(f"{path}: has no {kind} of {name}, so it is of another model")
        if shapes[key] != placement.parameters[name].shape:
            expected = list(placement.parameters[name].shape)
            raise InputError(f"{path}: {name} has shape {list(shapes[key])}, the model has {expected}")
    return progress, pieces


def _piece(directory: Path, key: str, entry: Mapping[str, object]) -> Piece:
    ranges = entry["ranges"]
    assert isinstance(ranges, list)
    runs = tuple(tuple((int(start), int(stop)) for start, stop in dim) for dim in ranges)
    portion = entry["portion"]
    assert isinstance(portion, list)
    return Piece(directory / str(entry["file"]), key, runs, (int(portion[0]), int(portion[1])))


def _read_tensors(arrangement: Arrangement, state: State, pieces: Mapping[str, list[Piece]]) -> None:
    placement = arrangement.placement
    with Reader() as reader:
        for kind, parts in state.items():
            for name, part in parts.items():
                parameter = placement.parameters[name]
                start, _ = arrangement.portion(parameter, placement.rank) if parameter.trainable else (0, 0)
                reader.read_portion(part, name, pieces[f"{kind}/{name}"], placement.ranges(parameter), start)
