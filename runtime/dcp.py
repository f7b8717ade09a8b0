"""Checkpoints in the format of torch.distributed.checkpoint (DCP), for programs that are not Meshwright.

    DIR/__R_0.distcp     what rank R stands for
    DIR/.metadata        written last: without it the directory is no checkpoint
    DIR/meshwright.json  step, seeds, loss scale (runtime.checkpoint_files.Facts)

Parameters have the model's own names, optimizer states `exp_avg/NAME`; all FP32, described by boxes of the whole tensor. So any mesh of
Meshwright reads them, and so does any program that loads DTensors of these names with torch.distributed.checkpoint.load. A rank's part
need not be a DTensor's: a slice of each section of a packed weight, cut again where ZeRO's shard ends, is several boxes.

DCP's files have no digests and its metadata is a pickle: load them only from where you trust. Meshwright's own format
(runtime.checkpoint) has digests, is written in the background, and is what `train` saves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright.plans.errors import InputError
from meshwright.runtime.agreement import together
from meshwright.runtime.buckets import Arrangement
from meshwright.runtime.checkpoint import PARAMETERS, State
from meshwright.runtime.checkpoint_files import Facts, write_whole
from meshwright.runtime.weights import Box, Ranges, boxes, local_shape, within

METADATA = ".metadata"
FACTS = "meshwright.json"


class Shards:
    """Boxes of a tensor of `shape` that this rank has: DCP's protocol of what can be saved and loaded."""

    def __init__(self, shape: tuple[int, ...], parts: Mapping[Box, Tensor]) -> None:
        self.shape = torch.Size(shape)
        self.parts = {tuple(low for low, _ in box): (box, tensor) for box, tensor in parts.items()}

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(torch.float32), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offset), torch.Size([high - low for low, high in box]))
            for offset, (box, _) in self.parts.items()
        ]

    def part(self, index: MetadataIndex) -> Tensor:
        """The box at an offset."""
        assert index.offset is not None
        return self.parts[tuple(index.offset)][1]


class SavePlanner(DefaultSavePlanner):
    """Finds boxes of Shards."""

    def lookup_object(self, index: MetadataIndex) -> object:
        """What is written for an index."""
        return self.state_dict[index.fqn].part(index)


class LoadPlanner(DefaultLoadPlanner):
    """Finds boxes of Shards."""

    def set_up_planner(self, state_dict: dict[str, object], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """The parent's makes other objects of what it does not know."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """What is read into."""
        found: Tensor = self.state_dict[index.fqn].part(index)
        return found


def key_of(kind: str, name: str) -> str:
    """The name of a tensor in the checkpoint."""
    return name if kind == PARAMETERS else f"{kind}/{name}"


def parts_of(want: Ranges, flat: Tensor, start: int) -> Iterator[tuple[Box, Tensor]]:
    """(box of the whole tensor, view of `flat`) of a portion: the elements from `start` on of what `want` holds, row-major."""
    at = 0
    for box in boxes(local_shape(want), start, start + flat.numel()):
        shape = [high - low for low, high in box]
        size = flat[at : at + torch.Size(shape).numel()].view(shape)
        at += size.numel()
        runs = within(want, box)
        places = [list(accumulate((high - low for low, high in dim), initial=0)) for dim in runs]
        for chosen in product(*(range(len(dim)) for dim in runs)):
            view = size
            for dim, number in enumerate(chosen):
                low, high = runs[dim][number]
                view = view.narrow(dim, places[dim][number], high - low)
            yield tuple(runs[dim][number] for dim, number in enumerate(chosen)), view


def shards(arrangement: Arrangement, state: State, all_replicas: bool) -> dict[str, Shards]:
    """What this rank has, by name; of parts that several ranks have only those that count unless `all_replicas`."""
    placement = arrangement.placement
    found = {}
    for kind, portions in state.items():
        for name, flat in portions.items():
            parameter = placement.parameters[name]
            start, stop = arrangement.portion(parameter, placement.rank)
            if all_replicas and not parameter.trainable:
                start, stop = 0, flat.numel()
            if start < stop and (all_replicas or arrangement.counts(parameter, placement.rank)):
                found[key_of(kind, name)] = Shards(parameter.shape, dict(parts_of(placement.ranges(parameter), flat.detach(), start)))
    return found


def save_dcp(directory: Path, arrangement: Arrangement, state: State, unused: Mapping[str, Tensor], facts: Facts) -> None:
    """Writes a checkpoint; every rank calls it. InputError when the directory has something in it."""
    rank = arrangement.placement.rank

    def check() -> None:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise InputError(f"{directory}: found something else, expected a new path or an empty directory")

    together(check if rank == 0 else lambda: None)
    whole: dict[str, object] = dict(shards(arrangement, state, all_replicas=False))
    if rank == 0:
        whole.update({name: Shards(tuple(x.shape), {tuple((0, n) for n in x.shape): x}) for name, x in unused.items()})
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / FACTS, json.dumps(asdict(facts)))
    save(whole, checkpoint_id=str(directory), planner=SavePlanner(flatten_state_dict=False))
    dist.barrier()


def load_dcp(directory: Path, arrangement: Arrangement, state: State, optimizer: str | None) -> Facts:
    """Fills this rank's portions; every rank calls it. InputError when something is missing or of another shape."""
    facts = together(lambda: read_facts(directory))
    if len(state) > 1 and facts.optimizer != optimizer:
        raise InputError(f"{directory}: has the state of optimizer {facts.optimizer}, the engine runs {optimizer}")
    wanted = shards(arrangement, state, all_replicas=True)
    known = FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    for name, part in wanted.items():
        size = getattr(known.get(name), "size", None)
        if size != part.shape:
            found = "nothing" if size is None else f"shape {list(size)}"
            raise InputError(f"{directory}: {name}: found {found}, the model has {list(part.shape)}")
    whole: dict[str, object] = dict(wanted)
    load(whole, checkpoint_id=str(directory), planner=LoadPlanner(flatten_state_dict=False))
    return facts


def is_dcp(directory: Path) -> bool:
    """Whether a directory is such a checkpoint."""
    return (directory / METADATA).is_file()


def read_facts(directory: Path) -> Facts:
    """What is known beside tensors. InputError for what is not as it was written."""
    path = directory / FACTS
    try:
        return Facts(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
