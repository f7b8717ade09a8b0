"""torch.distributed.pipelining on two ranks: Schedule1F1B over two halves of Llama, cut by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaForCausalLM

from meshwright.benchmarks.common import adamw, clip, load_model, measure, next_token_loss, start

RANKS = 2
MICRO_BATCHES = 4


class Half(nn.Module):
    """Embedding and the first layers, or the last layers and the head."""

    def __init__(self, model: LlamaForCausalLM, index: int) -> None:
        super().__init__()
        layers = len(model.model.layers) // RANKS
        self.embedding = model.model.embed_tokens if index == 0 else None
        self.layers = nn.ModuleList(model.model.layers[index * layers : (index + 1) * layers])
        self.rotary = model.model.rotary_emb
        self.head = nn.Sequential(model.model.norm, model.lm_head) if index + 1 == RANKS else None

    def forward(self, x: Tensor) -> Tensor:
        """Ids or hidden states, to hidden states or logits."""
        hidden: Tensor = x if self.embedding is None else self.embedding(x)
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return hidden if self.head is None else self.head(hidden)


directory, rank = start(RANKS)
half = Half(load_model(directory), rank)
schedule = Schedule1F1B(PipelineStage(half, rank, RANKS, torch.device("cpu")), MICRO_BATCHES, next_token_loss)
parameters = list(half.parameters())
optimizer = adamw(parameters)


def step(ids: Tensor) -> tuple[float, float]:
    """A batch in micro-batches; the norm over both ranks."""
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(ids)
    else:
        schedule.step(target=ids, losses=losses)
    totals = torch.stack(
        [
            sum((p.grad.square().sum() for p in parameters if p.grad is not None), torch.zeros(())),
            torch.stack(losses).mean().detach() if losses else torch.zeros(()),
        ]
    )
    dist.all_reduce(totals)
    norm = totals[0].sqrt()
    clip(parameters, norm)
    optimizer.step()
    optimizer.zero_grad()
    return float(totals[1]), float(norm)


measure(step)
