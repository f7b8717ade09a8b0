"""Search over meshes, micro-batches, schedules, recomputation and ZeRO stages: what is legal, and what is not worth pricing.

    Space        what may be combined: values that the version has, or the ones that were given
    combinations every legal Combination of a space, and how many each rule refused
    search       prices combinations in order of a lower bound; those whose bound is no better than what is known are ruled out

Rules
    pp dp tp = devices, ep divides dp; tp within a node where there are several devices in one (Megatron-LM, arXiv 2104.04473, section 3.2,
    takeaway 1); pp times chunks no more than the model's segments; the global batch a multiple of dp times the micro-batch; ZeRO where
    dp > 1; schedules and chunks where pp > 1
Bounds
    time     every micro-batch goes through all segments, on pp ranks:   micro-batches x max(sum of seconds / pp, longest segment)
    memory   the fullest of pp ranks holds at least the mean, and some rank the largest segment
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf

from meshwright.passes.choose_stages import SegmentCost
from meshwright.passes.step_end import Holding
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.plans.units import format_bytes, format_seconds

PLAIN = "1f1b"
"""The schedule of a pipeline of one stage, when none is given: all are alike."""
KEPT = 5
"""Meshes that are reported, each with its best combination."""


@dataclass(frozen=True)
class Combination:
    """One way to use the devices."""

    mesh: Mesh
    micro_batch: int
    schedule: str
    chunks: int
    recompute: str
    zero: int

    def __str__(self) -> str:
        chunks = f" chunks={self.chunks}" if self.chunks > 1 else ""
        return f"{self.mesh} micro_batch={self.micro_batch} {self.schedule}{chunks} recompute={self.recompute} zero={self.zero}"


@dataclass(frozen=True)
class Space:
    """What may be combined. `experts`: sizes of ep that spread them; `node`: devices that the fastest link joins (None: all)."""

    devices: int
    global_batch: int
    micro_batches: Sequence[int]
    schedules: Sequence[tuple[str, int]]
    recompute: Sequence[str]
    zero: Sequence[int]
    experts: Sequence[int]
    segments: int
    node: int | None


@dataclass(frozen=True)
class Priced:
    """A combination's modelled step and fullest rank; `parts` of the step by what they are for."""

    combination: Combination
    step_s: float
    memory_bytes: int
    parts: Mapping[str, float]


@dataclass(frozen=True)
class TooLarge:
    """A combination that does not fit, and what its fullest rank would need at least."""

    combination: Combination
    needs_bytes: int


@dataclass
class Found:
    """What a search found. `ruled_out` were not priced: they cannot be faster than `bound_s`."""

    legal: int = 0
    priced: list[Priced] = field(default_factory=list)
    too_large: list[TooLarge] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    ruled_out: int = 0
    bound_s: float = inf

    def best_meshes(self) -> list[Priced]:
        """The best combination of each mesh, the fastest first."""
        best: dict[Mesh, Priced] = {}
        for priced in sorted(self.priced, key=rank):
            best.setdefault(priced.combination.mesh, priced)
        return list(best.values())


def rank(priced: Priced) -> tuple[float, int, int, int]:
    """Faster, then smaller, then simpler. Times that differ by less than one part in 10,000 are equal."""
    way = priced.combination
    return float(f"{priced.step_s:.4g}"), priced.memory_bytes, way.zero, way.chunks


def divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def meshes(devices: int, experts: Sequence[int]) -> Iterator[Mesh]:
    """Every mesh of so many devices; ep over experts only."""
    for tp in divisors(devices):
        for pp in divisors(devices // tp):
            dp = devices // tp // pp
            yield from (Mesh(pp=pp, dp=dp, tp=tp, ep=ep) for ep in experts if dp % ep == 0)


def combinations(space: Space, refused: Counter[str]) -> Iterator[Combination]:
    """Legal combinations; what others break is counted in `refused`."""
    for mesh, micro_batch in product(meshes(space.devices, space.experts), space.micro_batches):
        if space.node is not None and space.node > 1 and mesh.tp > space.node:
            refused[f"tp larger than the {space.node} devices of a node"] += 1
        elif space.global_batch % (mesh.dp * micro_batch):
            refused[f"global_batch={space.global_batch} no multiple of dp * micro_batch"] += 1
        elif mesh.pp > space.segments:
            refused[f"pp larger than the model's {space.segments} segments"] += 1
        else:
            plain = sorted(space.schedules, key=lambda way: (way[1], way[0] != PLAIN))[:1]
            ways = [way for way in space.schedules if mesh.pp * way[1] <= space.segments] if mesh.pp > 1 else plain
            zeros = space.zero if mesh.dp > 1 else space.zero[:1]
            for (schedule, chunks), recompute, zero in product(ways, space.recompute, zeros):
                yield Combination(mesh, micro_batch, schedule, chunks, recompute, zero)


def least_step_s(segments: Sequence[SegmentCost], pp: int, micro_batches: int) -> float:
    """No schedule is faster."""
    seconds = [s.forward_s + s.backward_s for s in segments]
    return micro_batches * max(sum(seconds) / pp, *seconds)


def least_memory(segments: Sequence[SegmentCost], pp: int, holding: Holding) -> int:
    """No cut needs less on its fullest rank, with one micro-batch in flight."""
    shared = {path: size for s in segments for path, size in s.parameter_bytes.items()}
    whole = sum(map(holding.total, shared.values())) + sum(s.activation_bytes for s in segments)
    own = [sum(map(holding.total, s.parameter_bytes.values())) + s.activation_bytes for s in segments]
    return max(-(-whole // pp), *own)


Segments = Callable[[Combination], Sequence[SegmentCost]]
Price = Callable[[Combination], Priced | TooLarge]


def search(ways: Iterable[Combination], segments: Segments, price: Price, global_batch: int, limit_bytes: int, found: Found) -> None:
    """Adds what pricing `ways` gives to `found`."""
    bounded: list[tuple[float, int, Combination]] = []
    for way in ways:
        try:
            costs = segments(way)
        except InputError as error:
            found.refused[str(error)] += 1
            continue
        found.legal += 1
        count = global_batch // (way.mesh.dp * way.micro_batch)
        needs = least_memory(costs, way.mesh.pp, Holding(1, way.zero, way.mesh.dp, count))
        if needs > limit_bytes:
            found.too_large.append(TooLarge(way, needs))
        else:
            bounded.append((least_step_s(costs, way.mesh.pp, count), len(bounded), way))
    for bound, _, way in sorted(bounded):
        best = found.best_meshes()
        known = best[KEPT - 1].step_s if len(best) >= KEPT else inf
        own = next((p.step_s for p in best if p.combination.mesh == way.mesh), inf)
        if bound >= min(known, own):
            found.ruled_out += 1
            found.bound_s = min(found.bound_s, bound)
            continue
        try:
            answer = price(way)
        except InputError as error:
            found.refused[str(error)] += 1
            continue
        if isinstance(answer, TooLarge):
            found.too_large.append(answer)
        else:
            found.priced.append(answer)


def report(devices: int, found: Found, limit_bytes: int) -> tuple[str, ...]:
    """The best meshes and why each was not the first; what did not fit; what was not priced."""
    best = found.best_meshes()[:KEPT]
    lines = [f"search: {devices} devices, {found.legal} legal combinations, {len(found.priced)} priced"]
    for number, priced in enumerate(best):
        cost = f"{format_seconds(priced.step_s)} a step, {format_bytes(priced.memory_bytes)} on the fullest rank"
        lines.append(f"  {number + 1}. {priced.combination}: {cost}{'; ' + why(best[0], priced) if number else ', chosen'}")
    if found.too_large:
        nearest = min(found.too_large, key=lambda t: t.needs_bytes)
        needs = f"the nearest, {nearest.combination}, needs {format_bytes(nearest.needs_bytes)}"
        lines.append(f"  {len(found.too_large)} do not fit {format_bytes(limit_bytes)}; {needs}")
    if found.ruled_out:
        lines.append(f"  {found.ruled_out} were ruled out unpriced: their steps take {format_seconds(found.bound_s)} at least")
    lines += [f"  {count} refused: {reason}" for reason, count in found.refused.most_common(3)]
    return tuple(lines)


def why(best: Priced, other: Priced) -> str:
    """How much slower, and through what most; or what else was worse."""
    more = other.step_s - best.step_s
    if rank(other)[0] == rank(best)[0]:
        return f"as fast, {format_bytes(other.memory_bytes - best.memory_bytes)} more memory"
    part = max(other.parts, key=lambda name: other.parts[name] - best.parts.get(name, 0.0))
    grown = other.parts[part] - best.parts.get(part, 0.0)
    return f"{more / best.step_s:+.1%}, most of it {part} ({format_seconds(grown)} more)"


def nothing_fits(devices: int, found: Found, limit_bytes: int, larger: str) -> str:
    """One line: which constraint binds, by how much, and what would fit."""
    if found.too_large:
        nearest = min(found.too_large, key=lambda t: t.needs_bytes)
        over = nearest.needs_bytes - limit_bytes
        return (
            f"devices: none of {found.legal} combinations of {devices} devices fits memory_limit {format_bytes(limit_bytes)}: the nearest, "
            f"{nearest.combination}, needs {format_bytes(nearest.needs_bytes)} on a rank, {format_bytes(over)} too much; "
            f"allow {nearest.needs_bytes} bytes, or use {larger}a smaller seq"
        )
    reasons = "; ".join(f"{reason} ({count})" for reason, count in found.refused.most_common(4)) or "nothing may be combined"
    return f"devices: no legal mesh of {devices} devices: {reasons}; use another number of devices or another global_batch"
