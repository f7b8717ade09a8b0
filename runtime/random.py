"""Dropout whose mask is a function of a seed: neither the order of calls nor recomputation changes it.

`dropout` saves nothing: the backward pass draws the mask again. `sdpa` seeds torch's default generator for the
duration of the call (attention kernels draw from it) and puts its state back. Seeds have up to 63 bits (Context.seed);
the seed OFF turns dropout off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

OFF = -1
"""The seed of a dropout that is turned off."""


def _dropped(x: Tensor, p: float, seed: int) -> Tensor:
    """x with a share p of entries zeroed, the others scaled up."""
    generator = torch.Generator(device=x.device).manual_seed(seed)
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)
    return (x * (1 / (1 - p))).masked_fill_(keep.logical_not_(), 0)


class _Dropout(torch.autograd.Function):
    """The map is diagonal: its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        return _dropped(x, p, seed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _dropped(grads[0], ctx.p, ctx.seed), None, None


_dropout: Callable[..., Tensor] = _Dropout.apply


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """x with each entry zeroed with probability p, the others divided by 1 - p."""
    if p == 0 or seed == OFF:
        return x
    if p == 1:
        return x * 0
    return _dropout(x, p, seed)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """torch's default generator of `device` starts at `seed`, and has its state back afterwards."""
    if device.type == "cpu":
        generator = torch.default_generator
    else:
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: int | None = None,
) -> Tensor:
    """torch's scaled_dot_product_attention; dropout needs a seed."""
    if dropout_p == 0 or seed == OFF:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if seed is None:
        raise ValueError(f"sdpa with dropout_p={dropout_p} needs a seed")
    with seeded(query.device, seed):
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
