"""Whole tensors on rank 0, one parameter at a time: every rank that a portion of it counts for sends that, rank 0 puts them
together on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.buckets import Arrangement
from meshwright.runtime.placement import Parameter
from meshwright.runtime.weights import copy_overlap, whole


def gather(arrangement: Arrangement, portions: Mapping[str, Tensor], trainable_only: bool = False) -> dict[str, Tensor]:
    """{parameter: whole tensor} of ranks' `portions` (one-dimensional) on rank 0, {} elsewhere. Every rank calls it."""
    found: dict[str, Tensor] = {}
    placement = arrangement.placement
    held = {p.name for p in placement.held}
    for parameter in placement.parameters.values():
        if trainable_only and not parameter.trainable:
            continue
        if placement.rank == 0:
            found[parameter.name] = _join(arrangement, parameter, portions)
        elif parameter.name in held and arrangement.counts(parameter, placement.rank):
            start, stop = arrangement.portion(parameter, placement.rank)
            if start < stop:
                dist.send(portions[parameter.name].detach().cpu(), 0)
    return found


def _join(arrangement: Arrangement, parameter: Parameter, portions: Mapping[str, Tensor]) -> Tensor:
    placement = arrangement.placement
    result = torch.empty(parameter.shape)
    for owner in placement.owners(parameter):
        part = torch.empty(placement.local_shape(parameter))
        flat = part.view(-1)
        for rank in arrangement.holders(parameter, owner):
            start, stop = arrangement.portion(parameter, rank)
            if rank == 0:
                flat[start:stop] = portions[parameter.name].detach().cpu()
            elif start < stop:
                dist.recv(flat[start:stop], rank)
        copy_overlap(result, whole(parameter.shape), part, placement.ranges(parameter, owner))
    return result
