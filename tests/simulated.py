"""Several ranks of one mesh axis as threads of one process.

    results = run_ranks(3, lambda axis: ops.convert(x[axis.index], axis, "P -> I"))

Each thread runs its own forward and backward; collectives meet at a barrier. The lowest rank's error is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.runtime.axes import Axis, Pending, done

Result = TypeVar("Result")


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that autograd saves meanwhile."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


class Meeting:
    """Where ranks lay down tensors and read the others'."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.places: list[Tensor | None] = [None] * size

    def exchange(self, index: int, x: Tensor) -> list[Tensor]:
        """Every rank's x, by rank."""
        self.places[index] = x
        self.barrier.wait()
        seen = [place.clone() for place in self.places if place is not None]
        self.barrier.wait()
        return seen


class SimulatedAxis(Axis):
    """An axis whose ranks are threads. `log` has the collectives of this rank in order."""

    def __init__(self, name: str, size: int, index: int, meeting: Meeting) -> None:
        super().__init__(name, size, index)
        self.meeting = meeting
        self.log: list[str] = []

    def _all(self, collective: str, x: Tensor) -> list[Tensor]:
        assert x.is_contiguous(), f"{collective} of a tensor that is not contiguous"
        self.log.append(collective)
        return self.meeting.exchange(self.index, x)

    def _start_reduce(self, x: Tensor, reduction: str) -> Pending:
        stacked = torch.stack(self._all("all-reduce", x))
        return done(x.copy_(stacked.sum(0) if reduction == "sum" else stacked.amax(0)))

    def _start_gather(self, x: Tensor) -> Pending:
        return done(torch.stack(self._all("all-gather", x)))

    def _start_scatter(self, stacked: Tensor) -> Pending:
        return done(torch.stack([x[self.index] for x in self._all("reduce-scatter", stacked)]).sum(0))

    def _start_exchange(self, stacked: Tensor) -> Pending:
        return done(torch.stack([x[self.index] for x in self._all("all-to-all", stacked)]))

    def _start_exchange_rows(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        counts = self.meeting.exchange(self.index, torch.tensor(send))
        everyone = self._all("exchange-rows", x)
        parts = [y.split(c.tolist())[self.index] for y, c in zip(everyone, counts, strict=True)]
        assert [len(part) for part in parts] == list(receive), "what is received is not what was announced"
        return done(torch.cat(parts))


def run_ranks(size: int, body: Callable[[SimulatedAxis], Result], name: str = "tp") -> list[Result]:
    """body(axis) on every rank of an axis; the results by rank."""
    meeting = Meeting(size)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def rank(index: int) -> None:
        try:
            results[index] = body(SimulatedAxis(name, size, index, meeting))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            errors[index] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = [e for _, e in sorted(errors.items()) if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (causes or list(errors.values()))[0]
    return [results[index] for index in range(size)]
