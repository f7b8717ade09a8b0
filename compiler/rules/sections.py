"""Sections: the ways to cut a factor, where a dim is a concatenation of pieces that each rank needs its share of.

A *way* is a tuple of section sizes that add up to the factor's whole; one section is a plain slice. The dims of one factor are the
whole, in units that may differ (192 columns are 12 heads of 16), or windows of it (a split's results, a cat's operands). A way is
legal for a dim when its sections fall on entries of that dim, and windows begin and end where sections do.

Which ways are worth offering is read off the graph: `section_table` collects how its ops take dims apart or put them together.

    ways(call, factors, factor, table)     legal ways of one factor
    cut(way, window, whole, size)          the sections of one dim
    section_table(calls)                   dim size -> the ways of dims of that size
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice, pairwise, product
from math import gcd

from meshwright.compiler.rules.factors import Call, Factors, Window

Way = tuple[int, ...]
SectionTable = Mapping[int, Sequence[Way]]
"""dim size -> the ways to see that size as a concatenation of sections."""

MAX_WAYS = 6
"""Ways kept per size: each is one more strategy of every op that has the size."""


def edges(way: Way) -> tuple[int, ...]:
    """Where sections begin and end."""
    return (0, *accumulate(way))


def places(call: Call, factors: Factors, factor: str) -> Iterator[tuple[int, int, int]]:
    """(slot among operands and results, dim, size) of every dim that carries a factor."""
    for slot, (dims, value) in enumerate(zip(factors.dims, call.values, strict=True)):
        if factor in dims:
            dim = dims.index(factor)
            yield slot, dim, value.shape[dim]


def whole_size(call: Call, factors: Factors, factor: str) -> int:
    """Entries of the whole that a factor is: of its longest dim, or of what its windows are windows of."""
    windows = factors.windows.get(factor)
    if windows is not None:
        return max(w[1] for w in windows if w is not None)
    return max(size for _, _, size in places(call, factors, factor))


def window_of(factors: Factors, factor: str, slot: int, whole: int) -> Window:
    """Where the dim of one operand or result lies in the whole."""
    windows = factors.windows.get(factor)
    window = windows[slot] if windows is not None else None
    return window or (0, whole)


def cut(way: Way, window: Window, size: int) -> Way | None:
    """Sections of a dim of `size` entries that is a window of the whole; None where they do not fall on its entries."""
    start, stop = window
    bounds = edges(way)
    if start not in bounds or stop not in bounds:
        return None
    parts = [b - a for a, b in pairwise(bounds) if a >= start and b <= stop]
    if any(part * size % (stop - start) for part in parts):
        return None
    return tuple(part * size // (stop - start) for part in parts)


def own_way(call: Call, factors: Factors, factor: str) -> Way:
    """The coarsest way that the windows of a factor allow."""
    whole = whole_size(call, factors, factor)
    bounds = sorted({0, whole, *(b for w in factors.windows.get(factor, ()) if w is not None for b in w)})
    return tuple(b - a for a, b in pairwise(bounds))


def ways(call: Call, factors: Factors, factor: str, table: SectionTable) -> tuple[Way, ...]:
    """Every way to cut a factor that is legal for all its dims, before any division by ranks; the coarsest first."""
    whole = whole_size(call, factors, factor)
    found: dict[Way, None] = {own_way(call, factors, factor): None}
    for slot, _, size in () if factor in factors.contiguous else places(call, factors, factor):
        start, stop = window_of(factors, factor, slot, whole)
        for way in table.get(size, ()) if (start, stop) == (0, whole) else ():
            if not any(part * whole % size for part in way):
                found[tuple(part * whole // size for part in way)] = None
    return tuple(way for way in found if dim_parts(call, factors, factor, way) is not None)


def dim_parts(call: Call, factors: Factors, factor: str, way: Way) -> tuple[tuple[int, int, Way], ...] | None:
    """(slot, dim, sections) of every dim of a factor under a way; None where a dim cannot be cut so."""
    whole = sum(way)
    units = factors.units.get(factor)
    if units is not None and cut(way, (0, whole), units) is None:
        return None
    found = []
    for slot, dim, size in places(call, factors, factor):
        parts = cut(way, window_of(factors, factor, slot, whole), size)
        if parts is None:
            return None
        found.append((slot, dim, parts))
    return tuple(found)


def indivisible(call: Call, factors: Factors, factor: str, way: Way, ranks: int) -> int | None:
    """The first size of a factor, or section of it, that does not divide by the ranks; None when all do."""
    parts = [part for _, _, sections in dim_parts(call, factors, factor, way) or () for part in sections]
    units = factors.units.get(factor)
    if units is not None:
        parts += cut(way, (0, sum(way)), units) or ()
    return next((part for part in parts if part % ranks), None)


# which ways a graph has


def section_table(calls: Iterable[tuple[Call, Factors | None]]) -> dict[int, list[Way]]:
    """Every way in which the ops of one function take a dim apart or put it together, by the dim's size.

    A dim that no parameter or operand from outside can reach as a slice is left out: no one would cut it.
    """
    known = [(call, factors) for call, factors in calls if factors is not None]
    reached = _Reached(known)
    found: dict[int, dict[Way, None]] = {}
    bounds: dict[tuple[str, int], set[int]] = {}
    for call, factors in known:
        for factor in factors.windows:
            for name, dim, way in taken_apart(call, factors, factor, reached):
                bounds.setdefault((name, dim), set()).update(edges(way))
                add_way(found, way)
        for way in packed_ways(call, factors, reached):
            add_way(found, way)
    for wanted in bounds.values():
        add_way(found, tuple(b - a for a, b in pairwise(sorted(wanted))))
    for _ in range(3):
        spread(known, found)
    return {size: list(wanted)[:MAX_WAYS] for size, wanted in found.items()}


def add_way(found: dict[int, dict[Way, None]], way: Way) -> None:
    """Records a way of dims of its size, if its sections divide by anything at all."""
    if len(way) > 1 and gcd(*way) > 1:
        found.setdefault(sum(way), {}).setdefault(way)


def taken_apart(call: Call, factors: Factors, factor: str, reached: _Reached) -> Iterator[tuple[str, int, Way]]:
    """(value, dim, way) of what one op takes windows of, or puts together from them."""
    if factor in factors.blocked:
        return
    held = list(places(call, factors, factor))
    if not all(reached.dim(call.values[slot].name, dim) for slot, dim, _ in held if slot < len(call.operands)):
        return
    whole = whole_size(call, factors, factor)
    for slot, dim, _ in held:
        if window_of(factors, factor, slot, whole) == (0, whole):
            yield call.values[slot].name, dim, own_way(call, factors, factor)


def packed_ways(call: Call, factors: Factors, reached: _Reached) -> Iterator[Way]:
    """Ways of the dims that one op's own strategies cut by sections."""
    for extra in factors.extra:
        for slot, type_ in enumerate(extra.types):
            if type_.sections and (slot >= len(call.operands) or reached.dim(call.operands[slot].name, type_.dim)):
                yield type_.sections


