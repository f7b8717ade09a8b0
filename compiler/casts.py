"""Casts, once and shared: a captured graph with every op in the type that its policy says (compiler.precision).

Two forms of a graph come in, told apart by the dtype of its parameters:
    16-bit   captured in the compute type, so that the model's own casts are in it. They are kept: what the model computes in FP32
             stays so, and is not cast twice
    FP32     captured in FP32 (a factory, a module object, a model that exports in nothing else). Parameters become 16-bit, and all
             casts are those made here

What comes out is a graph like any other: casts are `aten.to.dtype` ops in the module of their first reader. Rules
    a value is cast to a type once in a segment, before its first reader; a cast of a constant is a constant
    a cast back of what was widened is the value it was widened from
    an FP32 value that only became so by promotion goes to other segments in the type that the model has it in: the residual stream
      stays 16-bit. What a policy made FP32 (router logits) stays FP32
    a widening whose only reader widens by itself (the loss, of its logits) is left out
    a mask that is narrowed is clamped first: the smallest FP32 number is an infinity in 16 bits, and a row of those is NaN
    the loss is FP32
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from meshwright.compiler.capture.layers import find_segments
from meshwright.compiler.capture.simplify import assign_levels, drop_no_ops, drop_unused, mark_gradients, merge_equal, rebind, rename
from meshwright.compiler.graph import Graph, Level, Op, Ref, Value
from meshwright.compiler.interpret import call
from meshwright.compiler.kinds import short_name
from meshwright.compiler.precision import HALVES, PROMOTES, Policy

FP32 = "float32"
CAST = "aten.to.dtype"
LOSSES = ("mw.cross_entropy_sum", "mw.token_mean")
"""Ops whose results are FP32 whatever they are given."""
PLAIN_VIEWS = frozenset("view reshape slice flatten transpose permute squeeze unsqueeze".split())


def insert_casts(graph: Graph, dtype: str, policies: Mapping[int, Policy]) -> Graph:
    """The graph with 16-bit parameters of `dtype` ("bfloat16") and casts. `policies` by index of the op."""
    writer = _Writer(graph, dtype)
    for i, op in enumerate(graph.ops):
        if op.level is Level.COMPUTE:
            writer.write(i, op, policies[i])
        else:
            writer.keep(op)
    graph = writer.graph()
    for step in (mark_gradients, assign_levels, drop_no_ops, drop_unused, mark_gradients, merge_equal, rename, find_segments):
        graph = step(graph)
        graph.check()
    return graph


class _Writer:
    """The new ops so far. `now`: the type that each value has in the new graph."""

    def __init__(self, graph: Graph, dtype: str) -> None:
        self.old, self.dtype = graph, dtype
        self.own_casts = any(p.value.dtype == dtype for p in graph.parameters)
        self.now = {name: value.dtype for name, value in graph.values.items()}
        self.now.update({p.value.name: dtype for p in graph.parameters if p.value.dtype == FP32})
        self.place = {r.name: s.name for s in graph.segments for i in s.ops for r in graph.ops[i].results}
        self.segment = {i: s.name for s in graph.segments for i in s.ops}
        self.aliases: dict[str, str] = {}
        self.outside: dict[str, str] = {}
        self.narrow_of: dict[str, str] = {}
        self.known: dict[tuple[str, str, str], str] = {}
        self.values = dict(graph.values)
        self.needless = needless_casts(graph)
        self.ops: list[Op] = []

    def graph(self) -> Graph:
        """The new graph, with an FP32 loss."""
        loss = self.aliases.get(self.old.loss, self.old.loss)
        if self.now[loss] in HALVES:
            loss = self.cast(loss, FP32, self.ops[-1], "")
        parameters = tuple(replace(p, value=replace(p.value, dtype=self.now[p.value.name])) for p in self.old.parameters)
        return replace(self.old, ops=tuple(self.ops), parameters=parameters, loss=loss, segments=())

    def wanted(self, value: Value) -> str:
        """The type that the model has a value in."""
        return self.dtype if value.dtype == FP32 and not self.own_casts else value.dtype

    def keep(self, op: Op) -> None:
        """An op that does not depend on parameters stays as it was captured."""
        self.ops.append(op)

    def write(self, i: int, op: Op, policy: Policy) -> None:
        """One COMPUTE op, after the casts of its operands."""
        segment = self.segment.get(i, "")
        names = {name: self.read(name, segment) for name in op.operands}
        if op.target == CAST and (self.now[names[op.operands[0]]] == self.now[op.name] or i in self.needless):
            self.aliases[op.name] = names[op.operands[0]]
            self.now[op.name] = self.now[names[op.operands[0]]]
            return
        goals = self.goals(op, names, policy)
        names = {name: self.cast(new, goals.get(name, self.now[new]), op, segment, is_mask(op, name)) for name, new in names.items()}
        results = self.results(op, names, policy)
        self.now.update((r.name, r.dtype) for r in results)
        self.values.update((r.name, r) for r in results)
        self.ops.append(replace(rebind(op, names), results=results))
        if op.target == CAST and self.now[op.name] == FP32 and self.now[names[op.operands[0]]] in HALVES:
            self.narrow_of[op.name] = names[op.operands[0]]
        if policy is not Policy.FP32:
            self.narrow_results(op, segment)

    def read(self, name: str, segment: str) -> str:
        """The new name of an operand."""
        name = self.aliases.get(name, name)
        return self.outside[name] if name in self.outside and self.place.get(name) != segment else name

    def goals(self, op: Op, names: Mapping[str, str], policy: Policy) -> dict[str, str]:
        """The types that operands, by their old names, are cast to."""
        floats = {old: self.now[new] for old, new in names.items() if self.now[new] in (*HALVES, FP32)}
        if policy is Policy.COMPUTE:
            goal = self.wanted(op.results[0])
            return dict.fromkeys(floats, goal if goal in (*HALVES, FP32) else self.dtype)
        if policy is Policy.FP32:
            return dict.fromkeys(floats, FP32)
        if policy is Policy.GIVEN:
            return {old: self.old.values[old].dtype if self.own_casts else FP32 for old in floats}
        if short_name(op.target) in PROMOTES or len(set(floats.values())) < 2:
            return {}
        return dict.fromkeys(floats, FP32)

    def cast(self, name: str, goal: str, reader: Op, segment: str, is_mask: bool = False) -> str:
        """A value in a type, in the segment of `reader`."""
        have = self.now[name]
        if have == goal:
            return name
        if have == FP32 and name in self.narrow_of and self.now[self.narrow_of[name]] == goal:
            return self.narrow_of[name]
        key = name, goal, segment
        if key not in self.known:
            source = name
            if is_mask and goal in HALVES:
                lowest = torch.finfo(getattr(torch, goal)).min
                source = self.add("aten.clamp.default", (Ref(name), lowest), name, have, reader.module)
            self.known[key] = made = self.add(CAST, (Ref(source), getattr(torch, goal)), name, goal, reader.module)
            if goal == FP32:
                self.narrow_of[made] = name
        return self.known[key]

    def add(self, target: str, args: tuple[object, ...], source: str, dtype: str, module: str) -> str:
        """A new op on a value; its result's name."""
        name = f"{source}_{dtype}"
        while name in self.values:
            name += "_"
        value = replace(self.values[source], name=name, dtype=dtype)
        self.values[name], self.now[name] = value, dtype
        self.ops.append(Op(target, args, (), (value,), module))
        return name

    def results(self, op: Op, names: Mapping[str, str], policy: Policy) -> tuple[Value, ...]:
        """Results in the types that they now have."""
        if op.target in LOSSES:
            return tuple(replace(r, dtype=FP32) for r in op.results)
        if policy is Policy.COMPUTE:
            goals = {self.now[names[n]] for n in op.operands} & {*HALVES, FP32}
            return tuple(replace(r, dtype=min(goals)) if r.dtype in (*HALVES, FP32) and len(goals) == 1 else r for r in op.results)
        if all(self.now[new] == self.old.values[old].dtype for old, new in names.items()):
            return op.results
        metas = {old: torch.empty(self.values[new].shape, dtype=getattr(torch, self.now[new]), device="meta") for old, new in names.items()}
        found = call(op, metas)
        return tuple(replace(r, dtype=str(t.dtype).removeprefix("torch.")) for r, t in zip(op.results, found, strict=True))

    def narrow_results(self, op: Op, segment: str) -> None:
        """Casts back what was promoted to FP32 and other segments read."""
        for result in op.results:
            goal = self.wanted(self.old.values[result.name])
            leaves = any(self.segment.get(reader, segment) != segment for reader in self.old.consumers.get(result.name, ()))
            if leaves and self.now[result.name] == FP32 and goal in HALVES and result.shape:
                self.outside[result.name] = self.cast(result.name, goal, op, segment)


def needless_casts(graph: Graph) -> frozenset[int]:
    """Indices of widening casts of logits that only the loss reads, through views."""
    found = set()
    for op in graph.ops:
        if op.target != "mw.cross_entropy_sum":
            continue
        name = op.operands[0]
        while len(graph.consumers.get(name, ())) == 1 and name in graph.producers:
            place = graph.producers[name]
            made = graph.ops[place]
            if made.target == CAST and made.results[0].dtype == FP32 and graph.values[made.operands[0]].dtype in HALVES:
                found.add(place)
                break
            if short_name(made.target) not in PLAIN_VIEWS or len(made.results) > 1:
                break
            name = made.operands[0]
    return frozenset(found)


def is_mask(op: Op, name: str) -> bool:
    """Whether an operand is the mask of an attention."""
    if op.target != "aten.scaled_dot_product_attention.default":
        return False
    given = op.args[3] if len(op.args) > 3 else dict(op.kwargs).get("attn_mask")
    return isinstance(given, Ref) and given.name == name
