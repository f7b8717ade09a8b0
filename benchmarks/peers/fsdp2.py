"""torch's fully_shard (FSDP2) on two ranks, a unit per layer: parameters, gradients and optimizer state are sharded.

    ... peers.fsdp2 DIRECTORY [keep]     keep: parameters stay gathered between forward and backward
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from meshwright.benchmarks.common import CLIP, adamw, load_model, measure, next_token_loss, start

RANKS = 2

directory, rank = start(RANKS)
mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
reshard = "keep" not in sys.argv
model = load_model(directory)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
optimizer = adamw(model.parameters())


def step(ids: Tensor) -> tuple[float, float]:
    """This rank's half of a batch."""
    own = ids.chunk(RANKS)[rank]
    loss = next_token_loss(model(input_ids=own).logits, own)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), CLIP)
    assert isinstance(norm, DTensor)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / RANKS
    dist.all_reduce(mean)
    return float(mean), float(norm.full_tensor())


measure(step)
