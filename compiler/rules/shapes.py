"""Factors of ops that move or reshape data: views, slices, concatenations, repetitions.

A view is a sequence of groups: dims of the operand and dims of the result with the same product. The first dim larger than 1 of
a group on either side is the slowest, so slicing it on one side is slicing it on the other: that pair is a factor.

Ops that take a dim apart (split, slice) or put it together (cat) give windows of one whole: it is cut by sections that begin and end where
the windows do.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

from meshwright.compiler.rules.factors import Call, Factors, Rule, Strategy, aligned, dims_of, whole
from meshwright.plans.layout import Type, shard

LINEAR = (frozenset({0}),)
PACKED = (2, 3)
"""Pieces that a packed dim is taken for: keys and values, or queries too, then heads and the head dim."""


def view_groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Minimal groups of (operand dims, result dims) with equal products; dims of size 1 are left out."""
    left = [d for d, n in enumerate(before) if n != 1]
    right = [d for d, n in enumerate(after) if n != 1]
    groups: list[tuple[list[int], list[int]]] = []
    while left and right:
        taken: tuple[list[int], list[int]] = ([left.pop(0)], [right.pop(0)])
        while (a := prod(before[d] for d in taken[0])) != (b := prod(after[d] for d in taken[1])):
            side = (taken[0], left) if a < b else (taken[1], right)
            side[0].append(side[1].pop(0))
        groups.append(taken)
    return groups


