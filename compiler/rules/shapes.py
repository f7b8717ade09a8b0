"""Factors of ops that move or reshape data: views, splits, slices, concatenations.

A view is a sequence of groups: dims of the operand and dims of the result with the same product. The first dim larger than 1 of
a group on either side is the slowest, so slicing it on one side is slicing it on the other: that pair is a factor.
"""

from __future__ import annotations

from math import prod

from meshwright.compiler.rules.factors import Call, Dims, Factors, Strategy
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
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: groups of dims, and packed dims taken apart or put together."""
    before, after = call.operands[0].shape, call.results[0].shape
    names: tuple[list[str], list[str]] = ([""] * len(before), [""] * len(after))
    extra: list[Strategy] = []
    for number, (left, right) in enumerate(view_groups(before, after) if prod(before) else ()):
        names[0][left[0]] = names[1][right[0]] = f"d{number}"
        if len(left) == 1 and len(right) > 2 and after[right[0]] in PACKED:
            apart, inner = packed(left[0], before, after[right[0]]), shard(right[1])
            extra.append(Strategy(f"packed{number}", (apart,), (inner,)))
        if len(right) == 1 and len(left) > 2 and before[left[0]] in PACKED:
            together, inner = packed(right[0], after, before[left[0]]), shard(left[1])
            extra.append(Strategy(f"packed{number}", (inner,), (together,)))
    return Factors((tuple(names[0]),), (tuple(names[1]),), linear=LINEAR, extra=tuple(extra))


def packed(dim: int, shape: tuple[int, ...], pieces: int) -> Type:
    """A dim that is `pieces` equal pieces, sliced piece by piece: the slice of the second dim when it is viewed as (pieces, rest)."""
    return shard(dim, (shape[dim] // pieces,) * pieces)


def permute(call: Call) -> Factors:
    """permute and transpose: result dim i is operand dim order[i]."""
    rank = len(call.operands[0].shape)
    names = tuple(f"d{i}" for i in range(rank))
    target = call.op.target
    if target == "aten.permute.default":
        order = [int(d) % rank for d in call.op.args[1]]  # type: ignore[attr-defined]
    elif target in ("aten.t.default", "aten.numpy_T.default"):
        order = list(range(rank))[::-1]
    else:
        order = list(range(rank))
        a, b = (int(d) % rank for d in call.op.args[1:3])  # type: ignore[call-overload]
        order[a], order[b] = order[b], order[a]
    return Factors((names,), (tuple(names[d] for d in order),), linear=LINEAR)


def expand(call: Call) -> Factors:
    """expand: new and widened dims are not sharded; the others are as they were."""
    before, after = call.operands[0].shape, call.results[0].shape
    shift = len(after) - len(before)
    names = tuple(f"d{i}" if before[i] == after[i + shift] else "" for i in range(len(before)))
    return Factors((names,), (("",) * shift + names,), linear=LINEAR)


def same_but(call: Call, dims: set[int]) -> Factors:
    """One operand, results of the same rank; every dim but `dims` is a factor."""
    rank = len(call.operands[0].shape)
    names = tuple("" if i in dims else f"d{i}" for i in range(rank))
    return Factors((names,), tuple(names for _ in call.results), linear=LINEAR)


def split(call: Call) -> Factors:
    """split and chunk: by sections along the split dim, anything along the others."""
    rank = len(call.operands[0].shape)
    dim = int(call.argument(2, "dim", 0)) % rank  # type: ignore[call-overload]
    names = tuple(f"d{i}" for i in range(rank))
    sizes = tuple(r.shape[dim] for r in call.results)
    return Factors((names,), (names,) * len(call.results), resection={f"d{dim}": (sizes, ())})


def slice_dim(call: Call) -> Factors:
    """slice: the sliced dim is whole on every rank, unless all of it is taken."""
    rank = len(call.operands[0].shape)
    dim = int(call.argument(1, "dim", 0)) % rank  # type: ignore[call-overload]
    whole = call.operands[0].shape == call.results[0].shape
    return same_but(call, set() if whole else {dim})


def select(call: Call) -> Factors:
    """select and unbind: the dim disappears."""
    rank = len(call.operands[0].shape)
    dim = int(call.argument(1, "dim", 0)) % rank  # type: ignore[call-overload]
    names: Dims = tuple("" if i == dim else f"d{i}" for i in range(rank))
    return Factors((names,), (names[:dim] + names[dim + 1 :],) * len(call.results), linear=LINEAR)


def cat(call: Call) -> Factors:
    """cat: the joined dim is whole; the others are factors of all operands."""
    rank = len(call.results[0].shape)
    dim = int(call.argument(1, "dim", 0)) % rank  # type: ignore[call-overload]
    names = tuple("" if i == dim else f"d{i}" for i in range(rank))
    return Factors((names,) * len(call.operands), (names,), linear=(frozenset(range(len(call.operands))),))


def stack(call: Call) -> Factors:
    """stack: the new dim is whole."""
    rank = len(call.results[0].shape)
    dim = int(call.argument(1, "dim", 0)) % rank  # type: ignore[call-overload]
    names = tuple(f"d{i}" for i in range(rank - 1))
    result = (*names[:dim], "", *names[dim:])
    return Factors((names,) * len(call.operands), (result,), linear=(frozenset(range(len(call.operands))),))


def pad(call: Call) -> Factors:
    """pad: padded dims are whole."""
    rank = len(call.operands[0].shape)
    widths = list(call.op.args[1])  # type: ignore[call-overload]
    padded = {rank - 1 - i // 2 for i, width in enumerate(widths) if width}
    names = tuple("" if i in padded else f"d{i}" for i in range(rank))
    return Factors((names,), (names,))


def slice_scatter(call: Call) -> Factors:
    """slice_scatter and select_scatter: the written dim is whole."""
    rank = len(call.operands[0].shape)
    dim = int(call.argument(2, "dim", 0)) % rank  # type: ignore[call-overload]
    names = tuple("" if i == dim else f"d{i}" for i in range(rank))
    source = names if len(call.operands[1].shape) == rank else names[:dim] + names[dim + 1 :]
    return Factors((names, source), (names,), linear=(frozenset({0, 1}),))
