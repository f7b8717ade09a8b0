"""What every segment costs on one rank under chosen layouts: the numbers that stages are cut by.

    seconds      per micro-batch: each op on its share, conversions of its operands, forward and backward
    parameters   bytes of the local shards that the segment reads
    weights      the part of the backward that is weight gradients
    activations  bytes that autograd keeps for one micro-batch, with or without recomputation (passes.recompute_options)
    boundary     bytes that cross to the next segment when a stage is cut behind it: every value made so far that is still needed

Costs are computed once per kind and repeated for its members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.compiler.assignment import TRAFFIC, Assignment
from meshwright.compiler.costs import all_to_all_s, conversion_s
from meshwright.compiler.emission.columns import column_groups
from meshwright.compiler.experts import EP
from meshwright.compiler.flops import ITEM_BYTES, op_time_s, short_name, value_bytes
from meshwright.compiler.graph import Op, Segment
from meshwright.compiler.hardware import Hardware
from meshwright.compiler.recomputation import NOTHING, Recomputation, write_regions
from meshwright.passes.choose_regions import Regions
from meshwright.passes.choose_stages import SegmentCost, StageCost
from meshwright.passes.overlap import linear_input, linear_input_s, matmuls
from meshwright.passes.recompute_options import again_s, footprints, option, recomputations
from meshwright.passes.segment_graph import crossing, segment_graph, topological
from meshwright.passes.stage_memory import Option
from meshwright.passes.step_end import FP32_BYTES
from meshwright.plans.layout import I, R, Type, conversion
from meshwright.plans.mesh import Mesh
from meshwright.plans.patterns import compress

EXPERT_PRODUCTS = frozenset(("grouped_mm_fallback",))
PUT_OFF = frozenset(("linear", "addmm")) | EXPERT_PRODUCTS
"""Products whose weight gradients the runtime can put off: of stored weights, and of expert weights however they are transposed."""
SAVES_NOTHING = frozenset("add sub neg rsub cat stack mean sum to contiguous clone dropout embedding view reshape transpose permute expand "
                          "slice select split chunk unsqueeze squeeze token_mean split_with_sizes flatten pad".split())
SAVES_RESULTS = frozenset("tanh sigmoid exp rsqrt sqrt softmax log_softmax relu reciprocal cross_entropy_sum".split())


@dataclass(frozen=True)
class Pricing:
    """The setting in which segments are priced. `regions` knows what they keep and what of them is worth recomputing; `recomputed`: what a
    plan says is, by segment."""

    assignment: Assignment
    mesh: Mesh
    hardware: Hardware
    regions: Regions
    recompute: str = "none"
    recomputed: Mapping[str, Recomputation] | None = None

    def local_bytes(self, name: str, type_: Type | None = None) -> int:
        """Bytes of a value on one rank."""
        value = self.assignment.kinds.graph.values[name]
        type_ = self.assignment.type_of(name) if type_ is None else type_
        share = self.assignment.ranks if type_.kind == "S" else 1
        parameter = self.assignment.kinds.graph.parameter_of.get(name)
        if parameter is not None and parameter.path in self.assignment.expert_paths:
            share *= self.mesh.ep
        return value_bytes(value) // share

    def master_bytes(self, name: str) -> int:
        """Bytes of a parameter on one rank in FP32, whatever programs read."""
        return self.local_bytes(name) * FP32_BYTES // ITEM_BYTES[self.assignment.kinds.graph.values[name].dtype]


def segment_costs(pricing: Pricing) -> tuple[SegmentCost, ...]:
    """One cost per segment, in order."""
    kinds = pricing.assignment.kinds
    times = {name: kind_seconds(pricing, kind.representative) for name, kind in kinds.by_name.items()}
    put_off = {name: weight_seconds(pricing, kind.representative) for name, kind in kinds.by_name.items()}
    boundaries = boundary_bytes(pricing)
    ways = segment_options(pricing, {kind: forward for kind, (forward, _) in times.items()})
    called = {s.name: call_seconds(pricing, s) for s in kinds.graph.segments}
    return tuple(
        SegmentCost(
            name=s.name,
            forward_s=times[s.kind][0] + called[s.name][0],
            backward_s=times[s.kind][1] + called[s.name][1],
            parameter_bytes={path: pricing.master_bytes(name) for path, name in segment_parameters(pricing, s)},
            activation_bytes=ways[s.name][0].own_bytes,
            boundary_bytes=boundaries[i][0],
            answer_bytes=boundaries[i][1],
            weight_s=put_off[s.kind],
            shared_bytes=ways[s.name][0].shared,
            transient_bytes=ways[s.name][0].transient_bytes,
            options=ways[s.name],
            constant_bytes=pricing.regions.measurer.constant_bytes,
        )
        for i, s in enumerate(kinds.graph.segments)
    )


def segment_options(pricing: Pricing, forward_s: Mapping[str, float]) -> dict[str, tuple[Option, ...]]:
    """What every segment may recompute, as numbers; in the order of `allowed`. `forward_s` by kind."""
    wanted = allowed(pricing)
    found = footprints(pricing.regions, wanted)
    kind_of = {s.name: s.kind for s in pricing.assignment.kinds.graph.segments}
    return {
        name: tuple(
            option(found[name, each], again_s(pricing.regions, kind_of[name], forward_s[kind_of[name]], each)) for each in ways
        )
        for name, ways in wanted.items()
    }


def allowed(pricing: Pricing) -> dict[str, tuple[Recomputation, ...]]:
    """What every segment may recompute."""
    return recomputations(pricing.regions, pricing.recompute, pricing.recomputed)


def recomputed_of(pricing: Pricing, segments: Sequence[SegmentCost], stages: Sequence[StageCost]) -> list[dict[str, object]]:
    """`recomputed` of a plan: for every run of segments that do the same, the regions, what one frees and what it costs."""
    wanted = allowed(pricing)
    kinds = pricing.assignment.kinds
    nothing = footprints(pricing.regions, {s.name: (NOTHING,) for s in kinds.graph.segments})
    costs = {s.name: s for s in segments}
    kind_of = {s.name: s.kind for s in kinds.graph.segments}
    rows: dict[tuple[int, str, Recomputation, int, float], list[str]] = {}
    for stage, cost in enumerate(stages):
        for name, number in zip(cost.segments, cost.taken, strict=True):
            chosen, way = wanted[name][number], costs[name].ways[number]
            if chosen != NOTHING:
                frees = nothing[name, NOTHING].kept_bytes - way.own_bytes - sum(way.shared.values())
                rows.setdefault((stage, kind_of[name], chosen, frees, way.seconds), []).append(name)
    return [
        {"segments": compress(names), "regions": write_regions(kinds, kind, chosen), "frees": frees, "costs_s": seconds}
        for (_, kind, chosen, frees, seconds), names in rows.items()
    ]


def kept_of_segments(segments: Sequence[SegmentCost], stages: Sequence[StageCost]) -> dict[str, int]:
    """Bytes that autograd keeps for each segment and micro-batch."""
    costs = {s.name: s for s in segments}
    taken = {name: costs[name].ways[number] for stage in stages for name, number in zip(stage.segments, stage.taken, strict=True)}
    return {name: way.own_bytes + sum(way.shared.values()) for name, way in taken.items()}


def segment_parameters(pricing: Pricing, segment: Segment) -> tuple[tuple[str, str], ...]:
    """(path, graph name) of every parameter a segment reads."""
    graph = pricing.assignment.kinds.graph
    names = dict.fromkeys(n for i in segment.ops for n in graph.ops[i].operands if n in graph.parameter_of)
    return tuple((graph.parameter_of[n].path, n) for n in names)


def kind_seconds(pricing: Pricing, segment: Segment) -> tuple[float, float]:
    """(forward, backward) seconds of one micro-batch through a segment."""
    forward, backward = compute_seconds(pricing, segment)
    for before, after in conversion_seconds(pricing, segment).values():
        forward, backward = forward + before, backward + after
    moves = expert_moves_s(pricing, segment.kind)
    forward, backward = forward + moves, backward + moves
    return forward, backward


def compute_seconds(pricing: Pricing, segment: Segment) -> tuple[float, float]:
    """The same of its ops alone, each on its share."""
    assignment = pricing.assignment
    graph = assignment.kinds.graph
    forward = backward = 0.0
    for position, i in enumerate(segment.ops):
        op, strategy = graph.ops[i], assignment.strategies[segment.kind, position]
        split = any(t.kind == "S" for t in (*strategy.operands, *strategy.results))
        cost = op_time_s(op, graph.values, 1 / assignment.ranks if split else 1.0, pricing.hardware)
        forward, backward = forward + cost[0], backward + cost[1]
    return forward, backward


def conversion_seconds(pricing: Pricing, segment: Segment) -> dict[tuple[str, Type, Type], tuple[float, float]]:
    """(forward, backward) seconds of every conversion in a kind's function, without what hides beside the matmuls of linears."""
    assignment, graph = pricing.assignment, pricing.assignment.kinds.graph
    link = pricing.hardware.link_for(assignment.axis, pricing.mesh)
    beside = {
        linear_input(ops[0], graph): matmuls(ops, graph, assignment.ranks, pricing.hardware)
        for positions in column_groups(assignment, segment.kind).values()
        if (ops := [graph.ops[segment.ops[position]] for position in positions])
    }
    found = {}
    for name, source, target in kind_conversions(assignment, segment):
        value, size = graph.values[name], pricing.local_bytes(name, I)
        if target == R and name in beside:
            found[name, source, target] = linear_input_s(source, len(value.shape), size, assignment.ranks, link, beside[name])
        else:
            found[name, source, target] = conversion_s(source, target, size, assignment.ranks, link, value.requires_grad)
    return found