def view(call: Call) -> Factors:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: groups of dims, and packed dims taken apart or put together.

    A second operand (view_as) only gives the shape.
    """
    before, after = call.operands[0].shape, call.results[0].shape
    names: tuple[list[str], list[str]] = ([""] * len(before), [""] * len(after))
    extra: list[Strategy] = []
    shaped = len(call.operands) > 1
    for number, (left, right) in enumerate(view_groups(before, after) if prod(before) else ()):
        names[0][left[0]] = names[1][right[0]] = f"d{number}"
        pairs: list[tuple[Type, Type]] = []
        if len(left) == 1 and len(right) > 2 and after[right[0]] in PACKED:
            pairs.append((packed(left[0], before, after[right[0]]), shard(right[1])))
        if len(right) == 1 and len(left) > 2 and before[left[0]] in PACKED:
            pairs.append((shard(left[1]), packed(right[0], after, before[left[0]])))
        extra += [Strategy(f"packed.d{number}", (a, b) if shaped else (a,), (b,)) for a, b in pairs]
    result = tuple(names[1])
    operands = (tuple(names[0]), result) if shaped else (tuple(names[0]),)
    return Factors(operands, (result,), linear=LINEAR, extra=tuple(extra))


def packed(dim: int, shape: tuple[int, ...], pieces: int) -> Type:
    """A dim that is `pieces` equal pieces, sliced piece by piece: the slice of the second dim when it is viewed as (pieces, rest)."""
    return shard(dim, (shape[dim] // pieces,) * pieces)


def permute(call: Call) -> Factors:
    """permute, transpose, movedim: result dim i is operand dim order[i]."""
    names = dims_of(len(call.operands[0].shape))
    order = permutation(call)
    return Factors((names,), (tuple(names[d] for d in order),), linear=LINEAR)


def permutation(call: Call) -> list[int]:
    """The operand's dims in the order of the result's."""
    rank = len(call.operands[0].shape)
    packet = call.op.target.split(".")[1]
    if packet == "permute":
        return [d % rank for d in call.integers(1, "dims")]
    if packet in ("t", "numpy_T"):
        return list(range(rank))[::-1]
    if packet == "movedim":
        sources = [d % rank for d in call.integers(1, "source")]
        targets = [d % rank for d in call.integers(2, "destination")]
        rest = iter(d for d in range(rank) if d not in sources)
        return [sources[targets.index(i)] if i in targets else next(rest) for i in range(rank)]
    order = list(range(rank))
    if packet in ("mT", "mH", "adjoint"):
        a, b = rank - 2, rank - 1
    else:
        a, b = (int(str(call.argument(i, f"dim{i - 1}"))) % max(rank, 1) for i in (1, 2))
    if rank:
        order[a], order[b] = order[b], order[a]
    return order


def expand(call: Call) -> Factors:
    """expand: a new or widened dim may be sharded, each rank makes its part of it from the whole operand."""
    before, after = call.operands[0].shape, call.results[0].shape
    names = dims_of(len(after))
    shapes_only = (names,) * (len(call.operands) - 1)
    return Factors((aligned(before, after, names), *shapes_only), (names,), linear=LINEAR)


def broadcast_tensors(call: Call) -> Factors:
    """Every operand to the common shape."""
    after = call.results[0].shape
    names = dims_of(len(after))
    operands = tuple(aligned(v.shape, after, names) for v in call.operands)
    return Factors(operands, (names,) * len(call.results), linear=(frozenset(range(len(operands))),))


def meshgrid(call: Call) -> Factors:
    """One-dim operands to a grid; "xy" swaps the first two dims."""
    count = len(call.operands)
    if any(len(v.shape) != 1 for v in call.operands):
        return whole(call)
    order = list(range(count))
    if call.argument(1, "indexing", "ij") == "xy" and count > 1:
        order[0], order[1] = 1, 0
    names = dims_of(count)
    return Factors(tuple((name,) for name in names), (tuple(names[i] for i in order),) * count)


def same_but(call: Call, dims: set[int]) -> Factors:
    """One operand, results of the same rank; every dim but `dims` is a factor."""
    names = dims_of(len(call.operands[0].shape), dims)
    return Factors((names,), tuple(names for _ in call.results), linear=LINEAR)


def named_dim(call: Call, index: int, name: str = "dim", default: int = 0) -> int:
    """A dim argument, counted from the front."""
    return call.integer(index, name, default) % max(len(call.operands[0].shape), 1)


def split(call: Call) -> Factors:
    """split and chunk: the results are windows of the split dim."""
    dim = named_dim(call, 2)
    names = dims_of(len(call.operands[0].shape))
    stops = [0]
    for result in call.results:
        stops.append(stops[-1] + result.shape[dim])
    windows = {f"d{dim}": ((0, stops[-1]), *pairwise(stops))}
    empty = any(a == b for a, b in pairwise(stops))
    blocked = frozenset({f"d{dim}"} if empty else ())
    return Factors((names,), (names,) * len(call.results), linear=LINEAR, windows={} if empty else windows, blocked=blocked)


def slice_window(call: Call) -> tuple[int, int, int, int]:
    """(dim, start, stop, step) of slice, narrow, slice_scatter; start and stop within the dim."""
    packet = call.op.target.split(".")[1]
    first = 2 if packet == "slice_scatter" else 1
    dim = named_dim(call, first)
    size = call.operands[0].shape[dim]
    start = call.integer(first + 1, "start", 0)
    start = max(start + size, 0) if start < 0 else min(start, size)
    if packet == "narrow":
        return dim, start, start + call.integer(3, "length", 0), 1
    stop = call.integer(first + 2, "end", size)
    stop = max(stop + size, 0) if stop < 0 else min(stop, size)
    return dim, start, max(stop, start), call.integer(first + 3, "step", 1)


def slice_dim(call: Call) -> Factors:
    """slice and narrow: the result is a window of the dim; with a step, of every rank's share where the step divides the dim."""
    dim, start, stop, step = slice_window(call)
    size = call.operands[0].shape[dim]
    if step != 1:
        spread = size % step == 0 and start < step and stop == size
        return same_but(call, set() if spread else {dim})
    if stop <= start:
        return same_but(call, {dim})
    factors = same_but(call, set())
    return factors if (start, stop) == (0, size) else replace(factors, windows={f"d{dim}": ((0, size), (start, stop))})


def slice_scatter(call: Call) -> Factors:
    """slice_scatter: what is written is a window of the dim."""
    dim, start, stop, step = slice_window(call)
    names = dims_of(len(call.operands[0].shape))
    windows = {f"d{dim}": ((0, call.operands[0].shape[dim]), (start, stop), (0, call.operands[0].shape[dim]))}
    blocked = frozenset({f"d{dim}"} if step != 1 or stop <= start else ())
    both = (frozenset({0, 1}),)
    return Factors((names, names), (names,), linear=both, windows={} if blocked else windows, blocked=blocked)


