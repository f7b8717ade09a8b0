"""Factors of ops that read or write by index.

A dim that is indexed is whole. Dims of the index itself are factors of what is read: each rank looks up its own indices in the whole
tensor, whose gradient is then a sum over ranks. Dims that are neither are factors where all tensors agree along them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.compiler.graph import Ref, Value
from meshwright.compiler.rules.factors import Call, Dims, Factors, aligned, broadcast, dims_of, whole
from meshwright.compiler.rules.shapes import LINEAR, named_dim

BOOLEAN = ("bool", "uint8")


def embedding(call: Call) -> Factors:
    """embedding(weight (v, h), ids ...) -> ... h: v by masked lookup (vocabulary parallel; Megatron-LM, arXiv 1909.08053, 3).

    A table is cut by rows, as the head that it is often tied to needs it; by columns only where its rows do not divide.
    """
    scaled = bool(call.argument(3, "scale_grad_by_freq", False) or call.argument(4, "sparse", False))
    ids = tuple("" if scaled else f"i{d}" for d in range(len(call.operands[1].shape)))
    lookup = {} if scaled else {"v": "vocabulary"}
    return Factors(
        (("" if scaled else "v", "h"), ids),
        ((*ids, "h"),),
        summed=frozenset(lookup),
        lowering=lookup,
        contiguous=frozenset({"v"}),
        fallback={} if scaled else {"h": "v"},
    )


def gather(call: Call) -> Factors:
    """gather(x, dim, index): result like index. Along the other dims entry i of the index reads entry i of x."""
    x, index = call.operands[0].shape, call.operands[1].shape
    dim = named_dim(call, 1)
    names = tuple(f"d{i}" if i == dim or n == x[i] else "" for i, n in enumerate(index))
    source = tuple("" if i == dim else name for i, name in enumerate(names))
    return Factors((source, names), (names,), linear=LINEAR) if len(x) == len(index) else whole(call)


def take_along_dim(call: Call) -> Factors:
    """take_along_dim(x, index, dim): like gather, the other dims broadcast."""
    x, index = call.operands[0].shape, call.operands[1].shape
    if call.argument(2, "dim") is None or len(x) != len(index):
        return whole(call)
    dim = named_dim(call, 2)
    result = call.results[0].shape
    names = dims_of(len(result))
    source = tuple("" if i == dim or n != result[i] else names[i] for i, n in enumerate(x))
    return Factors((source, aligned(index, result, names)), (names,), linear=LINEAR)


def take(call: Call) -> Factors:
    """take(x, index): x flat and whole."""
    names = dims_of(len(call.operands[1].shape))
    return Factors((("",) * len(call.operands[0].shape), names), (names,), linear=LINEAR)


def scatter(call: Call) -> Factors:
    """scatter(x, dim, index, src or value): the dim is whole, dims along which all have one size are factors.

    Linear in x and src together; with a value, in x where the value is 0.
    """
    dim = named_dim(call, 1)
    shapes = [v.shape for v in call.operands]
    if len({len(s) for s in shapes}) > 1:
        return whole(call)
    names = tuple("" if i == dim or len({s[i] for s in shapes}) > 1 else f"d{i}" for i in range(len(shapes[0])))
    value = call.argument(3, "value")
    linear = (frozenset({0, 2}),) if len(shapes) == 3 else LINEAR if value == 0 else ()
    return Factors((names,) * len(shapes), (names,), linear=linear if call.argument(4, "reduce") is None else ())


def scatter_add(call: Call) -> Factors:
    """scatter_add(x, dim, index, src): as scatter; what is added may be split over ranks, the result is then P."""
    found = scatter(call)
    dim = named_dim(call, 1)
    if not found.results[0] or call.operands[1].shape[dim] != call.operands[2].shape[dim]:
        return found
    own = (*found.operands[1][:dim], "i", *found.operands[1][dim + 1 :])
    summed = frozenset({"i"})
    return replace(found, operands=(found.operands[0], own, own), summed=summed, additive=frozenset({0}))


def index_select(call: Call) -> Factors:
    """index_select(x, dim, index): the index is a factor of the result's dim."""
    dim = named_dim(call, 1)
    names = dims_of(len(call.operands[0].shape), {dim})
    if not names or not call.operands[1].shape:
        return whole(call)
    return Factors((names, ("i",)), ((*names[:dim], "i", *names[dim + 1 :]),), linear=LINEAR)


def index_add(call: Call) -> Factors:
    """index_add(x, dim, index, source): what is added may be split over ranks, the result is then P."""
    factors = index_copy(call)
    dim = named_dim(call, 1)
    if not factors.operands[0] or not factors.operands[1]:
        return factors
    source = (*factors.operands[0][:dim], "i", *factors.operands[0][dim + 1 :])
    return replace(
        factors, operands=(factors.operands[0], ("i",), source), summed=frozenset({"i"}), additive=frozenset({0})
    )


