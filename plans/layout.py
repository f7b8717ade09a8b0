"""Layouts: how a tensor lies on the mesh, and what its gradient is.

On every mesh axis a tensor has one of four types. The type fixes the forward value and the gradient:

    S(d)   each rank holds a slice of dim d        the gradient is sliced alike
    I      the same on every rank (invariant)      the gradient is the same on every rank
    R      the same on every rank, but each rank   the ranks' gradients sum to the true one
           may use it for something else
    P      the ranks' values sum to the true one   the gradient is the same on every rank

`S(d:a+b+c)` is a slice of dim d by sections: the dim is a concatenation of sections of a, b and c entries, and each
rank holds its slice of every section, in order (a packed q/k/v projection sharded by head).

A conversion between two types is a linear map and its transpose; CONVERSIONS names the collectives of both:

    forward value of source -> value of destination;  backward: gradient of destination -> gradient of source

A layout is the tuple of types on all axes. Its text is `S(1)@tp`, `S(0)@cp P@tp`; `I` stands for invariant everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.plans.mesh import AXES, Mesh


@dataclass(frozen=True)
class Type:
    """One axis' type. `kind` is one of "S", "I", "R", "P"; `dim` and `sections` belong to "S"."""

    kind: str
    dim: int = -1
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("S", "I", "R", "P"):
            raise ValueError(f"layout type {self.kind!r} is none of S, I, R, P")
        if (self.kind == "S") != (self.dim >= 0):
            raise ValueError(f"layout type {self.kind} with dim {self.dim}: S has a dim of 0 or more, the others none")
        if self.kind != "S" and self.sections:
            raise ValueError(f"layout type {self.kind} cannot have sections")

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim}:{'+'.join(map(str, self.sections))})" if self.sections else f"S({self.dim})"

    @classmethod
    def parse(cls, text: str) -> Type:
        """Type from its text; ValueError says what a type looks like."""
        match = re.fullmatch(r"([IRP])|S\((\d+)(?::(\d+(?:\+\d+)*))?\)", text.strip())
        if match is None:
            raise ValueError(f"layout type {text!r} is none of I, R, P, S(dim), S(dim:a+b)")
        if match[1]:
            return cls(match[1])
        return cls("S", int(match[2]), tuple(map(int, match[3].split("+"))) if match[3] else ())


I = Type("I")  # noqa: E741 - the theory's own letter
R = Type("R")
P = Type("P")


def shard(dim: int, sections: tuple[int, ...] = ()) -> Type:
    """S(dim), or S(dim:a+b) by sections."""
    return Type("S", dim, sections if len(sections) > 1 else ())


@dataclass(frozen=True)
class Conversion:
    """Collectives of a conversion: `forward` on the value, `backward` on the gradient."""

    forward: str
    backward: str


CONVERSIONS: Mapping[tuple[str, str], Conversion] = {
    ("I", "R"): Conversion("identity", "all-reduce"),
    ("I", "S"): Conversion("slice", "all-gather"),
    ("I", "P"): Conversion("first", "identity"),
    ("R", "I"): Conversion("identity", "first"),
    ("R", "S"): Conversion("slice", "pad"),
    ("R", "P"): Conversion("first", "first"),
    ("P", "I"): Conversion("all-reduce", "identity"),
    ("P", "R"): Conversion("all-reduce", "all-reduce"),
    ("P", "S"): Conversion("reduce-scatter", "all-gather"),
    ("S", "I"): Conversion("all-gather", "slice"),
    ("S", "R"): Conversion("all-gather", "reduce-scatter"),
    ("S", "P"): Conversion("pad", "slice"),
    ("S", "S"): Conversion("all-to-all", "all-to-all"),
}
"""By kinds. identity: as it is. slice: this rank's slice of the dim. pad: this rank's slice, zeros elsewhere.
first: as it is on the first rank, zeros on the others."""


def conversion(source: Type, target: Type) -> Conversion:
    """The collectives that turn `source` into `target`; identity when they are the same."""
    if source == target:
        return Conversion("identity", "identity")
    return CONVERSIONS[source.kind, target.kind]


@dataclass(frozen=True)
class Layout:
    """Types per axis; axes at `I` are left out. Build it with `Layout.of({"tp": shard(0)})`."""

    types: tuple[tuple[str, Type], ...] = ()

    @classmethod
    def of(cls, types: Mapping[str, Type]) -> Layout:
        for axis in types:
            if axis not in AXES:
                raise ValueError(f"layout names axis {axis!r}; the axes are {', '.join(AXES)}")
        return cls(tuple((a, types[a]) for a in AXES if a in types and types[a] != I))

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Layout from its text: `I`, `S(1)@tp`, `S(0)@cp P@tp`."""
        words = text.split()
        if words == ["I"]:
            return cls()
        types: dict[str, Type] = {}
        for word in words:
            type_text, at, axis = word.partition("@")
            if not at:
                raise ValueError(f"layout {text!r}: {word!r} has no axis; write it as S(0)@tp, or I alone")
            if axis in types:
                raise ValueError(f"layout {text!r}: axis {axis} is given twice")
            types[axis] = Type.parse(type_text)
        if not types:
            raise ValueError("layout is empty; write I for the same on every rank")
        return cls.of(types)

    def on(self, axis: str) -> Type:
        """The type on one axis."""
        return dict(self.types).get(axis, I)

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """Shape of one rank's part; ValueError when a sharded dim does not divide."""
        local = list(shape)
        for axis, type_ in self.types:
            if type_.kind != "S":
                continue
            if type_.dim >= len(shape):
                raise ValueError(f"layout {self} shards dim {type_.dim} of a tensor of shape {shape}")
            ranks = mesh.size(axis)
            if type_.sections and sum(type_.sections) != shape[type_.dim]:
                raise ValueError(f"layout {self}: sections add up to {sum(type_.sections)}, the dim has {shape[type_.dim]}")
            for part in type_.sections or (local[type_.dim],):
                if part % ranks:
                    raise ValueError(f"layout {self}: {part} of shape {shape} does not divide by {axis}={ranks}")
            local[type_.dim] //= ranks
        return tuple(local)

    def __str__(self) -> str:
        return " ".join(f"{t}@{a}" for a, t in self.types) or "I"


def local_slices(type_: Type, length: int, ranks: int, index: int) -> tuple[tuple[int, int], ...]:
    """[start, stop) ranges along a sharded dim of `length` that rank `index` of `ranks` holds, in order.

    One range per section. ValueError when a section does not divide.
    """
    if type_.kind != "S":
        raise ValueError(f"layout type {type_} is not a slice")
    ranges = []
    start = 0
    for part in type_.sections or (length,):
        if part % ranks:
            raise ValueError(f"a dim part of {part} does not divide by {ranks} ranks")
        width = part // ranks
        ranges.append((start + index * width, start + (index + 1) * width))
        start += part
    if start != length:
        raise ValueError(f"sections add up to {start}, the dim has {length}")
    return tuple(ranges)
