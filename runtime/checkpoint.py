"""Saving and loading: every rank writes and reads its own portions (runtime.checkpoint_files has the format).

A save in the background copies what the rank stands for, and a thread writes it while training goes on; ranks then meet in the
files alone: rank 0 writes the index when all parts are there. `wait` ends the last save, and raises on all ranks what went
wrong on one. A rank of another mesh, or of another ZeRO stage, reads the boxes of every piece that it keeps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.runtime.agreement import together
from meshwright.runtime.buckets import Arrangement
from meshwright.runtime.checkpoint_files import Facts, Index, keep_last, new_folder, read_index, write_index, write_part
from meshwright.runtime.placement import Placement
from meshwright.runtime.weights import Ranges, Reader, whole

PARAMETERS = "parameters"
POLL_S = 0.02
PATIENCE_S = 600.0
"""How long rank 0 waits for the parts of the others."""

State = Mapping[str, Mapping[str, Tensor]]
"""This rank's portions by kind ("parameters", "exp_avg") and parameter, one-dimensional; of what is frozen all."""


@dataclass(frozen=True)
class Part:
    """A tensor that a rank writes: `portion` of what `ranges` hold of a tensor of `shape`."""

    tensor: Tensor
    shape: tuple[int, ...]
    ranges: Ranges
    portion: tuple[int, int]

    @property
    def entry(self) -> dict[str, object]:
        """What the index says of it."""
        return {"shape": self.shape, "ranges": self.ranges, "portion": self.portion}


class Saver:
    """Saves of one engine, one at a time. Every rank calls every method alike."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._arrangement = arrangement
        self._rank = arrangement.placement.rank
        self._size = arrangement.placement.mesh.world_size
        self._thread: Thread | None = None
        self._problem: str | None = None

    def start(
        self, directory: Path, state: State, unused: Mapping[str, Tensor], facts: Facts, keep: int, copy: bool = True
    ) -> None:
        """Begins to save into a new folder of `directory`; without `copy` the state must not change until `wait`. `unused` parameters
        are rank 0's."""
        self.wait()
        target = directory.absolute()
        made = together(lambda: new_folder(target, facts.step) if self._rank == 0 else None)
        shared: list[Path | None] = [made]
        dist.broadcast_object_list(shared, src=0)
        folder = shared[0]
        assert folder is not None
        parts = self._parts(state, copy)
        for name, tensor in unused.items() if self._rank == 0 else ():
            shape = tuple(tensor.shape)
            parts[f"{PARAMETERS}/{name}"] = Part(tensor.reshape(-1).contiguous(), shape, whole(shape), (0, tensor.numel()))
        self._problem = "the thread that saves ended early"
        self._thread = Thread(target=self._run, args=(target, folder, parts, facts, keep), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the last save, and raises what went wrong on any rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            together(self._check)

    def _check(self) -> None:
        if self._problem is not None:
            raise InputError(f"rank {self._rank}: the checkpoint was not saved: {self._problem}")

    def _parts(self, state: State, copy: bool) -> dict[str, Part]:
        """What this rank writes, on the CPU."""
        placement = self._arrangement.placement
        found = {}
        for kind, portions in state.items():
            for name, tensor in portions.items():
                parameter = placement.parameters[name]
                start, stop = self._arrangement.portion(parameter, self._rank)
                if start < stop and self._arrangement.counts(parameter, self._rank):
                    there = tensor.detach().cpu()
                    own = there.clone() if copy or there.numel() < there.untyped_storage().nbytes() // there.element_size() else there
                    found[f"{kind}/{name}"] = Part(own, parameter.shape, placement.ranges(parameter), (start, stop))
        return found

    def _run(self, target: Path, folder: Path, parts: Mapping[str, Part], facts: Facts, keep: int) -> None:
        try:
            if parts:
                path = folder / f"rank_{self._rank}.safetensors"
                save_file({key: part.tensor for key, part in parts.items()}, path)
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            write_part(folder, self._rank, {key: part.entry for key, part in parts.items()})
            if self._rank == 0:
                self._await_parts(folder)
                write_index(folder, self._size, facts)
                keep_last(target, keep)
            self._problem = None
        except (OSError, SafetensorError) as problem:
            self._problem = str(problem)
            (folder / f"rank_{self._rank}.failed").touch()

    def _await_parts(self, folder: Path) -> None:
        end = time.monotonic() + PATIENCE_S
        missing = set(range(self._size))
        while missing:
            missing = {rank for rank in missing if not (folder / f"rank_{rank}.json").is_file()}
            if failed := next((rank for rank in sorted(missing) if (folder / f"rank_{rank}.failed").exists()), None):
                raise OSError(f"{folder}: rank {failed} could not write its part")
            if missing and time.monotonic() > end:
                raise OSError(f"{folder}: rank {min(missing)} wrote no part in {PATIENCE_S:g} s")
            time.sleep(POLL_S if missing else 0)


def load_checkpoint(directory: Path, arrangement: Arrangement, state: State, optimizer: str | None) -> Facts:
    """Fills this rank's portions from the newest checkpoint in a directory. Every rank calls it; nothing is changed when it does
    not fit, or a file of it was changed (each rank checks some)."""
    placement = arrangement.placement
    index = together(lambda: read_index(directory))
    together(lambda: _check_fits(index, placement, state, optimizer))
    names = sorted(index.files)
    together(lambda: index.check_files(names[placement.rank :: placement.mesh.world_size]))
    together(lambda: _read_tensors(arrangement, state, index))
    return index.facts


def _check_fits(index: Index, placement: Placement, state: State, optimizer: str | None) -> None:
    if len(state) > 1 and index.facts.optimizer != optimizer:
        raise InputError(f"{index.folder}: has the state of optimizer {index.facts.optimizer}, the engine runs {optimizer}")
    for key in (f"{kind}/{name}" for kind, parts in state.items() for name in parts):
        kind, _, name = key.partition("/")
        if key not in index.pieces:
            raise InputError(f"{index.folder}: has no {kind} of {name}, so it is of another model")
        if index.shapes[key] != placement.parameters[name].shape:
            expected = list(placement.parameters[name].shape)
            raise InputError(f"{index.folder}: {name} has shape {list(index.shapes[key])}, the model has {expected}")


def _read_tensors(arrangement: Arrangement, state: State, index: Index) -> None:
    placement = arrangement.placement
    with Reader() as reader:
        for kind, parts in state.items():
            for name, part in parts.items():
                parameter = placement.parameters[name]
                start, _ = arrangement.portion(parameter, placement.rank) if parameter.trainable else (0, 0)
                reader.read_portion(part, name, index.pieces[f"{kind}/{name}"], placement.ranges(parameter), start)