def select(call: Call) -> Factors:
    """select and unbind: the dim disappears."""
    dim = named_dim(call, 1)
    names = dims_of(len(call.operands[0].shape), {dim})
    return Factors((names,), (names[:dim] + names[dim + 1 :],) * len(call.results), linear=LINEAR)


def select_scatter(call: Call) -> Factors:
    """select_scatter: the written dim is whole."""
    dim = named_dim(call, 2)
    names = dims_of(len(call.operands[0].shape), {dim})
    return Factors((names, names[:dim] + names[dim + 1 :]), (names,), linear=(frozenset({0, 1}),))


def diagonal(call: Call) -> Factors:
    """diagonal and diagonal_scatter: the two dims are whole, and so is the diagonal, the result's last dim."""
    scatter = len(call.operands) > 1
    first = 2 if scatter else 1
    rank = len(call.operands[0].shape)
    dims = {call.integer(first + 1, "dim1", 0) % rank, call.integer(first + 2, "dim2", 1) % rank}
    names = dims_of(rank, dims)
    line = (*(f"d{i}" for i in range(rank) if i not in dims), "")
    if scatter:
        return Factors((names, line), (names,), linear=(frozenset({0, 1}),))
    return Factors((names,), (line,), linear=LINEAR)


def diag_embed(call: Call) -> Factors:
    """diag_embed: the last dim becomes two."""
    rank = len(call.results[0].shape)
    dims = {call.integer(2, "dim1", -2) % rank, call.integer(3, "dim2", -1) % rank}
    names = dims_of(rank - 2)
    rest = iter(names)
    return Factors(((*names, ""),), (tuple("" if i in dims else next(rest) for i in range(rank)),), linear=LINEAR)


def cat(call: Call) -> Factors:
    """cat: the operands are windows of the joined dim; the other dims are factors of all."""
    rank = len(call.results[0].shape)
    if any(len(v.shape) != rank for v in call.operands):
        return whole(call)
    dim = named_dim(call, 1)
    stops = [0]
    for value in call.operands:
        stops.append(stops[-1] + value.shape[dim])
    pieces = tuple(pairwise(stops))
    empty = any(a == b for a, b in pieces)
    names = dims_of(rank, {dim} if empty else set())
    windows = {} if empty else {f"d{dim}": (*pieces, (0, stops[-1]))}
    return Factors((names,) * len(call.operands), (names,), linear=(frozenset(range(len(call.operands))),), windows=windows)


def stack(call: Call) -> Factors:
    """stack: the new dim is whole."""
    rank = len(call.results[0].shape)
    dim = call.integer(1, "dim", 0) % rank
    names = dims_of(rank - 1)
    result = (*names[:dim], "", *names[dim:])
    return Factors((names,) * len(call.operands), (result,), linear=(frozenset(range(len(call.operands))),))


