"""Mesh axes as a rank sees them: the collectives, as pure tensor functions that know nothing of autograd.

Terms
    Axis      this rank's place on one mesh axis: `name`, `size`, `index`, and the collectives along it
    Pending   a collective that has started; `wait()` gives its result. Every collective has a `start_` form
    stacked   a tensor (n, ...) whose entry r along the new leading dim belongs to rank r of n

Inputs are never written (but by `start_all_reduce(..., in_place=True)`), results are contiguous. `sections` are those
of `plans.layout` (global sizes): each rank holds its slice of every section, so a gather interleaves and a scatter
takes a slice of each. An axis of one rank does nothing.

    TrivialAxis   one rank
    ProcessAxis   a torch.distributed process group (gloo, NCCL)
    PairAxis      the same for two ranks of gloo, where a sum is one message each way

runtime.dry_axes has one more, for shapes only.

A subclass of Axis implements four primitives on contiguous tensors, with the ranks along a leading dim: no copy is
made where the dim already leads. A fifth moves as many rows (entries of dim 0) from each rank to each as both know of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plans.mesh import AXES, EXPERT_REPLICAS, Mesh

Counts = tuple[tuple[int, ...], ...]
"""Per rank of an axis, the number of rows in each of its sections."""

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class Pending:
    """A collective that has started. `wait` may be called once."""

    wait: Callable[[], Tensor]

    def then(self, change: Callable[[Tensor], Tensor]) -> Pending:
        """The same collective, its result changed once it is there."""
        return Pending(lambda: change(self.wait()))


def done(x: Tensor) -> Pending:
    """A collective that had nothing to do."""
    return Pending(lambda: x)


def _widths(length: int, sections: Sequence[int], ranks: int, asked: str) -> list[int]:
    """Entries that one rank holds of every section of a dim of `length`; ValueError when a section does not divide."""
    parts = list(sections) or [length]
    if sum(parts) != length:
        raise ValueError(f"{asked}: sections {'+'.join(map(str, parts))} do not add up to the dim's {length}")
    for part in parts:
        if part % ranks:
            raise ValueError(f"{asked}: {part} does not divide by {ranks} ranks")
    return [part // ranks for part in parts]


def stack_shards(x: Tensor, dim: int, ranks: int, sections: Sequence[int] = ()) -> Tensor:
    """(..., d, ...) -> stacked (ranks, ..., d / ranks, ...), contiguous: each rank's shard along dim."""
    widths = _widths(x.shape[dim], sections, ranks, f"splitting dim {dim} of {tuple(x.shape)}")
    parts = torch.split(x, [width * ranks for width in widths], dim)
    stacked = [torch.unflatten(part, dim, (ranks, -1)).movedim(dim, 0) for part in parts]
    return stacked[0].contiguous() if len(stacked) == 1 else torch.cat(stacked, dim + 1)


def join_shards(stacked: Tensor, dim: int, sections: Sequence[int] = ()) -> Tensor:
    """Inverse of stack_shards: (ranks, ..., d / ranks, ...) -> (..., d, ...), contiguous."""
    ranks = stacked.shape[0]
    if len(sections) < 2:
        return stacked.movedim(0, dim).flatten(dim, dim + 1).contiguous()
    length = ranks * stacked.shape[dim + 1]
    widths = _widths(length, sections, ranks, f"joining dim {dim} of {ranks} shards {tuple(stacked.shape[1:])}")
    parts = torch.split(stacked, widths, dim + 1)
    return torch.cat([shard for part in parts for shard in part.unbind(0)], dim)


def take_shard(x: Tensor, dim: int, ranks: int, index: int, sections: Sequence[int] = ()) -> Tensor:
    """This rank's slice of x along dim, as a copy (so that it does not keep x alive)."""
    widths = _widths(x.shape[dim], sections, ranks, f"slicing dim {dim} of {tuple(x.shape)}")
    slices = []
    start = 0
    for width in widths:
        slices.append(x.narrow(dim, start + index * width, width))
        start += ranks * width
    return slices[0].clone(memory_format=torch.contiguous_format) if len(slices) == 1 else torch.cat(slices, dim)


