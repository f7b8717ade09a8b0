"""The device mesh: named axes, ranks and coordinates, with no devices behind it.

Terms
    axis        a mesh axis, one of AXES; never a tensor dim
    size        number of ranks along an axis (1 when not named)
    coordinate  a rank's index along an axis

Ranks are numbered with `tp` varying fastest and `pp` slowest (pp, dp, cp, tp), so that the ranks which talk
most share a node (Narayanan et al., arXiv 2104.04473, section 3). `ep` shares ranks with `dp`: ep divides dp, and
the ep coordinate is the dp coordinate modulo ep. So a weight sliced on ep has dp/ep replicas, on the ranks that differ
in dp and share the ep coordinate: they form the groups along EXPERT_REPLICAS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

AXES = ("pp", "dp", "cp", "tp", "ep")
RANK_AXES = ("pp", "dp", "cp", "tp")
EXPERT_REPLICAS = "edp"
"""Names the part of dp that is not ep ("expert data parallel"): it has a size and groups, and is no axis of layouts."""


@dataclass(frozen=True)
class Mesh:
    """Sizes per axis. `Mesh(pp=2, tp=2)` has four ranks.

    Raises ValueError for a size below 1, or an ep that does not divide dp.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh axis {axis} is {size!r}; a size is a whole number of 1 or more")
        if self.dp % self.ep:
            raise ValueError(f"mesh ep={self.ep} does not divide dp={self.dp}; ep shares ranks with dp")

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Mesh:
        """Mesh from {axis: size}; ValueError names an axis that does not exist."""
        for axis in sizes:
            if axis not in AXES:
                raise ValueError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}")
        return cls(**sizes)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Mesh from 'pp=2,dp=2,tp=2'."""
        sizes: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            axis, equals, size = part.partition("=")
            if not equals or not size.strip().lstrip("-").isdigit():
                raise ValueError(f"mesh {text!r}: {part!r} is not AXIS=SIZE, as in pp=2,dp=2,tp=2")
            if axis.strip() in sizes:
                raise ValueError(f"mesh {text!r}: axis {axis.strip()!r} is given twice")
            sizes[axis.strip()] = int(size)
        return cls.of(sizes)

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`, one of AXES or EXPERT_REPLICAS."""
        if axis == EXPERT_REPLICAS:
            return self.dp // self.ep
        if axis not in AXES:
            raise ValueError(f"unknown mesh axis {axis!r}; the axes are {', '.join(AXES)}")
        return int(getattr(self, axis))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.size(a) for a in RANK_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """{axis: coordinate} of a rank; ValueError when the rank is not on the mesh."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not on the mesh {self}, which has ranks 0 to {self.world_size - 1}")
        found: dict[str, int] = {}
        for axis in reversed(RANK_AXES):
            rank, found[axis] = divmod(rank, self.size(axis))
        return {**{a: found[a] for a in RANK_AXES}, "ep": found["dp"] % self.ep}

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Ranks that differ from `rank` along `axis` (or EXPERT_REPLICAS) only, in order of their coordinate."""
        at = self.coordinates(rank)
        place = {a: at[a] for a in RANK_AXES}
        if axis == "ep":
            first = at["dp"] - at["ep"]
            return tuple(self.rank(**{**place, "dp": first + i}) for i in range(self.ep))
        if axis == EXPERT_REPLICAS:
            return tuple(self.rank(**{**place, "dp": i}) for i in range(at["ep"], self.dp, self.ep))
        return tuple(self.rank(**{**place, axis: i}) for i in range(self.size(axis)))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along `axis`, each once, by lowest rank."""
        seen: dict[tuple[int, ...], None] = {}
        for rank in range(self.world_size):
            seen.setdefault(self.group(rank, axis))
        return tuple(seen)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """(axis, size) for every axis, in order."""
        return ((a, self.size(a)) for a in AXES)

    def __str__(self) -> str:
        return ",".join(f"{a}={n}" for a, n in self.sizes() if n > 1) or "pp=1"
