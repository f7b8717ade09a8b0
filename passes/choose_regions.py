"""Which ops of a layer are worth recomputing: connected regions that free many bytes for the seconds that they take.

    at_price(kind, p)     the regions that free most, when a second of recomputation may be paid for p bytes (passes.solver_recompute)
    selective(kind)       those at SELECTIVE times the price of recomputing the whole layer
    candidates(kind)      nothing, regions at several prices, and the whole layer: what `auto` chooses from

The price of a layer is what recomputing all of it frees, per second of its forward. Regions that do twice as well are what Korthikanti
et al. (arXiv 2205.05198, section 5) recompute: the core of eager attention frees the scores, which grow with the square of the sequence,
for two small products. Nothing goes by name: what is kept and what it takes is known of every op. Ops that talk to other ranks are in no
region that is chosen; they run again when the whole layer does, or when a plan says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.compiler.assignment import Assignment
from meshwright.compiler.emission.regions import Body, Region, Tangled
from meshwright.compiler.flops import op_time_s
from meshwright.compiler.footprint import Footprint, Measurer
from meshwright.compiler.hardware import Hardware
from meshwright.compiler.recomputation import NOTHING, WHOLE, Recomputation
from meshwright.compiler.tracing import Trace, trace_kinds
from meshwright.passes.solver_recompute import Statements, solve_regions

SELECTIVE = 2.0
PRICES = (8.0, 2.0, 0.5)
"""Of `auto`, in prices of the whole layer."""


@dataclass
class Regions:
    """Regions of the layers of a model under some layouts. What was found is kept."""

    measurer: Measurer
    hardware: Hardware
    _traces: dict[str, Trace] = field(default_factory=dict)
    _found: dict[tuple[str, float], Recomputation] = field(default_factory=dict)

    @property
    def assignment(self) -> Assignment:
        return self.measurer.assignment

    @property
    def layers(self) -> tuple[str, ...]:
        """Kinds that may be recomputed: those of layers."""
        return tuple(name for name, kind in self.assignment.kinds.by_name.items() if kind.representative.prefix)

    def footprint(self, kind: str, recomputation: Recomputation) -> Footprint:
        """Of the first segment of a kind."""
        found = self.measurer.measure({kind: recomputation} if recomputation != WHOLE else dict.fromkeys(self.layers, WHOLE))
        return found[self.assignment.kinds.by_name[kind].representative.name]

    def trace(self, kind: str) -> Trace:
        if not self._traces:
            self._traces.update(trace_kinds(self.assignment, self.measurer.mesh, self.layers))
        return self._traces[kind]

    def seconds(self, kind: str) -> tuple[float, ...]:
        """Of each statement's forward."""
        assignment, graph = self.assignment, self.assignment.kinds.graph
        ops = assignment.kinds.by_name[kind].representative.ops
        found = []
        for positions in self.trace(kind).positions:
            total = 0.0
            for position in positions:
                strategy = assignment.strategies[kind, position]
                split = any(t.kind == "S" for t in (*strategy.operands, *strategy.results))
                total += op_time_s(graph.ops[ops[position]], graph.values, 1 / assignment.ranks if split else 1.0, self.hardware)[0]
            found.append(total)
        return tuple(found)

    def layer_price(self, kind: str) -> float:
        """Bytes that recomputing a whole layer frees, per second."""
        freed = self.footprint(kind, NOTHING).kept_bytes - self.footprint(kind, WHOLE).kept_bytes
        seconds = sum(self.seconds(kind))
        return freed / seconds if seconds and freed > 0 else 0.0

    def selective(self, kind: str) -> Recomputation:
        """What selective recomputation of a kind is."""
        return self.at_price(kind, SELECTIVE)

    def candidates(self, kind: str) -> tuple[Recomputation, ...]:
        """What `auto` may do to a segment of a kind."""
        if kind not in self.layers:
            return (NOTHING,)
        return tuple(dict.fromkeys((NOTHING, *(self.at_price(kind, p) for p in PRICES), WHOLE)))

    def at_price(self, kind: str, times: float) -> Recomputation:
        """The best regions at some times the price of the whole layer."""
        if (kind, times) not in self._found:
            trace, price = self.trace(kind), self.layer_price(kind)
            chosen = solve_regions(problem(trace, self.seconds(kind)), times * price) if price else frozenset[int]()
            body = trace.body
            movers = frozenset(i for i, positions in enumerate(trace.positions) if not positions)
            regions = worthwhile(trace, in_order(body, chosen, movers))
            by_position = (tuple(sorted(p for i in region for p in trace.positions[i])) for region in regions)
            self._found[kind, times] = Recomputation(regions=tuple(sorted(by_position)))
        return self._found[kind, times]


def problem(trace: Trace, seconds: tuple[float, ...]) -> Statements:
    """A trace as the solver sees it."""
    body = trace.body
    movers: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
        i: (() if set(body.statements[i].binds) & set(body.returned) else body.readers[i], body.operands[i])
        for i, positions in enumerate(trace.positions)
        if not positions
    }
    free = frozenset(i for i, positions in enumerate(trace.positions) if positions) & trace.movable
    fixed = frozenset(movers) - trace.movable
    named = [[name for name in s.reads if name in trace.of_name] for s in body.statements]
    read = tuple(frozenset((body.maker.get(name), t) for name in names for t in trace.of_name[name]) for names in named)
    return Statements(seconds, trace.saved, read, trace.num_bytes, free, movers, fixed)


def kept_bytes(trace: Trace, regions: tuple[Region, ...]) -> int:
    """What autograd keeps of a layer when some regions are recomputed."""
    inside = {i for region in regions for i in region}
    kept = {t for i, saved in enumerate(trace.saved) if i not in inside for t in saved}
    for region in regions:
        made = {t for i in region for t in trace.made[i]}
        kept |= {t for i in region for t in trace.read[i] if t not in made}
    return sum(trace.num_bytes[t] for t in kept)


def worthwhile(trace: Trace, regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """Regions without which more would be kept."""
    found = regions
    for region in regions:
        others = tuple(r for r in found if r != region)
        if kept_bytes(trace, others) <= kept_bytes(trace, found):
            found = others
    return found


def in_order(body: Body, chosen: frozenset[int], movers: frozenset[int]) -> tuple[Region, ...]:
    """Regions of the chosen statements, without those that would have gradients summed in another order: no bit of a result changes."""
    while True:
        regions = untangled(body, body.split(body.grown(chosen, movers)))
        moved = body.moved(regions)
        if not moved:
            return regions
        chosen = chosen - moved if chosen & moved else frozenset()


def untangled(body: Body, regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """As many regions, the largest first, as do not wait for each other's results."""
    found: tuple[Region, ...] = ()
    for region in sorted(regions, key=len, reverse=True):
        try:
            body.order((*found, region))
        except Tangled:
            continue
        found = (*found, region)
    return found