def index_copy(call: Call) -> Factors:
    """index_copy(x, dim, index, source): the dim is whole, the others are factors of both."""
    dim = named_dim(call, 1)
    rank = len(call.operands[0].shape)
    if len(call.operands[2].shape) != rank:
        return whole(call)
    names = dims_of(rank, {dim})
    return Factors((names, ("",) * len(call.operands[1].shape), names), (names,), linear=(frozenset({0, 2}),))


def index_fill(call: Call) -> Factors:
    """index_fill(x, dim, index, value): the dim is whole."""
    dim = named_dim(call, 1)
    names = dims_of(len(call.operands[0].shape), {dim})
    others = tuple(("",) * len(v.shape) for v in call.operands[1:])
    value = call.argument(3, "value")
    linear = (frozenset({0, 2}),) if isinstance(value, Ref) else LINEAR if value == 0 else ()
    return Factors((names, *others), (names,), linear=linear)


@dataclass(frozen=True)
class Indexed:
    """x[indices], as NumPy has it: `x` names of x's dims, `read` those of x[indices], `indices` those of every index tensor.

    Index tensors are broadcast together to `shape`; their dims stand where the first of them does when they are next to each other, else
    in front. A bool index of r dims takes r dims of x and gives one, whose size is data: its dims and those of other indices are whole.
    """

    x: Dims
    read: Dims
    indices: tuple[Dims, ...]
    shape: tuple[int, ...]


def indexed(x: Value, indices: list[Value | None]) -> Indexed:
    """Takes an indexing apart."""
    given = [v for v in indices if v is not None]
    masked = any(v.dtype in BOOLEAN for v in given)
    shape = () if masked else broadcast(*(v.shape for v in given))
    own = tuple(f"i{d}" for d in range(len(shape))) if not masked else ("",)
    names: list[str] = []
    taken: list[int] = []
    places: list[int] = []
    for number, value in enumerate(indices):
        width = len(value.shape) if value is not None and value.dtype in BOOLEAN else 1
        if value is not None:
            places.append(number)
            taken.append(len(names))
        names += [f"d{len(names) + i}" if value is None else "" for i in range(width)]
    names += [f"d{i}" for i in range(len(names), len(x.shape))]
    together = places == list(range(places[0], places[0] + len(places)))
    before = [n for n in names[: taken[0]] if n] if together else []
    behind = [n for n in names if n and n not in before]
    dims = tuple(("",) * len(v.shape) if masked else aligned(v.shape, shape, own) for v in given)
    return Indexed(tuple(names), (*before, *own, *behind), dims, shape)


def index_values(call: Call) -> list[Value | None]:
    """The Values of an `indices` argument."""
    values = {v.name: v for v in call.operands}
    listed = call.op.args[1]
    assert isinstance(listed, (list, tuple))
    return [values[i.name] if isinstance(i, Ref) else None for i in listed]


def index(call: Call) -> Factors:
    """x[indices]: dims that are not indexed, and the dims of the indices, are factors."""
    indices = index_values(call)
    if not any(v is not None for v in indices):
        return whole(call)
    found = indexed(call.operands[0], indices)
    return Factors((found.x, *found.indices), (found.read,), linear=LINEAR)


def index_put(call: Call) -> Factors:
    """x[indices] = values, or += (`accumulate`): dims that are not indexed are factors of all; linear in x and values together.

    What is accumulated may be split over ranks along the indices, the result is then P.
    """
    indices = index_values(call)
    if not any(v is not None for v in indices):
        return whole(call)
    found = indexed(call.operands[0], indices)
    adds = bool(call.argument(3, "accumulate", False))
    own = frozenset(n for n in found.read if n.startswith("i"))
    sizes = {name: n for name, n in zip(found.x, call.operands[0].shape, strict=True) if name}
    sizes.update({f"i{d}": n for d, n in enumerate(found.shape)})
    last = len(call.operands) - 1
    values = tuple(
        name if sizes.get(name) == n else ""
        for name, n in zip(found.read[len(found.read) - len(call.operands[last].shape) :], call.operands[last].shape, strict=True)
    )
    return Factors(
        (found.x, *found.indices, values),
        (found.x,),
        summed=own if adds else frozenset(),
        additive=frozenset({0}),
        blocked=frozenset() if adds else own,
        linear=(frozenset({0, last}),),
    )


def searchsorted(call: Call) -> Factors:
    """searchsorted(sorted (n) or (..., n), values): values' own dims; leading dims where both have them. The sorted dim is whole."""
    sequence, values = call.operands[0].shape, call.operands[1].shape
    names = dims_of(len(values))
    lead = names[:-1] if len(sequence) > 1 else ()
    others = tuple(("",) * len(v.shape) for v in call.operands[2:])
    return Factors(((*lead, ""), names, *others), (names,)) if not others else whole(call)


def masked_scatter(call: Call) -> Factors:
    """masked_scatter(x, mask, source): source is read in the order of all of mask; linear in x and source together."""
    return replace(whole(call), linear=(frozenset({0, 2}),))
