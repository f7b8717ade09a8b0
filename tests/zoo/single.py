"""What one process computes: losses, gradient norms and first gradients of a few AdamW steps, and how it is compared.

Gates (fp32): first loss 2e-6 and losses of all steps 2e-5, absolute or relative; every gradient 1e-5 relative, first norm 5e-6.
Where the ranks are beyond a gate, the same is computed in fp64: when fp32 itself, in one process, is as far from that as the ranks are,
the difference is rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from meshwright.reference import evaluation_mode, loss_of
from meshwright.tests.parity import NOTHING, OPTIMIZER, Trace, relative
from meshwright.tests.zoo.models import ROWS, take

FIRST_LOSS, LOSSES, GRADIENT, NORM = 2e-6, 2e-5, 1e-5, 5e-6
ROUNDING = 3.0
"""The ranks may be this many times as far from fp64 as one process in fp32 is."""


@dataclass(frozen=True)
class Distance:
    """How far two runs are apart, each as a multiple of its gate; `gradient` names the worst parameter."""

    first_loss: float
    losses: float
    gradients: float
    gradient: str
    norm: float

    @property
    def ok(self) -> bool:
        return max(self.first_loss, self.losses, self.gradients, self.norm) <= 1.0

    def __str__(self) -> str:
        return (
            f"first loss {self.first_loss * FIRST_LOSS:.1e}, losses {self.losses * LOSSES:.1e}, "
            f"gradient of {self.gradient} {self.gradients * GRADIENT:.1e}, norm {self.norm * NORM:.1e}"
        )


def run_single(
    module: torch.nn.Module, data: list[dict[str, Any]], chunks: list[list[int]], dtype: torch.dtype = torch.float32
) -> Trace:
    """A copy of the model trained on global batches: on the mean of the losses of chunks of rows."""
    model = evaluation_mode(copy.deepcopy(module).to(dtype))
    if dtype == torch.float64 and isinstance(model, PreTrainedModel):
        with suppress(ValueError):  # a model without experts says that it has none
            model.set_experts_implementation("batched_mm")  # grouped products are for fp32
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=OPTIMIZER["lr"], betas=OPTIMIZER["betas"], weight_decay=OPTIMIZER["weight_decay"]  # type: ignore[arg-type]
    )
    trace = Trace()
    with default_dtype(dtype):
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            trace.losses.append(backward(model, batch, chunks, dtype))
            if step == 0:
                trace.gradients = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
            trace.norms.append(float(torch.nn.utils.clip_grad_norm_(list(trained.values()), 1.0)))
            optimizer.step()
    return trace


def backward(model: torch.nn.Module, batch: Mapping[str, Any], chunks: list[list[int]], dtype: torch.dtype) -> float:
    """Adds the gradients of a global batch; gives its loss."""
    total = 0.0
    for rows in chunks:
        part = {name: converted(item, dtype) for name, item in take(batch, rows).items()}
        loss = loss_of(model(**part)) * (len(rows) / ROWS)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def converted(item: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of an input in another precision."""
    if isinstance(item, Mapping):
        return {name: converted(part, dtype) for name, part in item.items()}
    if isinstance(item, (tuple, list)):
        return tuple(converted(part, dtype) for part in item)
    return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What torch's factories make while active."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def distance(found: Trace, expected: Trace) -> Distance:
    """How far `found` is from `expected`. A parameter without gradient counts as one of zeros."""
    names = found.gradients.keys() | expected.gradients.keys()
    nothing = NOTHING * max(float(g.double().norm()) for g in expected.gradients.values())
    errors = {name: _gradient_error(name, found, expected, nothing) for name in names}
    worst = max(errors, key=lambda name: errors[name])
    apart = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(found.losses, expected.losses, strict=True)]
    norm = abs(found.norms[0] - expected.norms[0]) / expected.norms[0]
    numbers = [apart[0] / FIRST_LOSS, max(apart) / LOSSES, errors[worst] / GRADIENT, norm / NORM]
    first, losses, gradients, norm = (x if x == x else float("inf") for x in numbers)
    return Distance(first, losses, gradients, worst, norm)


def _gradient_error(name: str, found: Trace, expected: Trace, nothing: float) -> float:
    ours, truth = found.gradients.get(name), expected.gradients.get(name)
    if ours is None or truth is None:
        present = ours if ours is not None else truth
        assert present is not None
        return float(present.double().norm()) / nothing
    return relative(ours, truth, nothing)


def is_rounding(found: Trace, single: Trace, exact: Trace) -> bool:
    """Whether the ranks are about as far from fp64 as the single process is."""
    ours, theirs = distance(found, exact), distance(single, exact)
    pairs = [
        (ours.first_loss, theirs.first_loss),
        (ours.losses, theirs.losses),
        (ours.gradients, theirs.gradients),
        (ours.norm, theirs.norm),
    ]
    return all(mine <= max(1.0, ROUNDING * own) for mine, own in pairs)
