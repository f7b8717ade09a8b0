"""Optimizers on what a rank updates of its flat parameters (runtime.gradients.Chunk), in place: torch's own, fused, one call per step;
on GPUs AdamW is a kernel of ours (runtime.kernels.adamw).

OPTIMIZERS has their options with defaults (torch's); `clip` is the largest global gradient norm, None for no clipping. `groups`
are settings of their own for parameters by name, the first that matches counts:

    {"name": "adamw", "weight_decay": 0.1, "groups": [{"match": ["*.bias", "*norm*"], "weight_decay": 0.0, "lr_scale": 0.5}]}

`loss_scale` is of plans in fp16: {"initial": 65536, "growth": 2, "backoff": 0.5, "interval": 2000} (runtime.loss_scale).

States are flat buffers of as many elements as the rank updates, so that each parameter has its place in them. Gradients of 16 bits
(`--reduce-dtype bf16` of a 16-bit plan) are widened for the update, BLOCK elements at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.runtime.gradients import BLOCK, Chunk
from meshwright.runtime.kernels import ENABLED
from meshwright.runtime.loss_scale import DEFAULT, ScaleOptions, read_scale_options

if ENABLED:
    from meshwright.runtime.kernels import adamw as kernels

Option = float | tuple[float, float] | None

OPTIMIZERS: Mapping[str, Mapping[str, Option]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "clip": None},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "clip": None},
}
STATES: Mapping[str, tuple[str, ...]] = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


@dataclass(frozen=True)
class Group:
    """Parameters with names that match one of some shell patterns; a learning rate of `lr_scale` times the others'."""

    match: tuple[str, ...]
    lr_scale: float = 1.0
    weight_decay: float | None = None

    def has(self, name: str) -> bool:
        """Whether a parameter is matched."""
        return any(fnmatchcase(name, pattern) for pattern in self.match)


@dataclass(frozen=True)
class OptimizerOptions:
    """Checked options: `values` are those of OPTIMIZERS[name]. Group 0 is of all that no other matches."""

    name: str
    lr: float
    clip: float | None
    values: Mapping[str, Option]
    groups: tuple[Group, ...] = (Group(("*",)),)
    loss_scale: ScaleOptions = DEFAULT

    def group_of(self, name: str) -> int:
        """Number of a parameter's group."""
        return next((i for i, group in enumerate(self.groups[1:], 1) if group.has(name)), 0)

    def check_groups(self, names: Collection[str]) -> None:
        """InputError for a pattern that no parameter's name matches."""
        for i, group in enumerate(self.groups[1:]):
            for pattern in group.match:
                if not any(fnmatchcase(name, pattern) for name in names):
                    example = next(iter(names), "")
                    raise InputError(f"optimizer.groups[{i}].match: {pattern!r} matches no parameter such as {example}")


def read_options(given: Mapping[str, object]) -> OptimizerOptions:
    """Options from a user's {"name": "adamw", "lr": 1e-3, ...}; InputError names what is wrong."""
    name = given.get("name")
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise InputError(f"optimizer.name: found {name!r}, expected one of {', '.join(OPTIMIZERS)}")
    values: dict[str, Option] = dict(OPTIMIZERS[name])
    for key, value in given.items():
        if key in ("name", "groups", "loss_scale"):
            continue
        if key not in values:
            raise InputError(f"optimizer.{key}: unknown option; the options of {name} are {', '.join(values)}, groups, loss_scale")
        values[key] = _betas(value) if key == "betas" else _number(key, value)
    lr, clip = values.pop("lr"), values.pop("clip")
    if not isinstance(lr, float):
        raise InputError(f"optimizer.lr: found {lr!r}, expected a number of 0 or more")
    groups = (Group(("*",)), *_groups(given.get("groups", ())))
    scale = read_scale_options(given.get("loss_scale", {}))
    return OptimizerOptions(name, lr, clip if isinstance(clip, float) else None, values, groups, scale)


def _groups(given: object) -> Iterator[Group]:
    if not isinstance(given, (list, tuple)):
        raise InputError(f"optimizer.groups: found {given!r}, expected a list such as [{{'match': '*.bias', 'weight_decay': 0.0}}]")
    for i, group in enumerate(given):
        where = f"groups[{i}]"
        if not isinstance(group, Mapping) or not set(group) <= {"match", "lr_scale", "weight_decay"} or "match" not in group:
            raise InputError(f"optimizer.{where}: found {group!r}, expected match, and lr_scale or weight_decay")
        patterns = (group["match"],) if isinstance(group["match"], str) else tuple(group["match"])
        scale = _number(f"{where}.lr_scale", group.get("lr_scale", 1.0))
        decay = _number(f"{where}.weight_decay", group["weight_decay"]) if "weight_decay" in group else None
        yield Group(patterns, 1.0 if scale is None else scale, decay)


