"""What the program of each pipeline stage holds: its segments, the values that cross its borders, and what it reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.compiler.assignment import Assignment
from meshwright.compiler.emission.function import function_name, local_shape
from meshwright.compiler.graph import Graph, Level, Segment, Value
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.recomputation import NOTHING, Recomputation
from meshwright.plans.mesh import Mesh

FunctionKey = tuple[str, tuple[tuple[int, ...], ...]]
"""(kind, its recomputed regions)."""


@dataclass(frozen=True)
class Staging:
    """A graph cut into stages: which segments each has, what of them is recomputed, and which values cross."""

    assignment: Assignment
    mesh: Mesh
    stages: tuple[tuple[Segment, ...], ...]
    recomputed: Mapping[str, Recomputation] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        return self.assignment.kinds.graph

    @property
    def kinds(self) -> Kinds:
        return self.assignment.kinds

    def recomputation(self, segment: Segment) -> Recomputation:
        """What of a segment runs again in the backward pass."""
        return self.recomputed.get(segment.name, NOTHING)

    def functions(self, stage: int) -> dict[FunctionKey, str]:
        """Names of a stage's functions: a kind's own, and numbered ones where regions of it are recomputed."""
        found: dict[FunctionKey, str] = {}
        count: dict[str, int] = {}
        for segment in self.stages[stage]:
            key = segment.kind, self.recomputation(segment).regions
            if key in found:
                continue
            name = function_name(segment.kind)
            if key[1]:
                number = count[segment.kind] = count.get(segment.kind, 0) + 1
                name += "_recomputing" if number == 1 else f"_recomputing_{number}"
            found[key] = name
        return found

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """Stage of each segment by name."""
        return {s.name: k for k, segments in enumerate(self.stages) for s in segments}

    @cached_property
    def crossings(self) -> tuple[tuple[Value, ...], ...]:
        """For each stage, the values it receives, in the order in which they are made."""
        received: list[list[Value]] = [[] for _ in self.stages]
        for segment in self.graph.segments:
            made_in = self.stage_of[segment.name]
            for value in self.kinds.result_values(segment):
                last = max(
                    (
                        self.stage_of[self.kinds.segment_of_op[i].name]
                        for i in self.graph.consumers.get(value.name, ())
                        if i in self.kinds.segment_of_op
                    ),
                    default=made_in,
                )
                for k in range(made_in + 1, last + 1):
                    received[k].append(value)
        return tuple(map(tuple, received))

    def boundary(self, stage: int) -> tuple[tuple[str, tuple[int, ...], str, bool], ...]:
        """RECEIVES of a stage."""
        axis = self.assignment.axis
        return tuple(
            (v.name, local_shape(v, self.assignment.type_of(v.name), axis, self.mesh), v.dtype, v.requires_grad)
            for v in self.crossings[stage]
        )


@dataclass(frozen=True)
class StageReads:
    """What a stage reads from outside its segments."""

    parameters: tuple[str, ...]
    constants: tuple[str, ...]
    constant_ops: tuple[int, ...]
    input_ops: tuple[int, ...]
    count_ops: tuple[int, ...]
    inputs: tuple[str, ...]
    count_inputs: tuple[str, ...]
    buffers: tuple[tuple[str, str], ...]
    denominators: tuple[int, ...]


def slice_back(graph: Graph, wanted: Iterable[str], level: Level) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ops of one level that `wanted` values need, in program order, and every value that those ops read from elsewhere."""
    stack, ops, leaves = list(wanted), set[int](), dict[str, None]()
    seen: set[str] = set()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        i = graph.producers.get(name)
        if i is None or graph.ops[i].level is not level:
            leaves[name] = None
            continue
        ops.add(i)
        stack.extend(graph.ops[i].operands)
    return tuple(sorted(ops)), tuple(leaves)


def stage_reads(staging: Staging, stage: int) -> StageReads:
    """Everything that a stage needs besides received values."""
    graph, kinds = staging.graph, staging.kinds
    segments = staging.stages[stage]
    externals = dict.fromkeys(name for s in segments for name in kinds.externals(s))
    used = {name for s in segments for i in s.ops for name in graph.ops[i].operands}
    denominators = tuple(j for j, v in enumerate(graph.denominators) if v.name in used)
    input_ops, leaves = slice_back(graph, externals, Level.INPUT)
    count_ops, count_leaves = slice_back(graph, [graph.counts[j] for j in denominators], Level.INPUT)
    constant_ops, constant_leaves = slice_back(graph, [*leaves, *count_leaves], Level.CONSTANT)
    made_once = {r.name for i in constant_ops for r in graph.ops[i].results}
    read = [n for i in (*input_ops, *count_ops) for n in graph.ops[i].operands]
    direct = [*externals, *read, *(graph.counts[j] for j in denominators)]
    buffers = {b.name: path for b, path in graph.buffers}
    constants = tuple(dict.fromkeys(n for n in direct if n in made_once or n in buffers))
    model_inputs = [v.name for v in graph.inputs]
    return StageReads(
        parameters=tuple(p.path for p in graph.parameters if p.value.name in used),
        constants=constants,
        constant_ops=constant_ops,
        input_ops=input_ops,
        count_ops=count_ops,
        inputs=tuple(n for n in model_inputs if n in leaves),
        count_inputs=tuple(n for n in model_inputs if n in count_leaves),
        buffers=tuple((n, buffers[n]) for n in buffers if n in constant_leaves or n in constants),
        denominators=denominators,
    )
