"""What all runs of a comparison share: the model, the batches, the optimizer, and how a step is measured.

A run is one torchrun job. It reads the model that `make_model` saved, takes STEPS steps on `batches()` and rank 0 prints
one JSON line: losses, gradient norms, and the CPU seconds of a step summed over ranks (median over steps after WARM_UP).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, SEQ, VOCABULARY = 8, 128, 4096
STEPS, WARM_UP = 10, 2
LR, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 1.0


def make_model(directory: Path) -> None:
    """A Llama of 5 million parameters, random weights of seed 0, saved as transformers does."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQ,
        use_cache=False,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)


def load_model(directory: str) -> LlamaForCausalLM:
    """The saved model, for training."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    model.train()
    return model


def batches() -> list[Tensor]:
    """Token ids of every step."""
    generator = torch.Generator().manual_seed(1234)
    return [torch.randint(0, VOCABULARY, (ROWS, SEQ), generator=generator) for _ in range(STEPS)]


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean over the SEQ - 1 targets of every row."""
    return cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def adamw(parameters: Iterable[Tensor], foreach: bool | None = None) -> torch.optim.Optimizer:
    """The optimizer of every run. `foreach` is False where parameters are of several tensor types."""
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=WEIGHT_DECAY, foreach=foreach)


def clip(parameters: Iterable[Tensor], norm: Tensor) -> None:
    """Scales the gradients to a norm of CLIP at most, as torch.nn.utils.clip_grad_norm_ does."""
    scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)


def update_together(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer, square: Tensor, loss: Tensor) -> tuple[float, float]:
    """Adds up what ranks have of the squared norm and of the loss, clips, updates and zeroes; (loss, norm before clipping)."""
    totals = torch.stack([square, loss])
    dist.all_reduce(totals)
    norm = totals[0].sqrt()
    clip(parameters, norm)
    optimizer.step()
    optimizer.zero_grad()
    return float(totals[1]), float(norm)


def squares(parameters: Iterable[Tensor]) -> Tensor:
    """The squared norm of gradients."""
    return sum((p.grad.square().sum() for p in parameters if p.grad is not None), torch.zeros(()))


def update(model: Module, optimizer: torch.optim.Optimizer) -> float:
    """Clips, updates and zeroes; the gradient norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


@dataclass(frozen=True)
class Result:
    """Of one run. `cpu_s` of a step, all ranks together; `wall_s` of a step, barrier to barrier."""

    losses: list[float]
    norms: list[float]
    cpu_s: float
    wall_s: float


def measure(step: Callable[[Tensor], tuple[float, float]]) -> None:
    """Runs `step(ids) -> (loss, gradient norm)` on all batches; rank 0 prints the Result. Ends the process."""
    losses, norms, cpu, wall = [], [], [], []
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for ids in batches():
        if ranks > 1:
            dist.barrier()
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        loss, norm = step(ids)
        cpu.append(time.process_time() - cpu_start)
        if ranks > 1:
            dist.barrier()
        wall.append(time.perf_counter() - wall_start)
        losses.append(loss)
        norms.append(norm)
    cpu_s = torch.tensor(statistics.median(cpu[WARM_UP:]), dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(cpu_s)
    if ranks == 1 or dist.get_rank() == 0:
        print(json.dumps(asdict(Result(losses, norms, float(cpu_s), statistics.median(wall[WARM_UP:])))), flush=True)
    if ranks > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive their groups at a normal exit, which ends the process by a signal


def start(ranks: int) -> tuple[str, int]:
    """Joins the ranks of this job; the model's directory (the first argument) and this rank."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo")
        if dist.get_world_size() != ranks:
            raise SystemExit(f"error: this run takes {ranks} processes, not {dist.get_world_size()}")
    return sys.argv[1], dist.get_rank() if ranks > 1 else 0
