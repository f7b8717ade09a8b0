"""The model in one process, as transformers has it: what all runs are relative to."""

from __future__ import annotations

from torch import Tensor

from meshwright.benchmarks.common import adamw, load_model, measure, next_token_loss, start, update

directory, _ = start(1)
model = load_model(directory)
optimizer = adamw(model.parameters())


def step(ids: Tensor) -> tuple[float, float]:
    """A whole batch."""
    loss = next_token_loss(model(input_ids=ids).logits, ids)
    loss.backward()
    norm = update(model, optimizer)
    return float(loss.detach()), norm


measure(step)
