"""What each segment may recompute, and what that keeps, needs and costs: numbers for passes.choose_stages.

    none         nothing
    selective    in layers, the regions that passes.choose_regions finds worth it
    full         whole layers
    auto         any of these and more, chosen with the stages
    a plan       what it lists in `recomputed`

Bytes come from compiler.footprint, seconds from the modelled forward of what runs again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.compiler.footprint import Footprint
from meshwright.compiler.recomputation import NOTHING, WHOLE, Recomputation
from meshwright.passes.choose_regions import Regions
from meshwright.passes.stage_memory import Option

Given = Mapping[str, Recomputation]


def recomputations(regions: Regions, mode: str, given: Given | None) -> dict[str, tuple[Recomputation, ...]]:
    """What every segment may recompute, the cheapest in time first."""
    segments = regions.assignment.kinds.graph.segments
    if given is not None:
        return {s.name: (given.get(s.name, NOTHING),) for s in segments}
    of_kind: dict[str, tuple[Recomputation, ...]] = {}
    for kind in regions.assignment.kinds.by_name:
        if kind not in regions.layers or mode == "none":
            of_kind[kind] = (NOTHING,)
        elif mode == "full":
            of_kind[kind] = (WHOLE,)
        else:
            of_kind[kind] = (regions.selective(kind),) if mode == "selective" else regions.candidates(kind)
    return {s.name: of_kind[s.kind] for s in segments}


def footprints(regions: Regions, wanted: Mapping[str, Sequence[Recomputation]]) -> dict[tuple[str, Recomputation], Footprint]:
    """By segment and what it recomputes. A run measures one recomputation of every kind."""
    kind_of = {s.name: s.kind for s in regions.assignment.kinds.graph.segments}
    by_kind: dict[str, dict[Recomputation, None]] = {kind: {NOTHING: None} for kind in regions.assignment.kinds.by_name}
    for name, found in wanted.items():
        by_kind[kind_of[name]].update(dict.fromkeys(found))
    runs = range(max(map(len, by_kind.values())))
    rounds = [{kind: list(found)[min(r, len(found) - 1)] for kind, found in by_kind.items()} for r in runs]
    measured: dict[tuple[str, Recomputation], Footprint] = {}
    for each in rounds:
        for name, footprint in regions.measurer.measure(each).items():
            measured.setdefault((name, each[kind_of[name]]), footprint)
    return measured


def again_s(regions: Regions, kind: str, forward_s: float, recomputation: Recomputation) -> float:
    """Seconds that a recomputation adds to the backward of a segment."""
    if recomputation.whole or not recomputation.regions:
        return forward_s if recomputation.whole else 0.0
    inside = {p for region in recomputation.regions for p in region}
    trace = regions.trace(kind)
    return sum(s for s, positions in zip(regions.seconds(kind), trace.positions, strict=True) if inside.issuperset(positions))


def option(footprint: Footprint, seconds: float) -> Option:
    """As the solver sees it."""
    return Option(
        footprint.own_bytes, footprint.shared, footprint.transient_bytes, seconds, footprint.forward_bytes, footprint.put_off
    )
