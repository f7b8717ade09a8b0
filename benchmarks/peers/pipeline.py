"""torch.distributed.pipelining on two ranks, over Llama cut by hand: `pipeline MODEL SCHEDULE`, one of SCHEDULES.

Schedules of several stages per rank have two, of equal numbers of layers; those in a V have them on ranks 0 1 1 0, as they demand.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from transformers import LlamaForCausalLM

from meshwright.benchmarks.common import adamw, load_model, measure, next_token_loss, squares, start, update_together

RANKS = 2
MICRO_BATCHES = 4
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
V = ("ZBVZeroBubble", "DualPipeV")


class Part(nn.Module):
    """Some layers, the first with the embedding, the last with the head."""

    def __init__(self, model: LlamaForCausalLM, index: int, stages: int) -> None:
        super().__init__()
        layers = len(model.model.layers) // stages
        self.embedding = model.model.embed_tokens if index == 0 else None
        self.layers = nn.ModuleList(model.model.layers[index * layers : (index + 1) * layers])
        self.rotary = model.model.rotary_emb
        self.head = nn.Sequential(model.model.norm, model.lm_head) if index + 1 == stages else None

    def forward(self, x: Tensor) -> Tensor:
        """Ids or hidden states, to hidden states or logits."""
        hidden: Tensor = x if self.embedding is None else self.embedding(x)
        positions = torch.arange(hidden.shape[1])[None]
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return hidden if self.head is None else self.head(hidden)


directory, rank = start(RANKS)
name = sys.argv[2]
kind = get_schedule_class(name)
several = issubclass(kind, PipelineScheduleMulti)
num_stages = 2 * RANKS if several else RANKS
own = [rank, num_stages - 1 - rank if name in V else rank + RANKS] if several else [rank]
model = load_model(directory)
parts = [Part(model, index, num_stages) for index in own]
stages = [PipelineStage(part, index, num_stages, torch.device("cpu")) for part, index in zip(parts, own, strict=True)]
schedule = kind(stages if several else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=next_token_loss)
parameters = [p for part in parts for p in part.parameters()]
optimizer = adamw(parameters)


def step(ids: Tensor) -> tuple[float, float]:
    """A batch in micro-batches; the norm over both ranks."""
    losses: list[Tensor] = []
    inputs = (ids,) if 0 in own else ()
    if num_stages - 1 in own:
        schedule.step(*inputs, target=ids, losses=losses)
    else:
        schedule.step(*inputs)
    loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
    return update_together(parameters, optimizer, squares(parameters), loss)


measure(step)
