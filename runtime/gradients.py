"""A rank's parameters and their gradients, flat: one buffer each, so that a step needs few collectives and kernels.

Every trainable parameter is a view of `values`, its `.grad` a view of `gradients`, into which autograd accumulates in
FP32 over the micro-batches. After the last backward `reduce` completes the gradients by plain sums, in place:

    over an axis on which the parameter is R   each rank's gradient is partial (a norm under sequence parallelism)
    over the stages that hold it               a tied parameter
    over dp and cp                             every parameter, but that one that is S on ep is summed only over the part of dp
                                               that holds the same slice; losses are already divided by the global count

The order in the buffers makes what is summed together adjacent: parameters are sorted by (stages of a tied one, whether
S on ep, type on tp), so each sum is one or two all-reduces of a contiguous run. The global gradient norm counts every element of the
model once: each rank adds the squares of what it is an owner of (runtime.placement).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.axes import Axis, Pending
from meshwright.runtime.placement import LAYOUT_AXES, REPLICAS, Parameter, Placement

ALIGNMENT = 16
"""Elements that a view's offset is a multiple of: 64 bytes."""
BLOCK = 1 << 22
"""Elements that one sum over ranks takes."""
ROW = 4096
"""Elements whose squares are summed in FP32, before FP64."""


@dataclass(frozen=True)
class Span:
    """A parameter's place in the flat buffers; `stop` includes the padding to ALIGNMENT."""

    parameter: Parameter
    shape: tuple[int, ...]
    start: int
    stop: int


def _order(parameter: Parameter) -> tuple[tuple[int, ...], bool, int]:
    """Sort key of the flat buffers: slices on ep first, tied ones last. R is next to R: last of what is not tied, first of
    what is."""
    by_type = "ISR".index(parameter.layout.on("tp").kind)
    whole = parameter.layout.on("ep").kind != "S"
    return (parameter.stages, not whole, -by_type) if len(parameter.stages) > 1 else ((), whole, by_type)


class FlatParameters:
    """The parameters of one rank. `tensors` are what programs get, by name: leaves that share memory with `values`."""

    def __init__(self, placement: Placement, device: torch.device) -> None:
        self.spans: list[Span] = []
        stop = 0
        for parameter in sorted((p for p in placement.held if p.trainable), key=_order):
            start, shape = stop, placement.local_shape(parameter)
            stop += -(-torch.Size(shape).numel() // ALIGNMENT) * ALIGNMENT
            self.spans.append(Span(parameter, shape, start, stop))
        self.values = torch.zeros(stop, device=device)
        self.gradients = torch.zeros(stop, device=device)
        self.frozen = {
            p.name: torch.zeros(placement.local_shape(p), device=device) for p in placement.held if not p.trainable
        }
        self.tensors: dict[str, Tensor] = self.views(self.values)
        for name, gradient in self.views(self.gradients).items():
            self.tensors[name].requires_grad_()
            self.tensors[name].grad = gradient
        self.tensors.update(self.frozen)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """By name, the trainable parameters' places in a buffer as long as `values`."""
        return {s.parameter.name: flat[s.start : s.stop][: prod(s.shape)].view(s.shape).detach() for s in self.spans}

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + sum(tensor.nbytes for tensor in self.frozen.values())

    def runs(self, belongs: Callable[[Parameter], bool]) -> list[tuple[int, int]]:
        """[start, stop) of the longest runs of the buffers whose parameters all belong."""
        found: list[tuple[int, int]] = []
        for span in (s for s in self.spans if belongs(s.parameter)):
            if found and found[-1][1] == span.start:
                found[-1] = (found[-1][0], span.stop)
            else:
                found.append((span.start, span.stop))
        return found

    def reduce(self, axes: Mapping[str, Axis], tied: Mapping[tuple[int, ...], dist.ProcessGroup]) -> None:
        """Completes the gradients, in place. `tied`: group of this rank and its peers on other stages, by stages."""
        for name in LAYOUT_AXES:
            self._sum_over(axes[name], lambda p, name=name: p.layout.on(name).kind == "R")  # type: ignore[misc]
        for stages, group in sorted(tied.items(), key=lambda item: item[0]):
            self._sum(group, lambda p, stages=stages: p.stages == stages)  # type: ignore[misc]
        for name in REPLICAS:
            self._sum_over(axes[name], lambda p, name=name: name in p.replica_axes)  # type: ignore[misc]

    def _sum_over(self, axis: Axis, belongs: Callable[[Parameter], bool]) -> None:
        """In blocks, two at a time: a sum may need a buffer of its size."""
        pending: deque[Pending] = deque()
        for start, stop in self.runs(belongs) if axis.size > 1 else ():
            for part in self.gradients[start:stop].split(BLOCK):
                if len(pending) == 2:
                    pending.popleft().wait()
                pending.append(axis.start_all_reduce(part, in_place=True))
        for last in pending:
            last.wait()

    def _sum(self, group: dist.ProcessGroup, belongs: Callable[[Parameter], bool]) -> None:
        parts = [self.gradients[start:stop] for start, stop in self.runs(belongs)]
        works = [dist.all_reduce(part, group=group, async_op=True) for part in parts]
        for work in works:
            if work is not None:
                work.wait()

    def square_sum(self, owned: Collection[str]) -> Tensor:
        """FP64 scalar: squares of the gradients of the parameters named."""
        total = torch.zeros((), dtype=torch.float64, device=self.gradients.device)
        for start, stop in self.runs(lambda p: p.name in owned):
            total += _square_sum(self.gradients[start:stop])
        return total


def _square_sum(x: Tensor) -> Tensor:
    """Sum of squares: FP32 within rows, FP64 between them, in one pass over x."""
    whole = x.numel() - x.numel() % ROW
    norms = torch.linalg.vector_norm(x[:whole].view(-1, ROW), dim=1)
    total: Tensor = norms.double().square().sum() + torch.linalg.vector_norm(x[whole:]).double().square()
    return total


def clip_scale(clip: float | None, norm: float) -> float:
    """What torch.nn.utils.clip_grad_norm_ multiplies gradients by."""
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