def weight_seconds(pricing: Pricing, segment: Segment) -> float:
    """Seconds of the backward that are weight gradients which a schedule can put off (runtime.main_gradients): half of a product's."""
    assignment, graph = pricing.assignment, pricing.assignment.kinds.graph
    total = 0.0
    for position, i in enumerate(segment.ops):
        op, strategy = graph.ops[i], assignment.strategies[segment.kind, position]
        weights = [n for n in op.operands if n in graph.parameter_of or short_name(op) in EXPERT_PRODUCTS]
        if short_name(op) not in PUT_OFF or not any(graph.values[n].requires_grad and len(graph.values[n].shape) > 1 for n in weights):
            continue
        split = any(t.kind == "S" for t in (*strategy.operands, *strategy.results))
        total += op_time_s(op, graph.values, 1 / assignment.ranks if split else 1.0, pricing.hardware)[1] / 2
    return total


def expert_moves_s(pricing: Pricing, kind: str) -> float:
    """Seconds of one direction of the all-to-alls of a kind's experts, for balanced counts."""
    link = pricing.hardware.link_for(EP, pricing.mesh)
    names = [n for region in pricing.assignment.regions.get(kind, ()) for n in (*region.entering, *region.leaving)]
    return sum(all_to_all_s(pricing.local_bytes(name), pricing.mesh.ep, link) for name in names)