def pad(call: Call) -> Factors:
    """pad: padded dims are whole. Linear, unless it writes a number other than 0."""
    rank = len(call.operands[0].shape)
    widths = call.integers(1, "pad")
    padded = {rank - 1 - i // 2 for i, width in enumerate(widths) if width}
    constant = call.op.target != "aten.pad.default"
    value = call.argument(2, "value") if constant else call.argument(3, "value")
    factors = same_but(call, padded)
    return factors if not value else replace(factors, linear=())


def repeat(call: Call) -> Factors:
    """repeat and tile: a dim that is copied r times is r sections; new dims, and dims of one entry, each rank makes its part of."""
    before, after = call.operands[0].shape, call.results[0].shape
    shift = len(after) - len(before)
    names = dims_of(len(after))
    extra = tuple(
        Strategy(f"copies.d{i + shift}", (shard(i),), (shard(i + shift, (n,) * (after[i + shift] // n)),))
        for i, n in enumerate(before)
        if n > 1 and after[i + shift] != n
    )
    repeated = {i + shift for i, n in enumerate(before) if n > 1 and after[i + shift] != n}
    result = tuple("" if i in repeated else name for i, name in enumerate(names))
    operand = tuple("" if i + shift in repeated or n != after[i + shift] else names[i + shift] for i, n in enumerate(before))
    return Factors((operand,), (result,), linear=LINEAR, extra=extra)


def repeat_interleave(call: Call) -> Factors:
    """repeat_interleave by a number: every entry becomes a block, so slices go with slices; a dim of one entry is widened."""
    before, after = call.operands[0].shape, call.results[0].shape
    if call.argument(2, "dim") is None:
        return whole(call)
    dim = named_dim(call, 2)
    names = dims_of(len(after))
    operand = tuple("" if i == dim and n == 1 and after[i] > 1 else names[i] for i, n in enumerate(before))
    return Factors((operand,), (names,), linear=LINEAR)


def whole_dims(index: int, name: str, every: bool = False, linear: bool = True) -> Rule:
    """One operand; the dims that an argument lists are whole: flip, roll, fft. `every`: all dims where it lists none."""

    def rule(call: Call) -> Factors:
        rank = len(call.operands[0].shape)
        listed = call.integers(index, name) or (range(rank) if every else ())
        factors = same_but(call, {int(d) % max(rank, 1) for d in listed})
        return factors if linear else replace(factors, linear=())

    return rule


def trailing(count: int, linear: bool = False) -> Rule:
    """The last `count` dims of operands and results are whole, those before them are the same everywhere: pooling, tril, inverses."""

    def rule(call: Call) -> Factors:
        lead = min(len(v.shape) for v in call.operands) - count
        if lead < 0 or any(v.shape[:lead] != call.operands[0].shape[:lead] or len(v.shape) < lead for v in call.values):
            return whole(call)
        names = tuple((*dims_of(lead), *("",) * (len(v.shape) - lead)) for v in call.values)
        count_operands = len(call.operands)
        return Factors(names[:count_operands], names[count_operands:], linear=LINEAR if linear else ())

    return rule


def unfold(call: Call) -> Factors:
    """Tensor.unfold: the dim is whole, windows are a new last dim."""
    dim = named_dim(call, 1, "dimension")
    names = dims_of(len(call.operands[0].shape), {dim})
    return Factors((names,), ((*names, "") if names else ("",),), linear=LINEAR)


def diff(call: Call) -> Factors:
    """diff, and what is put before and behind: the dim is whole."""
    dim = named_dim(call, 2, default=-1)
    names = dims_of(len(call.operands[0].shape), {dim})
    return Factors((names,) * len(call.operands), (names,), linear=(frozenset(range(len(call.operands))),))


def channel_blocks(index: int) -> Rule:
    """Dim `index`, from the end, has a block of entries per channel, channels slowest, in operand or result: pixel_shuffle, im2col.

    Dims behind it are whole, dims before it are the same.
    """

    def rule(call: Call) -> Factors:
        rank = len(call.operands[0].shape)
        if rank < -index or len(call.results[0].shape) not in (rank, rank - 1, rank + 1):
            return whole(call)
        names = dims_of(rank + index + 1)
        operand, result = ((*names, *("",) * (len(v.shape) - len(names))) for v in (call.operands[0], call.results[0]))
        return Factors((operand,), (result,), linear=LINEAR)

    return rule


def complex_pair(call: Call) -> Factors:
    """view_as_complex and view_as_real: the last dim of the real tensor, of size 2, is whole."""
    names = dims_of(min(len(call.operands[0].shape), len(call.results[0].shape)))
    longer = (*names, "")
    real_first = len(call.operands[0].shape) > len(call.results[0].shape)
    return Factors((longer if real_first else names,), (names if real_first else longer,))


def gated(call: Call) -> Factors:
    """glu: both halves of the dim, entry by entry."""
    rank = len(call.operands[0].shape)
    dim = named_dim(call, 1, default=-1)
    half = call.operands[0].shape[dim] // 2
    names = dims_of(rank, {dim})
    extra = Strategy(f"packed.d{dim}", (shard(dim, (half, half)),), (shard(dim),))
    return Factors((names,), (names,), extra=(extra,))


def one_hot(call: Call) -> Factors:
    """one_hot: the new dim is whole. Where it is as long as the largest class, all is."""
    if call.integer(1, "num_classes", -1) < 0:
        return whole(call)
    names = dims_of(len(call.operands[0].shape))
    return Factors((names,), ((*names, ""),))
