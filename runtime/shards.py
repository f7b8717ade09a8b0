"""A rank's parts of tensors as torch.distributed.checkpoint (DCP) sees them.

    Shards     boxes of a whole tensor that a rank has: views of its flat buffers, as a DTensor is one of its local tensor. A rank's part
               need not be a DTensor's: a slice of each section of a packed weight, cut again where ZeRO's shard ends, is several boxes
    planners   what finds a box of Shards for what DCP writes or reads

Parameters have the model's own names, optimizer states `exp_avg/NAME`; all FP32. So any program that loads DTensors of these names
with torch.distributed.checkpoint.load reads them too, and any plan reads what any other saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, product
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from meshwright.runtime.buckets import ELEMENT_BYTES, Arrangement
from meshwright.runtime.weights import Box, Ranges, boxes, local_shape, within

PARAMETERS = "parameters"
BOX_BYTES = 64 << 20
"""The most that a box is written with: DCP reads whole boxes, also for a part of one."""

State = Mapping[str, Mapping[str, Tensor]]
"""This rank's portions by kind ("parameters", "exp_avg") and parameter, one-dimensional; of what is frozen all."""


class Shards:
    """Boxes of a tensor of `shape` that this rank has: DCP's protocol of what can be saved and loaded."""

    def __init__(self, shape: tuple[int, ...], parts: Mapping[Box, Tensor]) -> None:
        self.shape = torch.Size(shape)
        self.parts = {tuple(low for low, _ in box): (box, tensor) for box, tensor in parts.items()}

    @classmethod
    def whole(cls, tensor: Tensor) -> Shards:
        """All of a tensor."""
        return cls(tuple(tensor.shape), {tuple((0, n) for n in tensor.shape): tensor})

    @property
    def num_elements(self) -> int:
        """Of all boxes."""
        return sum(tensor.numel() for _, tensor in self.parts.values())

    def copied(self) -> Shards:
        """The same in the CPU's memory, on its own."""
        copies = {box: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor) for box, tensor in self.parts.values()}
        return Shards(tuple(self.shape), copies)

    def part(self, index: MetadataIndex) -> Tensor:
        """The box at an offset."""
        assert index.offset is not None
        return self.parts[tuple(index.offset)][1]

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


class SavePlanner(DefaultSavePlanner):
    """Finds boxes of Shards."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def lookup_object(self, index: MetadataIndex) -> object:
        """What is written for an index."""
        return self.state_dict[index.fqn].part(index)


class LoadPlanner(DefaultLoadPlanner):
    """Finds boxes of Shards."""

    def __init__(self, state_dict: Mapping[str, Shards], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False)
        self.state_dict, self.metadata = dict(state_dict), metadata

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
        size = flat[at : at + prod(shape)].view(shape)
        at += size.numel()
        runs = within(want, box)
        places = [list(accumulate((high - low for low, high in dim), initial=0)) for dim in runs]
        for chosen in product(*(range(len(dim)) for dim in runs)):
            view = size
            for dim, number in enumerate(chosen):
                low, high = runs[dim][number]
                view = view.narrow(dim, places[dim][number], high - low)
            yield tuple(runs[dim][number] for dim, number in enumerate(chosen)), view


def cut(box: Box, tensor: Tensor, limit: int = BOX_BYTES // ELEMENT_BYTES) -> Iterator[tuple[Box, Tensor]]:
    """A box and what is in it, in boxes of at most `limit` elements."""
    if tensor.numel() <= limit:
        yield box, tensor
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    step = max(1, limit * tensor.shape[dim] // tensor.numel())
    for at in range(0, tensor.shape[dim], step):
        size = min(step, tensor.shape[dim] - at)
        low = box[dim][0] + at
        yield from cut((*box[:dim], (low, low + size), *box[dim + 1 :]), tensor.narrow(dim, at, size), limit)


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
                parts = parts_of(placement.ranges(parameter), flat.detach(), start)
                found[key_of(kind, name)] = Shards(parameter.shape, dict(piece for part in parts for piece in cut(*part)))
    return found