def spread(known: Sequence[tuple[Call, Factors]], found: dict[int, dict[Way, None]]) -> None:
    """Carries ways over to dims of the same factor in other units, and a piece's ways to the whole that it is a piece of."""
    for call, factors in known:
        for factor in factors.names:
            sizes = [(slot, size) for slot, _, size in places(call, factors, factor)]
            if len({size for _, size in sizes}) < 2 or factor in factors.contiguous:
                continue
            if factor not in factors.windows:
                for way in ways(call, factors, factor, {n: list(w)[:MAX_WAYS] for n, w in found.items()})[1:]:
                    for _, _, parts in dim_parts(call, factors, factor, way) or ():
                        add_way(found, parts)
                continue
            whole, way = whole_size(call, factors, factor), own_way(call, factors, factor)
            if way in found.get(whole, ()):
                pieces = [((part,), *found.get(part, ())) for part in way]
                for finer in islice(product(*pieces), 1, MAX_WAYS):
                    add_way(found, tuple(part for piece in finer for part in piece))


class _Reached:
    """Whether a dim of a value is, through the rules' factors, a dim of a parameter or of something from outside the function."""

    def __init__(self, known: Sequence[tuple[Call, Factors]]) -> None:
        self.makers = {r.name: (call, factors, i) for call, factors in known for i, r in enumerate(call.results)}
        self.found: dict[tuple[str, int], bool] = {}

    def dim(self, name: str, dim: int) -> bool:
        """Walks back to the first operand that has the dim's factor."""
        trail = []
        while (name, dim) not in self.found:
            trail.append((name, dim))
            maker = self.makers.get(name)
            if maker is None:
                self.found[name, dim] = True
                break
            call, factors, number = maker
            source = back(call, factors, number, dim)
            if source is None:
                self.found[name, dim] = False
                break
            name, dim = source
        self.found.update(dict.fromkeys(trail, self.found[name, dim]))
        return self.found[name, dim]


def back(call: Call, factors: Factors, number: int, dim: int) -> tuple[str, int] | None:
    """(operand, dim) that a result's dim comes from; None for a dim that only whole operands make."""
    factor = factors.results[number][dim]
    for slot, place, _ in places(call, factors, factor) if factor else ():
        if slot < len(call.operands):
            return call.operands[slot].name, place
    for extra in factors.extra:
        if extra.results[number].kind == "S" and extra.results[number].dim == dim:
            held = [(call.operands[s].name, t.dim) for s, t in enumerate(extra.operands) if t.kind == "S"]
            if held:
                return held[0]
    return None
