"""The captured graph as an immutable value: single assignment, static shapes, the model's own names.

Terms
    Value     a tensor of the graph: name, global shape, dtype, whether a gradient flows into it
    Op        one ATen call. Its tensor operands are `Ref`s inside args/kwargs (also nested in lists); it may have several results
    level     what an op depends on: CONSTANT (neither inputs nor parameters: folded, run once at load), INPUT (model inputs but
              no parameters: rematerialised in every stage that needs it), COMPUTE (parameters)
    segment   a run of consecutive COMPUTE ops: one layer (`model.layers.3`), or what lies before, between and after the layers
              (`embedding`, `bridge`, `head`)
    kind      segments that are the same program up to parameter names; every decision is made once per kind

Shapes are those of one micro-batch on one data-parallel rank before any other sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Level(Enum):
    CONSTANT = "constant"
    INPUT = "input"
    COMPUTE = "compute"


@dataclass(frozen=True)
class Ref:
    """An operand: the name of a Value."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Value:
    """A tensor. `dtype` is torch's name without prefix ("float32")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False


@dataclass(frozen=True)
class Parameter:
    """A parameter: `value.name` is its graph name, `path` the model's own name ("model.layers.0.mlp.up_proj.weight").

    Tied parameters are one Parameter; `aliases` has the other model names.
    """

    value: Value
    path: str
    aliases: tuple[str, ...] = ()
    trainable: bool = True


@dataclass(frozen=True)
class Op:
    """One call. `target` is the op's qualified name ("aten.linear.default", "mw.cross_entropy_sum").

    args/kwargs hold literals, Refs, and lists or tuples of them. `module` is the path of the innermost module.
    """

    target: str
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    results: tuple[Value, ...]
    module: str = ""
    level: Level = Level.COMPUTE

    @property
    def name(self) -> str:
        return self.results[0].name

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensor operands in order of appearance (args, then kwargs), repeats included."""
        found: list[str] = []
        _collect(self.args, found)
        for _, item in self.kwargs:
            _collect(item, found)
        return tuple(found)

    def __str__(self) -> str:
        call = ", ".join([*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs)])
        results = ", ".join(f"%{r.name}:{r.dtype}{list(r.shape)}" for r in self.results)
        return f"{results} = {self.target}({call})"


def aten_packet(target: str) -> str:
    """"aten.linear.default" -> "linear"; "" for an op that is not ATen's, whatever its name."""
    return target.split(".")[1] if target.startswith("aten.") else ""


def iter_refs(tree: object) -> Iterator[Ref]:
    """Refs of a nested args structure, in order."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from iter_refs(item)


def _collect(tree: object, found: list[str]) -> None:
    """Appends the names of the Refs of a nested structure, in order."""
    if isinstance(tree, Ref):
        found.append(tree.name)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _collect(item, found)


def map_refs(tree: object, fn: Callable[[Ref], object]) -> object:
    """The same structure with every Ref replaced by fn(ref)."""
    if isinstance(tree, Ref):
        return fn(tree)
    if isinstance(tree, list):
        return [map_refs(item, fn) for item in tree]
    if isinstance(tree, tuple):
        return tuple([map_refs(item, fn) for item in tree])
    return tree


@dataclass(frozen=True)
class Segment:
    """Consecutive COMPUTE ops graph.ops[i] for i in `ops`.

    name      `model.layers.3`, `embedding`, `bridge`, `bridge.1`, `head`
    prefix    module path that parameter names are relative to ("model.layers.3"), "" outside layers
    kind      name of the kind; segments of one kind match op by op
    """

    name: str
    prefix: str
    kind: str
    ops: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A captured model.

    inputs       model inputs (one micro-batch), e.g. input_ids (B, S)
    denominators scalar inputs the engine gives: the global number of loss targets, one per recognised cross-entropy
    counts       for each denominator, the INPUT-level value that counts this micro-batch's targets (int64 scalar)
    parameters   every parameter the ops use, tied ones once
    buffers      name -> model path of buffers that CONSTANT ops read
    ops          in program order
    loss         name of the scalar result: this micro-batch's contribution to the global loss
    segments     all COMPUTE ops, in order
    notes        what capture could not do as asked, in one line each
    """

    inputs: tuple[Value, ...]
    denominators: tuple[Value, ...]
    counts: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[tuple[Value, str], ...]
    ops: tuple[Op, ...]
    loss: str
    segments: tuple[Segment, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def values(self) -> dict[str, Value]:
        """All values by name."""
        found = {v.name: v for v in (*self.inputs, *self.denominators, *(b for b, _ in self.buffers))}
        found.update((p.value.name, p.value) for p in self.parameters)
        found.update((r.name, r) for op in self.ops for r in op.results)
        return found

    @cached_property
    def producers(self) -> dict[str, int]:
        """Index of the op that makes each op result."""
        return {r.name: i for i, op in enumerate(self.ops) for r in op.results}

    @cached_property
    def parameter_of(self) -> dict[str, Parameter]:
        """Parameters by graph name."""
        return {p.value.name: p for p in self.parameters}

    @cached_property
    def consumers(self) -> dict[str, tuple[int, ...]]:
        """Indices of the ops that read each value, each once."""
        found: dict[str, dict[int, None]] = {}
        for i, op in enumerate(self.ops):
            for name in op.operands:
                found.setdefault(name, {})[i] = None
        return {name: tuple(ops) for name, ops in found.items()}

    def check(self) -> None:
        """Raises ValueError naming the op when a value is read before it is made or made twice."""
        known = {v.name for v in (*self.inputs, *self.denominators, *(b for b, _ in self.buffers))}
        known |= {p.value.name for p in self.parameters}
        for op in self.ops:
            for name in op.operands:
                if name not in known:
                    raise ValueError(f"op {op.name} ({op.module or 'model'}) reads %{name} before it is made:\n{op}")
            for result in op.results:
                if result.name in known:
                    raise ValueError(f"value %{result.name} is made twice, again by:\n{op}")
                known.add(result.name)
        if self.loss not in known:
            raise ValueError(f"loss %{self.loss} is not a value of the graph")

    def __str__(self) -> str:
        return "\n".join(f"{op.level.value:8} {op.module:40} {op}" for op in self.ops)
