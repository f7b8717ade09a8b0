"""Axes without processes, for FakeTensors: any number of ranks in one. Results are uninitialised; a Tally counts calls and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.plans.mesh import Mesh
from meshwright.runtime.axes import Axis, Counts, Pending, TrivialAxis, done


@dataclass
class Tally:
    """Calls and bytes of a dry run, by (axis, collective, direction).

    Bytes are those of the whole tensor on one rank: what is reduced, what is gathered, what is scattered or exchanged.
    On the wire a ring moves (n-1)/n of that, and an all-reduce twice as much.
    """

    direction: str = "forward"
    calls: dict[tuple[str, str, str], int] = field(default_factory=dict)
    num_bytes: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def add(self, axis: str, collective: str, num_bytes: int) -> None:
        """Count one call."""
        key = (axis, collective, self.direction)
        self.calls[key] = self.calls.get(key, 0) + 1
        self.num_bytes[key] = self.num_bytes.get(key, 0) + num_bytes


class DryAxis(Axis):
    """Shapes only, for FakeTensors: any number of ranks in one process."""

    def __init__(self, name: str, size: int, index: int, tally: Tally) -> None:
        super().__init__(name, size, index)
        self.tally = tally

    def _start_reduce(self, x: Tensor, reduction: str) -> Pending:
        self.tally.add(self.name, "all-reduce", x.nbytes)
        return done(x)

    def _start_gather(self, x: Tensor) -> Pending:
        self.tally.add(self.name, "all-gather", self.size * x.nbytes)
        return done(x.new_empty((self.size, *x.shape)))

    def _start_scatter(self, stacked: Tensor) -> Pending:
        self.tally.add(self.name, "reduce-scatter", stacked.nbytes)
        return done(stacked.new_empty(stacked.shape[1:]))

    def _start_exchange(self, stacked: Tensor) -> Pending:
        self.tally.add(self.name, "all-to-all", stacked.nbytes)
        return done(torch.empty_like(stacked))

    def _start_exchange_rows(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        self.tally.add(self.name, "all-to-all", x.nbytes)
        return done(x.new_empty((sum(receive), *x.shape[1:])))

    def exchange_counts(self, counts: Tensor, rows: int) -> tuple[Counts, Counts]:
        """As if routed evenly: as many rows come as go."""
        self.tally.add(self.name, "all-to-all", counts.nbytes)
        num_sections = counts.shape[1]
        share, more = divmod(rows, self.size * num_sections)
        even = [share + (i < more) for i in range(self.size * num_sections)]
        spread = tuple(tuple(even[r * num_sections : (r + 1) * num_sections]) for r in range(self.size))
        return spread, spread


def dry_axes(mesh: Mesh, rank: int, tally: Tally | None = None) -> dict[str, Axis]:
    """A rank's axes without processes, all counting into one tally."""
    counted = Tally() if tally is None else tally
    at = mesh.coordinates(rank)
    return {n: DryAxis(n, s, at[n], counted) if s > 1 else TrivialAxis(n) for n, s in mesh.sizes()}
