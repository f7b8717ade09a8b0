"""Whole tensors on rank 0, one parameter at a time: owners send their parts, rank 0 puts them together on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.placement import Parameter, Placement
from meshwright.runtime.weights import copy_overlap, whole


def gather(placement: Placement, parts: Mapping[str, Tensor], trainable_only: bool = False) -> dict[str, Tensor]:
    """{parameter: whole tensor} of ranks' `parts` on rank 0, {} elsewhere. Every rank calls it."""
    found: dict[str, Tensor] = {}
    for parameter in placement.parameters.values():
        if trainable_only and not parameter.trainable:
            continue
        if placement.rank == 0:
            found[parameter.name] = _join(placement, parameter, parts)
        elif placement.rank in placement.owners(parameter):
            dist.send(parts[parameter.name].detach().cpu().contiguous(), 0)
    return found


def _join(placement: Placement, parameter: Parameter, parts: Mapping[str, Tensor]) -> Tensor:
    result = torch.empty(parameter.shape)
    for owner in placement.owners(parameter):
        if owner == 0:
            part = parts[parameter.name].detach().cpu()
        else:
            part = torch.empty(placement.local_shape(parameter))
            dist.recv(part, owner)
        copy_overlap(result, whole(parameter.shape), part, placement.ranges(parameter, owner))
    return result