def _number(key: str, value: object) -> float | None:
    if key == "clip" and value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise InputError(f"optimizer.{key}: found {value!r}, expected a number of 0 or more")
    if key == "clip" and value == 0:
        raise InputError("optimizer.clip: found 0, expected a number above 0, or None for no clipping")
    return float(value)


def _betas(value: object) -> tuple[float, float]:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        first, second = value
        if all(isinstance(b, (int, float)) and 0 <= b < 1 for b in (first, second)):
            return float(first), float(second)
    raise InputError(f"optimizer.betas: found {value!r}, expected two numbers in [0, 1) such as (0.9, 0.95)")


class Optimizer:
    """Updates the values of `chunks`, of `num_own` elements in all. `states` by name: flat, zero at first, unless they are given,
    to be shared."""

    def __init__(
        self,
        options: OptimizerOptions,
        chunks: Sequence[Chunk],
        num_own: int,
        device: torch.device,
        states: dict[str, Tensor] | None = None,
    ) -> None:
        self.options = options
        names = STATES[options.name] if options.values.get("momentum", 1.0) else ()
        self.states = {name: torch.zeros(num_own, device=device) for name in names} if states is None else states
        self._steps: list[Tensor] = []
        self._num_steps = 0
        self._chunks = [chunk for chunk in chunks if chunk.values.numel()]
        self._by_kernel = ENABLED and options.name == "adamw" and device.type == "cuda"
        self._torch: list[torch.optim.Optimizer] = []
        self._narrow: list[tuple[torch.optim.Optimizer, Tensor, Tensor]] = []
        if self._by_kernel or not self._chunks:
            return
        if self._chunks[0].gradients.dtype == self._chunks[0].values.dtype:
            self._torch.append(self._build(self._chunks))
            return
        for piece in _pieces(self._chunks):
            built = self._build([piece])
            (value,) = built.param_groups[0]["params"]
            self._narrow.append((built, value, piece.gradients))

    def step(self, lr: float) -> None:
        """One update with this learning rate."""
        for built in (*self._torch, *(built for built, _, _ in self._narrow)):
            for group in built.param_groups:
                group["lr"] = lr * self.options.groups[group["group"]].lr_scale
        for built in self._torch:
            built.step()
        for built, value, gradients in self._narrow:
            value.grad = gradients.to(value.dtype)
            built.step()
            value.grad = None
        if self._by_kernel:
            self._kernel_step(lr)

    def _kernel_step(self, lr: float) -> None:
        self._num_steps += 1
        for chunk in self._chunks:
            group = self.options.groups[chunk.group]
            settings = {**self.options.values, **({} if group.weight_decay is None else {"weight_decay": group.weight_decay})}
            first, second = (self.states[name][chunk.start : chunk.start + len(chunk.values)] for name in STATES["adamw"])
            rate = lr * group.lr_scale
            kernels.adamw(chunk.values, chunk.gradients, first, second, self._num_steps, rate, **settings)  # type: ignore[arg-type]

    def set_num_steps(self, steps: int) -> None:
        """How many updates the states have seen."""
        self._num_steps = steps
        for counted in self._steps:
            counted.fill_(steps)

    @property
    def num_bytes(self) -> int:
        return sum(state.nbytes for state in self.states.values())

    def _build(self, chunks: Sequence[Chunk]) -> torch.optim.Optimizer:
        values = [chunk.values.detach().requires_grad_() for chunk in chunks]
        kind = torch.optim.AdamW if self.options.name == "adamw" else torch.optim.SGD
        groups = [self._settings(i, [v for v, c in zip(values, chunks, strict=True) if c.group == i]) for i in _in_use(chunks)]
        built = kind(groups, lr=self.options.lr, fused=True, **dict(self.options.values))  # type: ignore[arg-type]
        for value, chunk in zip(values, chunks, strict=True):
            value.grad = chunk.gradients if chunk.gradients.dtype == value.dtype else None
            built.state[value].update({n: s[chunk.start : chunk.start + len(value)] for n, s in self.states.items()})
            if self.options.name == "adamw":
                self._steps.append(torch.zeros((), device=value.device))
                built.state[value]["step"] = self._steps[-1]
        return built

    def _settings(self, group: int, values: list[Tensor]) -> dict[str, object]:
        """torch's settings of a group."""
        decay = self.options.groups[group].weight_decay
        return {"params": values, "group": group, **({} if decay is None else {"weight_decay": decay})}


def _pieces(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """The chunks in runs of BLOCK elements at most."""
    for chunk in chunks:
        for low in range(0, len(chunk.values), BLOCK):
            part = slice(low, low + BLOCK)
            yield Chunk(chunk.group, chunk.values[part], chunk.gradients[part], chunk.start + low)


def _in_use(chunks: Sequence[Chunk]) -> list[int]:
    return sorted({chunk.group for chunk in chunks})
