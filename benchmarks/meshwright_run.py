"""Meshwright's run: the engine on a plan: `meshwright_run MODEL PLAN`. The plan has read the model already."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from meshwright.benchmarks.common import CLIP, LR, WEIGHT_DECAY, measure
from meshwright.runtime.engine import Engine

torch.set_num_threads(1)
engine = Engine(sys.argv[2], optimizer={"name": "adamw", "lr": LR, "weight_decay": WEIGHT_DECAY, "clip": CLIP})


def step(ids: Tensor) -> tuple[float, float]:
    """The global batch, on every rank."""
    metrics = engine.train_step({"input_ids": ids, "labels": ids})
    return metrics.loss, metrics.grad_norm


measure(step)