def kind_conversions(assignment: Assignment, segment: Segment) -> tuple[tuple[str, Type, Type], ...]:
    """(value, source type, target type) of every conversion in a kind's function, each once."""
    entered = assignment.entry_types(segment.kind)
    found: dict[tuple[str, Type, Type], None] = {}
    for position, i in enumerate(segment.ops):
        strategy = assignment.strategies[segment.kind, position]
        for name, need in zip(assignment.kinds.graph.ops[i].operands, strategy.operands, strict=True):
            source = entered.get(name, assignment.type_of(name))
            if source != need:
                found[name, source, need] = None
    return tuple(found)


def call_conversions(assignment: Assignment, segment: Segment) -> tuple[tuple[str, Type, Type], ...]:
    """(value, source type, target type) of what is converted where a segment is called: its kind takes it as the last member's is."""
    names = assignment.kinds.externals(segment)
    pairs = ((name, assignment.type_of(name), assignment.entry_type(segment.kind, place)) for place, name in enumerate(names))
    return tuple((name, source, target) for name, source, target in pairs if source != target)


def call_conversion_seconds(pricing: Pricing, segment: Segment) -> dict[tuple[str, Type, Type], tuple[float, float]]:
    """(forward, backward) seconds of every conversion at a segment's call."""
    link = pricing.hardware.link_for(pricing.assignment.axis, pricing.mesh)
    values = pricing.assignment.kinds.graph.values
    return {
        (name, source, target): conversion_s(
            source, target, pricing.local_bytes(name, I), pricing.assignment.ranks, link, values[name].requires_grad
        )
        for name, source, target in call_conversions(pricing.assignment, segment)
    }


def call_seconds(pricing: Pricing, segment: Segment) -> tuple[float, float]:
    """The same in all."""
    times = call_conversion_seconds(pricing, segment).values()
    return sum(forward for forward, _ in times), sum(backward for _, backward in times)


def collective_seconds(pricing: Pricing) -> dict[str, float]:
    """Seconds of one micro-batch through the whole model that each collective takes, forward and backward, without what is hidden. The
    second gather of a linear's input counts with the collective on that input's gradient."""
    kinds = pricing.assignment.kinds
    found: dict[str, float] = {}
    converted = [(len(k.members), c) for k in kinds.by_name.values() for c in conversion_seconds(pricing, k.representative).items()]
    converted += [(1, c) for segment in kinds.graph.segments for c in call_conversion_seconds(pricing, segment).items()]
    for count, ((_, source, target), times) in converted:
        names = conversion(source, target)
        for collective, time_s in zip((names.forward, names.backward), times, strict=True):
            if collective in TRAFFIC and time_s:
                found[collective] = found.get(collective, 0.0) + time_s * count
    for kind in kinds.by_name.values():
        if moves := expert_moves_s(pricing, kind.name):
            found["all-to-all"] = found.get("all-to-all", 0.0) + 2 * moves * len(kind.members)
    return found


Typed = list[tuple[str, Type]]


def what_is_saved(op: Op, operands: Typed, results: Typed) -> Typed:
    """The tensors that autograd keeps of an op: its operands, unless its derivative needs its results or nothing at all."""
    name = short_name(op)
    if name in SAVES_NOTHING or (name in ("mul", "div") and len(operands) == 1):
        return []
    if name in SAVES_RESULTS:
        return results
    return operands + (results if name == "scaled_dot_product_attention" else [])


def boundary_bytes(pricing: Pricing) -> tuple[tuple[int, int], ...]:
    """For each segment, bytes of all values made up to it that later segments read, and of those that get a gradient."""
    graph = segment_graph(pricing.assignment.kinds)
    known = pricing.assignment.kinds.graph.values
    found = []
    for names in crossing(graph, topological(graph)):
        sizes = {name: pricing.local_bytes(name) for name in names}
        found.append((sum(sizes.values()), sum(size for name, size in sizes.items() if known[name].requires_grad)))
    return tuple(found)
