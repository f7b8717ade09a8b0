"""What a step is told by: loss and gradient norm over all ranks, and the error for those that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.buckets import Arrangement
from meshwright.runtime.gradients import FlatParameters

Sums = Callable[[], tuple[float, float]]
"""Waits for loss and squared gradient norm over all ranks."""


@dataclass(frozen=True)
class Metrics:
    """Of one step, the same on every rank. `loss` is the mean over the global batch's targets, `grad_norm` is before
    clipping, `tokens` are the entries of the global batch's first input, `step` counts steps. In fp16 `loss_scale` is the one that the
    step ran with; a `skipped` step overflowed and updated nothing."""

    loss: float
    grad_norm: float
    tokens: int
    step: int
    loss_scale: float = 1.0
    skipped: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether the step may update."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class LateMetrics(Metrics):
    """Of a step without a flush (runtime.stale): `loss` waits for the batch's last stage when it is first read, on the rank that reads
    it. `grad_norm` is that of the update which the step made, with the gradients of the batch before; 0 when it made none."""

    def __init__(self, wait_for_loss: Callable[[], float], grad_norm: float, tokens: int, step: int) -> None:
        for name, value in (("_wait", wait_for_loss), ("grad_norm", grad_norm), ("tokens", tokens), ("step", step)):
            object.__setattr__(self, name, value)

    @cached_property
    def loss(self) -> float:
        wait: Callable[[], float] = self.__dict__["_wait"]
        return wait()


class NonFiniteError(ArithmeticError):
    """A step's loss or gradients have a NaN or an infinity. Raised on every rank, before the update."""


class Totals:
    """Sums over all ranks, bitwise the same on each. With `timeout_s` they have a process group of their own: without a flush ranks come to
    tied sums and to these in different orders."""

    def __init__(self, arrangement: Arrangement, timeout_s: float | None) -> None:
        placement = arrangement.placement
        self._world_size = placement.mesh.world_size
        self._counts_loss = placement.at["tp"] == 0
        self._counted = {p.name for p in placement.held if arrangement.counts(p, placement.rank)}
        self._group = None if timeout_s is None else dist.new_group(timeout=timedelta(seconds=timeout_s))

    def start(self, flat: FlatParameters, loss: Tensor) -> Sums:
        """Starts to add up the global loss and the squared gradient norm, in FP64; what is returned waits."""
        wait = self._start(torch.stack([self._own(loss), flat.square_sum(self._counted)]))

        def both() -> tuple[float, float]:
            total_loss, total_square = wait()
            return total_loss, total_square

        return both

    def start_loss(self, loss: Tensor) -> Callable[[], float]:
        """The same of the loss alone."""
        wait = self._start(self._own(loss)[None])
        return lambda: wait()[0]

    def non_finite(self, flat: FlatParameters) -> str:
        """Where the first gradient with a NaN or an infinity is, the same on every rank; "" when there is none."""
        found = sorted(name for name, part in flat.gradient_parts().items() if not part.isfinite().all())
        everyone: list[list[str]] = [[]] * self._world_size
        dist.all_gather_object(everyone, found[:1], group=self._group)
        return next((f"; rank {rank} has one in the gradient of {names[0]}" for rank, names in enumerate(everyone) if names), "")

    def _own(self, loss: Tensor) -> Tensor:
        """What this rank adds to the global loss."""
        return loss if self._counts_loss else torch.zeros_like(loss)

    def _start(self, values: Tensor) -> Callable[[], list[float]]:
        work = dist.all_reduce(values, group=self._group, async_op=True) if self._world_size > 1 else None

        def wait() -> list[float]:
            if work is not None:
                work.wait()
            found: list[float] = values.tolist()
            return found

        return wait
