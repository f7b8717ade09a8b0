"""Saving and loading: every rank writes and reads its own portions, in the format of torch.distributed.checkpoint (runtime.dcp,
runtime.checkpoint_files).

A save in the background copies what the rank stands for into the CPU's memory; a thread writes it, and meets those of other ranks in a
process group of its own, while training goes on. There is one save at a time: `wait` ends the last, and raises on all ranks what went wrong
on one. When a rank dies the others' threads lose its connections, as the ranks themselves do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from meshwright.plans.errors import InputError
from meshwright.runtime.agreement import together
from meshwright.runtime.buckets import Arrangement
from meshwright.runtime.checkpoint_files import Facts, Index, begin, read_index
from meshwright.runtime.dcp import Writer, read_metadata, read_shards, shapes_of
from meshwright.runtime.placement import Placement
from meshwright.runtime.shards import SavePlanner, Shards, State, key_of, shards

PATIENCE = timedelta(minutes=10)
"""How long a rank that has written its file waits for the others."""


class Saver:
    """Saves of one engine, one at a time. Every rank calls every method alike."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._arrangement = arrangement
        self._rank = arrangement.placement.rank
        self._under_way: tuple[Path, Future[object]] | None = None

    def start(self, directory: Path, state: State, unused: Mapping[str, Tensor], facts: Facts, keep: int, wait: bool) -> None:
        """Saves into a new folder of `directory`, in the background unless `wait`. `unused` parameters are rank 0's."""
        self.wait()
        target = directory.absolute()
        made = together(lambda: begin(target, facts.step) if self._rank == 0 else None)
        everyone: list[Path | None] = [made]
        dist.broadcast_object_list(everyone, src=0)
        assert everyone[0] is not None
        parts: dict[str, object] = dict(shards(self._arrangement, state, all_replicas=False))
        if self._rank == 0:
            parts.update({name: Shards.whole(tensor) for name, tensor in unused.items()})
        writer, planner = Writer(everyone[0], facts, keep), SavePlanner()
        if wait:
            with _one_line(target):
                save(parts, storage_writer=writer, planner=planner, process_group=self._group)
        else:
            started = async_save(parts, storage_writer=writer, planner=planner, process_group=self._group)
            self._under_way = target, cast("Future[object]", started)

    def wait(self) -> None:
        """Waits for the last save, and raises what went wrong on any rank."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            target, started = under_way
            with _one_line(target):
                started.result()

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        """All ranks: what threads send is not mixed with what the engine sends."""
        group = dist.new_group(timeout=PATIENCE, backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return group


@contextmanager
def _one_line(directory: Path) -> Iterator[None]:
    """InputError for a save that failed because of its files, on any rank: all ranks know."""
    try:
        yield
    except CheckpointException as problem:
        rank, (error, _) = min(problem.failures.items())
        if not isinstance(error, OSError):
            raise
        raise InputError(f"{directory}: rank {rank} could not save a checkpoint: {error}") from None


def load_checkpoint(directory: Path, arrangement: Arrangement, state: State, optimizer: str | None) -> Facts:
    """Fills this rank's portions from the newest checkpoint in a directory. Every rank calls it; nothing is changed when it does
    not fit, or a file of it was changed (each rank checks some)."""
    placement = arrangement.placement
    index = together(lambda: read_index(directory))
    metadata = together(lambda: read_metadata(index))
    together(lambda: _check_fits(index, metadata, placement, state, optimizer))
    names = sorted(index.files)
    together(lambda: index.check_files(names[placement.rank :: placement.mesh.world_size]))
    together(lambda: read_shards(index, metadata, shards(arrangement, state, all_replicas=True)))
    return index.facts


def _check_fits(index: Index, metadata: Metadata, placement: Placement, state: State, optimizer: str | None) -> None:
    if len(state) > 1 and index.facts.optimizer != optimizer:
        raise InputError(f"{index.folder}: has the state of optimizer {index.facts.optimizer}, the engine runs {optimizer}")
    shapes = shapes_of(metadata)
    for kind, parts in state.items():
        for name in parts:
            found, expected = shapes.get(key_of(kind, name)), placement.parameters[name].shape
            if found is None:
                raise InputError(f"{index.folder}: has no {kind} of {name}, so it is of another model")
            if found != expected:
                raise InputError(f"{index.folder}: {name} has shape {list(found)}, the model has {list(expected)}")
