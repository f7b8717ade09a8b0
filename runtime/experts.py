"""Expert parallelism: whole experts on the ranks of an axis, and rows of tokens that go to their experts and come back.

Terms
    experts   E of them; rank i of the axis' n owns experts [i E/n, (i+1) E/n), its local ones
    rows      entries of dim 0. T on this rank, sorted by expert: what grouped_mm takes. T' on this rank after dispatch
    route     how many rows go from each rank to each expert: a Route

    route(offsets, axis, rows)      tells the ranks how many rows to expect; the host reads the counts once
    dispatch(x, route)              (T, ...) -> (T', ...): each row to the rank that owns its expert
    combine(y, route)               (T', ...) -> (T, ...): each row back to where it came from
    local_experts(ids, axis, E)     ids of experts, counted from this rank's first
    exchange(x, axis, split, concat)    the same for experts that all see every token: (E, T, H) -> (E/n, n T, H)

The two all-to-alls are GShard's (arXiv 2006.16668), without its fixed capacity: nothing is dropped and nothing padded, an
expert gets as many rows as chose it, or none (MegaBlocks, arXiv 2211.15841). Rows received lie by local expert, an expert's by
the rank they come from and there in their order: a fixed order, so that recomputation repeats it.

On the stacked rows of all ranks dispatch is a permutation, but for rows of no expert (from offsets[-1] on), which it drops.
Combine is its transpose: it puts rows back, and zeros for those. So each is the other's backward:

    grad x = combine(grad y)        grad y = dispatch(grad z)

An expert's weight gets its gradient from the tokens of all n ranks, as all its rows are here: no sum over the axis is left
to do, only over the ranks that own the same experts (runtime.gradients; Megatron-Core calls them expert data parallel).

On an axis of one rank all of them return their operand. Tensors of rows may have any dtype and trailing dims.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.axes import Axis, Counts


@dataclass(frozen=True, eq=False)
class Route:
    """Where the rows of one set of tokens go. `offsets` (E/n,) has the row after the last of each local expert among the
    `num_received` rows that come; of this rank's `rows` the first `num_sent` have an expert. `sent[r][e]` go to local
    expert e of rank r, `received[r][e]` come from rank r for local expert e."""

    axis: Axis
    rows: int
    offsets: Tensor
    sent: Counts = ()
    received: Counts = ()

    @property
    def num_sent(self) -> int:
        return sum(map(sum, self.sent))

    @property
    def num_received(self) -> int:
        return sum(map(sum, self.received))


def _share(num_experts: int, axis: Axis) -> int:
    """Experts per rank."""
    if num_experts % axis.size:
        raise ValueError(f"{num_experts} experts do not divide by {axis.name}={axis.size}")
    return num_experts // axis.size


def route(offsets: Tensor, axis: Axis, rows: int) -> Route:
    """Route of `rows` rows sorted by expert. offsets (E,), integers: the row after the last of each of all E experts.

    Every rank of the axis calls it: one all-to-all of E numbers. ValueError when E does not divide by the ranks, or the
    offsets do not ascend to `rows` at most.
    """
    if axis.size == 1:
        return Route(axis, rows, offsets)
    share = _share(offsets.shape[0], axis)
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    sent, received = axis.exchange_counts(counts.view(axis.size, share), rows)
    if sum(map(sum, sent)) > rows or min(chain(*sent), default=0) < 0:
        raise ValueError(f"route of {rows} rows: the experts have {list(chain(*sent))} of them")
    ends = list(accumulate(map(sum, zip(*received, strict=True))))
    return Route(axis, rows, torch.tensor(ends, dtype=offsets.dtype, device=offsets.device), sent, received)


def _transposed(counts: Counts) -> Counts:
    return tuple(zip(*counts, strict=True))


def _reorder(x: Tensor, counts: Counts) -> Tensor:
    """Rows in blocks, counts[a][b] in block (a, b): from the order by a and then b to the order by b and then a."""
    if min(len(counts), len(counts[0])) == 1:
        return x
    blocks = x.split(list(chain(*counts)))
    width = len(counts[0])
    return torch.cat([block for b in range(width) for block in blocks[b::width]])


def _dispatched(x: Tensor, route: Route) -> Tensor:
    send, receive = ([sum(part) for part in counts] for counts in (route.sent, route.received))
    rows = route.axis.start_exchange_rows(x[: route.num_sent], send, receive).wait()
    return _reorder(rows, route.received)


def _combined(y: Tensor, route: Route) -> Tensor:
    send, receive = ([sum(part) for part in counts] for counts in (route.received, route.sent))
    rows = route.axis.start_exchange_rows(_reorder(y, _transposed(route.received)), send, receive).wait()
    missing = route.rows - route.num_sent
    return rows if missing == 0 else torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])


class _Dispatch(torch.autograd.Function):
    """Saves no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _dispatched(x, route)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return combine(grads[0], ctx.route), None


class _Combine(torch.autograd.Function):
    """Saves no tensor."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _combined(y, route)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return dispatch(grads[0], ctx.route), None


class _Exchange(torch.autograd.Function):
    """Saves no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        ctx.axis, ctx.split_dim, ctx.concat_dim = axis, split_dim, concat_dim
        return axis.all_to_all(x, split_dim, concat_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grads[0], ctx.axis, ctx.concat_dim, ctx.split_dim), None, None, None


_dispatch: Callable[..., Tensor] = _Dispatch.apply
_combine: Callable[..., Tensor] = _Combine.apply
_exchange: Callable[..., Tensor] = _Exchange.apply


def dispatch(x: Tensor, route: Route) -> Tensor:
    """Rows to the ranks that own their experts: (T, ...) sorted by expert -> (T', ...) sorted by local expert.

    Every rank of the route's axis calls it. Rows of no expert (from offsets[-1] on) stay behind.
    ValueError when x has not the route's rows.
    """
    if x.shape[0] != route.rows:
        raise ValueError(f"dispatch of {x.shape[0]} rows by a route of {route.rows}")
    return x if route.axis.size == 1 else _dispatch(x, route)


def combine(y: Tensor, route: Route) -> Tensor:
    """Rows back to where dispatch took them from: (T', ...) sorted by local expert -> (T, ...) sorted by expert.

    Every rank of the route's axis calls it. Rows of no expert are zeros.
    ValueError when y has not the rows that the route delivers.
    """
    if route.axis.size == 1:
        return y
    if y.shape[0] != route.num_received:
        raise ValueError(f"combine of {y.shape[0]} rows by a route that delivers {route.num_received}")
    return _combine(y, route)


def local_experts(ids: Tensor, axis: Axis, num_experts: int) -> Tensor:
    """Ids (...) of experts, of all `num_experts`, as ids among this rank's: in [0, E/n) for rows that dispatch brought."""
    share = _share(num_experts, axis)
    return ids if axis.size == 1 else ids - axis.index * share


def exchange(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Each rank's slice along `split_dim`, of all ranks, joined along `concat_dim` in rank order.

    (E, T, H) with dims 0 and 1 -> (E/n, n T, H): this rank's experts, the tokens of all. The backward is the exchange back.
    ValueError when the dims are the same or `split_dim` does not divide by the ranks.
    """
    if axis.size == 1:
        return x
    return _exchange(x, axis, split_dim % x.dim(), concat_dim % x.dim())
