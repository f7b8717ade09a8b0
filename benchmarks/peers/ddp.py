"""torch's DistributedDataParallel on two ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from meshwright.benchmarks.common import adamw, load_model, measure, next_token_loss, start, update

RANKS = 2

directory, rank = start(RANKS)
model = DistributedDataParallel(load_model(directory))
optimizer = adamw(model.parameters())


def step(ids: Tensor) -> tuple[float, float]:
    """This rank's half of a batch."""
    own = ids.chunk(RANKS)[rank]
    loss = next_token_loss(model(input_ids=own).logits, own)
    loss.backward()
    norm = update(model, optimizer)
    mean = loss.detach() / RANKS
    dist.all_reduce(mean)
    return float(mean), norm


measure(step)
