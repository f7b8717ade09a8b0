"""What of a segment runs again in the backward pass: nothing, some regions of ops, or all of it; and how a plan writes that.

A region is positions of ops of a kind, in program order. A plan names its ops as layouts do, module and op: `self_attn.softmax`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.compiler.kinds import Kinds
from meshwright.plans.document import ALL, RecomputedDeclaration
from meshwright.plans.errors import InputError
from meshwright.plans.patterns import expand_all

Positions = tuple[int, ...]


@dataclass(frozen=True)
class Recomputation:
    """What of one segment is recomputed."""

    whole: bool = False
    regions: tuple[Positions, ...] = ()


NOTHING = Recomputation()
WHOLE = Recomputation(whole=True)


def op_texts(kinds: Kinds, kind: str) -> tuple[str, ...]:
    """Names of a kind's ops, by position."""
    return tuple(f"{module}.{name}" for module, name in kinds.keys[kind])


def write_regions(kinds: Kinds, kind: str, recomputation: Recomputation) -> str | list[list[str]]:
    """`regions` of a plan."""
    names = op_texts(kinds, kind)
    return ALL if recomputation.whole else [[names[p] for p in region] for region in recomputation.regions]


def read_recomputed(kinds: Kinds, written: Sequence[RecomputedDeclaration]) -> dict[str, Recomputation]:
    """What is recomputed by segment. InputError names a segment or op that the model lacks, or that is given twice."""
    kind_of = {s.name: s.kind for s in kinds.graph.segments}
    found: dict[str, Recomputation] = {}
    for number, declared in enumerate(written):
        where = f"plan.yaml: recomputed[{number}]"
        for segment in expand_all(declared.segments):
            if segment not in kind_of:
                raise InputError(f"{where}.segments: the model has no segment {segment}; it has {', '.join(kind_of)}")
            if segment in found:
                raise InputError(f"{where}.segments: {segment} is given twice; give all its regions in one place")
            found[segment] = read_regions(kinds, kind_of[segment], declared.regions, where)
    return found


def read_regions(kinds: Kinds, kind: str, regions: str | Sequence[Sequence[str]], where: str) -> Recomputation:
    """The recomputation of segments of a kind."""
    if isinstance(regions, str):
        return WHOLE
    places: Mapping[str, int] = {name: p for p, name in enumerate(op_texts(kinds, kind))}
    taken: set[str] = set()
    for name in (n for region in regions for n in region):
        if name not in places:
            raise InputError(f"{where}.regions: {kind} has no op {name}; its ops are {', '.join(places)}")
        if name in taken:
            raise InputError(f"{where}.regions: {name} is given twice")
        taken.add(name)
    return Recomputation(regions=tuple(tuple(sorted(places[n] for n in region)) for region in regions))
