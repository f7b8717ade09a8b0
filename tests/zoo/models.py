"""Tiny models of the shared zoo, and global batches for them.

The zoo is a folder with `zoo.py` (builds a tiny random model and inputs for an architecture) and `archs.json` (which to sweep).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from meshwright.data import IGNORED

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "zoo"
"""Where the zoo lies: beside the repository."""

SEQ = 16
MICRO_BATCH = 2
ROWS = 8
"""Rows of a global batch: two micro-batches on each of two data-parallel ranks, four on one."""
GIVES_LOSS = {"labels", "start_positions", "return_loss"}
"""Inputs that ask a model for its loss."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model, one micro-batch of example inputs, and the zoo that made them."""

    arch: str
    module: torch.nn.Module
    example: dict[str, object]

    @property
    def seq(self) -> int:
        """Length of its token sequences: those of the first input that has any."""
        tokens = [x for x in self.example.values() if isinstance(x, torch.Tensor) and x.ndim > 1 and not x.is_floating_point()]
        return tokens[0].shape[1] if tokens else SEQ


class WithLoss(torch.nn.Module):
    """A model that computes no loss, with one: the mean square of its logits."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: object) -> torch.Tensor:
        logits: torch.Tensor = self.inner(**inputs).logits
        return logits.float().square().mean()


def absent(folder: Path = FOLDER) -> str:
    """Why there is no zoo; empty when there is one."""
    missing = [name for name in ("zoo.py", "archs.json") if not (folder / name).is_file()]
    return f"no zoo: {folder / missing[0]} is missing" if missing else ""


def listed(folder: Path = FOLDER) -> tuple[list[str], list[str]]:
    """All architectures to sweep, and those with experts."""
    content = json.loads((folder / "archs.json").read_text())
    return list(content["archs"]), list(content["experts"])


def zoo(folder: Path = FOLDER) -> ModuleType:
    """The zoo's module, imported once."""
    name = "meshwright_zoo"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / "zoo.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def tiny(arch: str) -> Tiny:
    """The model with its seeded random weights."""
    module, example = zoo().tiny_model(arch, batch=MICRO_BATCH, seq=SEQ)
    return Tiny(arch, module if GIVES_LOSS & example.keys() else WithLoss(module), example)


def batches(model: Tiny, steps: int, uneven: bool) -> list[dict[str, object]]:
    """Global batches of ROWS rows, a new seed each. `uneven`: token labels are -100 in different shares of the rows."""
    return [_batch(model, 100 + step, uneven) for step in range(steps)]


def _batch(model: Tiny, seed: int, uneven: bool) -> dict[str, object]:
    module = model.module.inner if isinstance(model.module, WithLoss) else model.module
    made = zoo().example_inputs(model.arch, module, ROWS, SEQ, seed)
    given = {name: made[name] for name in model.example}
    random = torch.Generator().manual_seed(seed)
    batch = {name: _grown(model.example[name], item, random) for name, item in given.items()}
    labels = batch.get("labels")
    if uneven and isinstance(labels, torch.Tensor) and labels.ndim == 2 and not labels.is_floating_point():
        first = (torch.arange(ROWS) * 7 % 4) * labels.shape[1] // 4
        places = torch.arange(labels.shape[1])
        batch["labels"] = labels.masked_fill((places < first[:, None]) & (places < labels.shape[1] - 1), IGNORED)
    return batch


def _grown(example: Any, item: Any, random: torch.Generator) -> Any:
    """An input for ROWS rows: what the zoo made for as many, or its few fixed rows, repeated."""
    if isinstance(item, Mapping):
        return {name: _grown(example[name], part, random) for name, part in item.items()}
    if isinstance(item, (tuple, list)):
        return tuple(_grown(a, b, random) for a, b in zip(example, item, strict=True))
    if not isinstance(item, torch.Tensor):
        return item
    rows = len(example) * ROWS // MICRO_BATCH
    if len(item) == rows:
        return item
    grown = item[torch.arange(rows) % len(item)]
    return grown + 0.1 * torch.randn(grown.shape, generator=random) if grown.is_floating_point() else grown


def take(batch: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """Some rows of a global batch of ROWS rows; an input may have several entries for each row."""
    return {name: _taken(item, rows) for name, item in batch.items()}


def _taken(item: Any, rows: list[int]) -> Any:
    if isinstance(item, Mapping):
        return {name: _taken(part, rows) for name, part in item.items()}
    if isinstance(item, (tuple, list)):
        return tuple(_taken(part, rows) for part in item)
    return item.unflatten(0, (ROWS, -1))[rows].flatten(0, 1) if isinstance(item, torch.Tensor) else item


def chunks_of(kind: str, dp: int) -> list[list[int]]:
    """Rows that one process takes at once: `whole`, all; `ranks`, a micro-batch of one dp rank; `statistics`, a micro-batch of all dp
    ranks (rows of different ranks meet in a loss term of batch statistics)."""
    if kind == "whole":
        return [list(range(ROWS))]
    share = ROWS // dp
    parts = [[d * share + start + i for i in range(MICRO_BATCH)] for d in range(dp) for start in range(0, share, MICRO_BATCH)]
    if kind == "ranks":
        return parts
    per_rank = len(parts) // dp
    return [[row for d in range(dp) for row in parts[d * per_rank + m]] for m in range(per_rank)]
