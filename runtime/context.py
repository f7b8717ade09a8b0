"""`rt` and `w` of an emitted program: what a rank is, and its parameters.

    rt.axis("tp")                   the rank's place on a mesh axis
    rt.seed(index, site, ("tp",))   seed of one dropout: layer index, site in the layer, axes that shard the tensor
    rt.layer(fn, w, x, ...)         fn(rt, w, x, ...): a layer
    rt.segment(fn, w, x, ...)       fn(rt, w, x, ...): a part of the model that is no layer
    rt.recomputed_layer(fn, ...)    as rt.layer, and run again in the backward pass
    rt.recompute(fn, w, x, ...)     fn(rt, w, x, ...), run again in the backward pass: some ops of a layer
    rt.device                       where constants are made
    w.at("model.layers.0.")["mlp.up_proj.weight"]

A seed is a function of the plan's seed, step, micro-batch, data-parallel coordinate, coordinates on the sharded axes,
index and site, mixed by splitmix64 (Steele et al., OOPSLA 2014). So ranks that hold the same tensor draw the same mask,
ranks that hold different parts draw different ones, and recomputation repeats it. The engine sets `step` and
`micro_batch` before each forward; what is recomputed keeps those it ran with.

Of what is recomputed autograd keeps the tensors that it is called with, and nothing that is made inside (Chen et al., arXiv 1604.06174).
It runs again when the first of the tensors that autograd would have kept is asked for; its collectives then run again too. All members
of a group have the same programs, whose backwards have the same order, so they come to these collectives in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright.plans.mesh import AXES
from meshwright.runtime.axes import Axis
from meshwright.runtime.random import OFF

MASK = (1 << 64) - 1
Result = TypeVar("Result")


def mix(values: Iterable[int]) -> int:
    """63 bits from integers, in order."""
    return reduce(_mix, values, 0) >> 1


def _mix(state: int, value: int) -> int:
    """One splitmix64 step."""
    z = ((state ^ value) + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _recomputed(fn: Callable[..., Result], *args: object) -> Result:
    """fn(*args), run again in the backward pass."""
    result: Result = checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
    return result


class Segments(Protocol):
    """What wants to know where a forward is (runtime.residency)."""

    def enter(self) -> None:
        """A segment begins."""

    def leave(self, outputs: object) -> None:
        """A segment ends."""


class Context:
    """A rank's axes, device and place in the run."""

    def __init__(
        self,
        axes: Mapping[str, Axis],
        device: torch.device | str,
        seed: int = 0,
        dropout: bool = True,
    ) -> None:
        self.axes = dict(axes)
        self.device = torch.device(device)
        self.plan_seed = seed
        self.dropout = dropout
        self.step = 0
        self.micro_batch = 0
        self.loss_scale = 1.0
        """What backwards start from: above 1 in fp16 (runtime.loss_scale)."""
        self.segments: Segments | None = None
        """Told when a layer or another segment begins and ends."""
        self.on_keep: Callable[[Tensor], object] | None = None
        """Told of each tensor that something recomputed keeps: autograd's hooks do not see those."""

    def axis(self, name: str) -> Axis:
        """The mesh axis `name`."""
        if name not in self.axes:
            raise ValueError(f"unknown mesh axis {name!r}; the axes are {', '.join(self.axes)}")
        return self.axes[name]

    def seed(self, index: int, site: int, sharded_axes: tuple[str, ...] = ()) -> int:
        """Seed of one random op of this micro-batch; see the module. OFF when dropout is off."""
        if not self.dropout:
            return OFF
        place = [self.plan_seed, self.step, self.micro_batch, self.axis("dp").index]
        for name in sorted(sharded_axes):
            place += [AXES.index(name) + 1, self.axis(name).index]
        return mix([*place, 0, index, site])

    def layer(self, fn: Callable[..., Result], weights: Weights, *args: object) -> Result:
        """fn(rt, weights, *args)."""
        return self._segment(lambda: fn(self, weights, *args))

    def recomputed_layer(self, fn: Callable[..., Result], weights: Weights, *args: object) -> Result:
        """fn(rt, weights, *args), of which autograd keeps the tensor arguments alone."""
        return self._segment(lambda: self.recompute(fn, weights, *args))

    def recompute(self, fn: Callable[..., Result], weights: Weights, *args: object) -> Result:
        """The same for some ops of a layer."""
        here = copy.copy(self)
        if not torch.is_grad_enabled():
            return fn(here, weights, *args)
        if self.on_keep is not None:
            for kept in args:
                if isinstance(kept, Tensor):
                    self.on_keep(kept)
        return _recomputed(fn, here, weights, *args)

    def segment(self, fn: Callable[..., Result], weights: Weights, *args: object) -> Result:
        """fn(rt, weights, *args)."""
        return self._segment(lambda: fn(self, weights, *args))

    def _segment(self, run: Callable[[], Result]) -> Result:
        if self.segments is None:
            return run()
        self.segments.enter()
        result = run()
        self.segments.leave(result)
        return result


class Weights:
    """This rank's parameters under a prefix of the model's own names."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        self._tensors = tensors
        self._prefix = prefix

    def at(self, prefix: str) -> Weights:
        """The parameters whose names go on with `prefix` ("model.layers.0.")."""
        return Weights(self._tensors, self._prefix + prefix)

    def __getitem__(self, name: str) -> Tensor:
        path = self._prefix + name
        if path not in self._tensors:
            raise KeyError(f"this stage holds no parameter {path}")
        return self._tensors[path]
