"""Name patterns: many names that differ in an index, written once.

    model.layers.{0..14}.mlp.up_proj.weight      an inclusive range
    model.layers.{0..14..2}.mlp.up_proj.weight   every second index
    model.layers.{0,2,5..7}.mlp.up_proj.weight   a list of indices and ranges

An *index* is a whole dotted component made of digits ("0", "17"; not the "1" of "fc1"). A pattern with several brace
groups stands for every combination, the leftmost group varying slowest. `compress` is the inverse of `expand` on sets
of names: the patterns stand for every name once and for nothing else, in the order in which their first names came.
Where names hold several indices, the leftmost one (the layer) is grouped first.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import TypeVar

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

MAX_NAMES = 1_000_000
"""A pattern that stands for more names than this is taken for a mistake."""

_GROUP = re.compile(r"\{([^{}]*)\}")
_INDEX = re.compile(r"(?<![^.])(?:0|[1-9]\d{0,8})(?![^.])")
_ITEM = re.compile(r"(\d{1,9})(?:\.\.(\d{1,9})(?:\.\.(\d{1,9}))?)?")
_FORMS = "a range {0..14}, a list {0,2,5} or a step {0..14..2}"


def expand(pattern: str) -> tuple[str, ...]:
    """The names that a pattern stands for; ValueError when it is not written as a pattern."""
    literals = _GROUP.split(pattern)
    groups = [_indices(pattern, text) for text in literals[1::2]]
    if any(c in text for text in literals[0::2] for c in "{}"):
        raise ValueError(f"pattern {pattern!r} has a brace without its partner; write {_FORMS}")
    if not groups:
        return (pattern,)
    if prod(map(len, groups)) > MAX_NAMES:
        raise ValueError(f"pattern {pattern!r} stands for more than {MAX_NAMES:,} names")
    template = "{}".join(literals[0::2])
    return tuple(template.format(*indices) for indices in product(*groups))


def expand_all(patterns: Iterable[str]) -> tuple[str, ...]:
    """Names of several patterns in order; ValueError when a name comes twice."""
    return tuple(expand_mapping(dict.fromkeys(_unique(patterns))))


def expand_mapping(mapping: Mapping[str, T]) -> dict[str, T]:
    """{name: value} of {pattern: value}; ValueError when two patterns stand for the same name."""
    found: dict[str, T] = {}
    for pattern, value in mapping.items():
        names = expand(pattern)
        if clash := next((name for name in names if name in found), None):
            other = next(p for p in mapping if clash in expand(p))
            raise ValueError(f"{clash!r} is named twice, by {other!r} and by {pattern!r}")
        found.update(dict.fromkeys(names, value))
    return found


def compress(names: Iterable[str]) -> list[str]:
    """Patterns that stand for exactly these names; ValueError for a repeated name or one that holds a brace."""
    return list(compress_mapping(dict.fromkeys(_unique(names))))


def compress_mapping(mapping: Mapping[str, H]) -> dict[str, H]:
    """{pattern: value} of {name: value}: names of equal form and equal value share a pattern."""
    groups: dict[tuple[str, H], list[tuple[int, ...]]] = {}
    for name, value in mapping.items():
        if "{" in name or "}" in name:
            raise ValueError(f"name {name!r} holds a brace, which patterns use")
        template, indices = form(name)
        groups.setdefault((template, value), []).append(indices)
    return {
        template.format(*map(_index_text, box)): value
        for (template, value), members in groups.items()
        for box in _boxes(members)
    }


def form(name: str) -> tuple[str, tuple[int, ...]]:
    """A name without its indices, and the indices: ("model.layers.{}.norm", (3,))."""
    return _INDEX.sub("{}", name), tuple(int(text) for text in _INDEX.findall(name))


def _unique(names: Iterable[str]) -> list[str]:
    seen: dict[str, None] = {}
    for name in names:
        if name in seen:
            raise ValueError(f"{name!r} is named twice")
        seen[name] = None
    return list(seen)


def _indices(pattern: str, text: str) -> tuple[int, ...]:
    """Indices of one brace group's text, in order, each once."""
    found: dict[int, None] = {}
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"pattern {pattern!r}: {{{text}}} is none of {_FORMS}")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step < 1:
            raise ValueError(f"pattern {pattern!r}: {item.strip()} runs backwards; a range is FIRST..LAST")
        if (last - first) // step >= MAX_NAMES:
            raise ValueError(f"pattern {pattern!r} stands for more than {MAX_NAMES:,} names")
        for index in range(first, last + 1, step):
            if index in found:
                raise ValueError(f"pattern {pattern!r}: index {index} is given twice")
            found[index] = None
    return tuple(found)


def _boxes(members: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Splits index tuples into products of index sets, grouping by the leftmost index first."""
    if not members[0]:
        return [()]
    firsts: dict[tuple[int, ...], set[int]] = {}
    for first, *rest in members:
        firsts.setdefault(tuple(rest), set()).add(first)
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for rest_indices, group in firsts.items():
        alike.setdefault(tuple(sorted(group)), []).append(rest_indices)
    return [(group, *box) for group, rests in alike.items() for box in _boxes(rests)]


def _index_text(indices: tuple[int, ...]) -> str:
    """Text of ascending indices: `3`, `{0..14}`, `{0..14..2}`, `{0,2,5..7}`."""
    if len(indices) == 1:
        return str(indices[0])
    step = indices[1] - indices[0]
    if len(indices) > 2 and step > 1 and indices == tuple(range(indices[0], indices[-1] + 1, step)):
        return f"{{{indices[0]}..{indices[-1]}..{step}}}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return "{" + ",".join(f"{r[0]}..{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs) + "}"
