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

from meshwright.reference import with_ignored

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "zoo"
"""Where the zoo lies: beside the repository."""

SEQ = 16
MICRO_BATCH = 2
ROWS = 8
"""Rows of a global batch: two micro-batches on each of two data-parallel ranks, four on one."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model, one micro-batch of example inputs, and the zoo that made them."""

    arch: str
    module: torch.nn.Module
    example: dict[str, object]


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
    return Tiny(arch, module, example)


def batches(model: Tiny, steps: int, uneven: bool) -> list[dict[str, object]]:
    """Global batches of ROWS rows, a new seed each. `uneven`: token labels are -100 in different shares of the rows."""
    return [_batch(model, 100 + step, uneven) for step in range(steps)]


def _batch(model: Tiny, seed: int, uneven: bool) -> dict[str, object]:
    made = zoo().example_inputs(model.arch, model.module, ROWS, SEQ, seed)
    given = {name: made[name] for name in model.example}
    random = torch.Generator().manual_seed(seed)
    batch = {name: _grown(model.example[name], item, random) for name, item in given.items()}
    labels = batch.get("labels")
    if uneven and isinstance(labels, torch.Tensor) and labels.ndim == 2 and not labels.is_floating_point():
        batch["labels"] = with_ignored(labels, random)
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


def rows_of(batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Rows [start, stop) of a global batch of ROWS rows; an input may have several entries per row."""
    return {name: _cut(item, start, stop) for name, item in batch.items()}


def _cut(item: Any, start: int, stop: int) -> Any:
    if isinstance(item, Mapping):
        return {name: _cut(part, start, stop) for name, part in item.items()}
    if isinstance(item, (tuple, list)):
        return tuple(_cut(part, start, stop) for part in item)
    if not isinstance(item, torch.Tensor):
        return item
    times = len(item) // ROWS
    return item[start * times : stop * times]