class Axis(ABC):
    """One rank's place on a mesh axis, and the collectives along it."""

    def __init__(self, name: str, size: int, index: int) -> None:
        if not 0 <= index < size:
            raise ValueError(f"axis {name} has ranks 0 to {size - 1}, not {index}")
        self.name = name
        self.size = size
        self.index = index

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name} {self.index}/{self.size})"

    @abstractmethod
    def _start_reduce(self, x: Tensor, reduction: str) -> Pending:
        """Reduce x over all ranks, in place."""

    @abstractmethod
    def _start_gather(self, x: Tensor) -> Pending:
        """x of every rank, stacked."""

    def _start_gather_into(self, out: Tensor, x: Tensor) -> Pending:
        """x of every rank, into `out`."""
        return self._start_gather(x).then(lambda stacked: out.copy_(stacked.view(-1)))

    @abstractmethod
    def _start_scatter(self, stacked: Tensor) -> Pending:
        """This rank's entry of the sum over all ranks."""

    @abstractmethod
    def _start_exchange(self, stacked: Tensor) -> Pending:
        """Entry r goes to rank r; stacked by sender."""

    @abstractmethod
    def _start_exchange_rows(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """The next send[r] rows of x go to rank r; the receive[r] rows from each rank r, joined by sender."""

    def start_all_reduce(self, x: Tensor, reduction: str = "sum", in_place: bool = False) -> Pending:
        """Sum (or "max") over the ranks. `in_place`: x is contiguous, the caller's own, and is overwritten."""
        if self.size == 1:
            return done(x)
        return self._start_reduce(x if in_place else x.clone(memory_format=torch.contiguous_format), reduction)

    def start_all_gather(self, x: Tensor, dim: int, sections: Sequence[int] = ()) -> Pending:
        """Shards along `dim` to the whole."""
        if self.size == 1:
            return done(x)
        return self._start_gather(x.contiguous()).then(lambda stacked: join_shards(stacked, dim, sections))

    def start_gather_into(self, out: Tensor, x: Tensor) -> Pending:
        """x (n) of every rank, one after the other in `out` (size n), the caller's own; x may be this rank's part of it."""
        if self.size == 1:
            return done(out if out.data_ptr() == x.data_ptr() else out.copy_(x))
        return self._start_gather_into(out, x)

    def start_reduce_scatter(self, x: Tensor, dim: int, sections: Sequence[int] = ()) -> Pending:
        """This rank's shard along `dim` of the sum over the ranks."""
        if self.size == 1:
            return done(x)
        return self._start_scatter(stack_shards(x, dim, self.size, sections))

    def start_all_to_all(
        self,
        x: Tensor,
        split_dim: int,
        concat_dim: int,
        split_sections: Sequence[int] = (),
        concat_sections: Sequence[int] = (),
    ) -> Pending:
        """A shard along `concat_dim` to a shard along `split_dim`, another dim."""
        if self.size == 1:
            return done(x)
        if split_dim == concat_dim:
            raise ValueError(f"all-to-all over {self.name} splits and joins the same dim {split_dim}")
        received = self._start_exchange(stack_shards(x, split_dim, self.size, split_sections))
        return received.then(lambda stacked: join_shards(stacked, concat_dim, concat_sections))

    def start_exchange_rows(self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Pending:
        """An uneven all-to-all: (sum of send_counts, ...) -> (sum of recv_counts, ...).

        Rows of x lie by the rank they go to, rows of the result by the rank they come from. What rank a sends to b is
        what b receives from a; a count may be 0. ValueError when the counts are not one per rank, or not x's rows.
        """
        if len(send_counts) != self.size or len(recv_counts) != self.size:
            raise ValueError(f"exchange over {self.name}={self.size} with {len(send_counts)} and {len(recv_counts)} counts")
        if sum(send_counts) != x.shape[0]:
            raise ValueError(f"exchange over {self.name} of {x.shape[0]} rows, the counts add up to {sum(send_counts)}")
        if self.size == 1:
            return done(x)
        return self._start_exchange_rows(x.contiguous(), send_counts, recv_counts)

    def exchange_counts(self, counts: Tensor, rows: int) -> tuple[Counts, Counts]:
        """What every rank sends, told to whom it is sent, on the host: (sent, received), after one read of the device.

        counts (n, k) integers: counts[r] are the numbers of rows that go to rank r, in k sections. sent[r] is
        counts[r], received[r] what rank r sends here. `rows` is how many there are in all, for a dry run to spread.
        """
        received = self._start_exchange(counts.contiguous()).wait()
        sent, came = torch.stack([counts, received]).tolist()
        return tuple(map(tuple, sent)), tuple(map(tuple, came))

    def all_reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        """start_all_reduce, waited for."""
        return self.start_all_reduce(x, reduction).wait()

    def all_gather(self, x: Tensor, dim: int, sections: Sequence[int] = ()) -> Tensor:
        """start_all_gather, waited for."""
        return self.start_all_gather(x, dim, sections).wait()

    def reduce_scatter(self, x: Tensor, dim: int, sections: Sequence[int] = ()) -> Tensor:
        """start_reduce_scatter, waited for."""
        return self.start_reduce_scatter(x, dim, sections).wait()

    def all_to_all(
        self,
        x: Tensor,
        split_dim: int,
        concat_dim: int,
        split_sections: Sequence[int] = (),
        concat_sections: Sequence[int] = (),
    ) -> Tensor:
        """start_all_to_all, waited for."""
        return self.start_all_to_all(x, split_dim, concat_dim, split_sections, concat_sections).wait()


class TrivialAxis(Axis):
    """An axis of one rank."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 1, 0)

    def _start_reduce(self, x: Tensor, reduction: str) -> Pending:
        return done(x)

    def _start_gather(self, x: Tensor) -> Pending:
        return done(x.unsqueeze(0))

    def _start_scatter(self, stacked: Tensor) -> Pending:
        return done(stacked.squeeze(0))

    def _start_exchange(self, stacked: Tensor) -> Pending:
        return done(stacked)

    def _start_exchange_rows(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return done(x)


class ProcessAxis(Axis):
    """An axis over a process group; `ranks` are the group's global ranks, in order of their coordinate."""

    def __init__(self, name: str, group: dist.ProcessGroup, ranks: tuple[int, ...], index: int) -> None:
        super().__init__(name, len(ranks), index)
        self.group = group
        self.ranks = ranks

    def _start_reduce(self, x: Tensor, reduction: str) -> Pending:
        return _started(dist.all_reduce(x, op=REDUCTIONS[reduction], group=self.group, async_op=True), x)

    def _start_gather(self, x: Tensor) -> Pending:
        out = x.new_empty((self.size, *x.shape))
        return _started(dist.all_gather_single(_flat(out), _flat(x), group=self.group, async_op=True), out)

    def _start_gather_into(self, out: Tensor, x: Tensor) -> Pending:
        return _started(dist.all_gather_single(out, x, group=self.group, async_op=True), out)

    def _start_scatter(self, stacked: Tensor) -> Pending:
        out = stacked.new_empty(stacked.shape[1:])
        return _started(dist.reduce_scatter_single(_flat(out), _flat(stacked), group=self.group, async_op=True), out)

    def _start_exchange(self, stacked: Tensor) -> Pending:
        out = torch.empty_like(stacked)
        return _started(dist.all_to_all_single(_flat(out), _flat(stacked), group=self.group, async_op=True), out)

    def _start_exchange_rows(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        out = x.new_empty((sum(receive), *x.shape[1:]))
        to, of = (t.view(torch.uint8) if t.dtype == torch.bool else t for t in (out, x))
        work = dist.all_to_all_single(to, of, list(receive), list(send), group=self.group, async_op=True)
        return _started(work, out)


class PairAxis(ProcessAxis):
    """Two ranks of gloo. Each sends its part and adds what it gets: two thirds of the CPU time of gloo's own sums, which
    send twice, copy in between, and make a reduce-scatter of an all-reduce. Both ranks get the same bits: a + b = b + a."""

    def _start_swap(self, out: Tensor, x: Tensor) -> Pending:
        """The other rank's x, in `out`."""
        peer = self.ranks[1 - self.index]
        receive, send = dist.irecv(out, peer, self.group), dist.isend(x, peer, self.group)
        sent = _started(send, out)
        return _started(receive, out).then(lambda _: sent.wait())

    def _start_reduce(self, x: Tensor, reduction: str) -> Pending:
        if reduction != "sum":
            return super()._start_reduce(x, reduction)
        return self._start_swap(torch.empty_like(x), x).then(x.add_)

    def _start_gather_into(self, out: Tensor, x: Tensor) -> Pending:
        both = out.view(2, -1)
        if both[self.index].data_ptr() != x.data_ptr():
            both[self.index].copy_(x)
        return self._start_swap(both[1 - self.index], x).then(lambda _: out)

    def _start_scatter(self, stacked: Tensor) -> Pending:
        out = torch.empty_like(stacked[0])
        return self._start_swap(out, stacked[1 - self.index]).then(lambda other: other.add_(stacked[self.index]))


def _flat(x: Tensor) -> Tensor:
    """One dim, and bytes instead of bool (which gloo does not know): all that moving data needs."""
    flat = x.view(-1)
    return flat.view(torch.uint8) if x.dtype == torch.bool else flat


def _started(work: dist.Work | None, out: Tensor) -> Pending:
    """The result `out` of `work`, which keeps its operands alive."""

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return out

    return Pending(wait)


def build_axes(mesh: Mesh, rank: int, timeout: timedelta | None = None) -> dict[str, Axis]:
    """This rank's axes over process groups, EXPERT_REPLICAS among them. Every rank of an initialised torch.distributed
    calls it once, alike.

    Groups are made in the same order on all ranks; equal groups (ep and dp when ep = dp) are made once, and the
    world is used as it is. A rank that waits longer than `timeout` for its peers gives up (torch's default: 30 minutes).
    """
    world = tuple(range(mesh.world_size))
    if mesh.world_size > 1 and mesh.world_size != dist.get_world_size():
        raise ValueError(f"mesh {mesh} has {mesh.world_size} ranks, but {dist.get_world_size()} processes were started")
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    if dist.is_initialized() and dist.group.WORLD is not None:
        groups[world] = dist.group.WORLD
    axes: dict[str, Axis] = {}
    for name in (*AXES, EXPERT_REPLICAS):
        if mesh.size(name) == 1:
            axes[name] = TrivialAxis(name)
            continue
        for ranks in mesh.groups(name):
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        own = mesh.group(rank, name)
        pair = len(own) == 2 and dist.get_backend(groups[own]) == "gloo"
        axes[name] = (PairAxis if pair else ProcessAxis)(name, groups[own], own, own.index(rank))
    return axes
