"""A checkpoint as a transformers model: bit-equal, whatever mesh saved it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from meshwright import export as exporting
from meshwright.plan import compile
from meshwright.plans.errors import InputError
from meshwright.runtime.engine import Engine
from meshwright.tests.parity import CONFIGS, OPTIMIZER, batches, build
from meshwright.tests.ranks import run_ranks


def train_and_save(plans: list[tuple[str, str, int]]) -> list[dict[str, Tensor]]:
    found = []
    for plan, save, seq in plans:
        engine = Engine(plan, OPTIMIZER)
        engine.train_step(batches(4, seq, 1)[0])
        engine.save(save)
        found.append(engine.state_dict())
    return found


def test_from_pretrained_is_bit_equal(tmp_path: Path) -> None:
    cases = [("llama", "dp=4", 3, {"tie_word_embeddings": True}), ("t5", "dp=2,tp=2", 1, {}), ("mixtral", "pp=2,dp=2", 2, {})]
    plans, models = [], []
    for name, mesh, zero, changes in cases:
        tiny = build(name, layers=2, **changes)
        (Path(tiny.directory) / "tokenizer.json").write_text("{}")
        compile(tiny.directory, mesh=mesh, seq=tiny.seq, global_batch=4, zero=zero).save(tmp_path / name)
        plans.append((str(tmp_path / name), str(tmp_path / f"{name}-save"), tiny.seq))
        models.append(getattr(transformers, CONFIGS[name][1]))
    states = run_ranks(4, train_and_save, plans, timeout=300)[0]
    for (_, save, _), model, state in zip(plans, models, states, strict=True):
        target = Path(save).with_name("hf-" + Path(save).name)
        exporting.export(Path(save), target, shard_bytes=200_000)
        loaded = model.from_pretrained(target)
        for name, parameter in loaded.named_parameters(remove_duplicate=False):
            assert parameter.dtype == torch.float32 and torch.equal(parameter, state[name]), name
        assert (target / "tokenizer.json").read_text() == "{}"
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1
        stored = sum((target / file).stat().st_size for file in set(index["weight_map"].values()))
        assert stored < 1.1 * sum(p.nbytes for p in loaded.parameters()), "tied weights are stored once"
    whole = tmp_path / "whole"
    exporting.export(Path(plans[0][1]), whole)
    with safe_open(whole / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"} and "lm_head.weight" not in file.keys()  # noqa: SIM118 - it is no mapping
    with pytest.raises(InputError, match="found something else, expected a new path"):
        exporting.export(Path(plans[0][1]), whole)
    with pytest.raises(InputError, match="is no checkpoint"):
        exporting.export(whole, tmp_path / "other")
