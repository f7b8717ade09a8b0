"""What autograd keeps for each statement of a kind's function: the numbers that regions to recompute are chosen by.

The function's statements (compiler.emission.regions) run one at a time on fake tensors, under saved-tensor hooks. Tensors are told by their
storage, so that views of one count once; parameters, constants and model inputs are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.compiler.assignment import Assignment
from meshwright.compiler.emission.function import FunctionWriter
from meshwright.compiler.emission.regions import Body
from meshwright.compiler.experts import EP
from meshwright.compiler.footprint import Function, Record, Trial, run_trial, storage_id
from meshwright.plans.mesh import Mesh

Storage = int
"""A number per storage."""


@dataclass(frozen=True)
class Trace:
    """A kind's function as it runs.

    positions   positions of the ops whose results each statement makes; () for one that only moves a value
    saved       storages that autograd keeps for each statement
    read        storages of the operands of each
    made        storages that each makes
    movable     statements that may be recomputed by choice: those that make tensors alone and use no mesh axis
    of_name     storages of what each name stands for
    num_bytes   of every storage that counts
    """

    body: Body
    positions: tuple[tuple[int, ...], ...]
    saved: tuple[frozenset[Storage], ...]
    read: tuple[frozenset[Storage], ...]
    made: tuple[frozenset[Storage], ...]
    movable: frozenset[int]
    of_name: Mapping[str, frozenset[Storage]]
    num_bytes: Mapping[Storage, int]


class Tracer(Trial):
    """A Trial that also runs the statements of some kinds one by one."""

    def __init__(self, assignment: Assignment, mesh: Mesh, kinds: Sequence[str]) -> None:
        super().__init__(assignment, mesh)
        self._writers = {kind: FunctionWriter(assignment, mesh, kind) for kind in kinds}
        self._axes = (assignment.axis, EP)
        self.traces: dict[str, Trace] = {}

    def _measure(self, kind: str, run: Function, args: Sequence[object]) -> Record:
        if kind in self._writers:
            self.traces[kind] = self._trace(kind, run.args[1].__globals__, run.args[2], args)  # type: ignore[attr-defined]
        return super()._measure(kind, run, args)

    def _trace(self, kind: str, module: Mapping[str, object], weights: object, args: Sequence[object]) -> Trace:
        writer = self._writers[kind]
        body = writer.body()
        given = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]
        names: dict[str, object] = {**module, "rt": self, "w": weights, **dict(zip(body.known, given, strict=True))}
        names.update((axis, self.axis(axis)) for axis in self._axes)
        num_bytes: dict[Storage, int] = {}
        saved, read, made, movable = [], [], [], set()
        for i, statement in enumerate(body.statements):
            kept: set[Storage] = set()

            def pack(x: Tensor, kept: set[Storage] = kept) -> Tensor:
                kept.update(self._counted([x], num_bytes))
                return x

            with saved_tensors_hooks(pack, lambda x: x):
                exec(compile("\n".join(statement.lines), "<statement>", "exec"), names)  # noqa: S102 - text of our own emission
            results = [names[name] for name in statement.binds]
            saved.append(frozenset(kept))
            read.append(self._counted([names[name] for name in statement.reads if name in body.maker or name in body.known], num_bytes))
            made.append(self._counted(results, num_bytes) - read[-1])
            if all(isinstance(x, Tensor) for x in results) and not set(statement.reads) & set(self._axes):
                movable.add(i)
        ops = {writer.texts[r.name]: p for p, o in enumerate(writer.segment.ops) for r in writer.graph.ops[o].results}
        positions = tuple(tuple(dict.fromkeys(ops[n] for n in s.binds if n in ops)) for s in body.statements)
        of_name = {name: self._counted([names[name]], num_bytes) for name in (*body.known, *body.maker)}
        return Trace(body, positions, tuple(saved), tuple(read), tuple(made), frozenset(movable), of_name, num_bytes)

    def _counted(self, values: Sequence[object], num_bytes: dict[Storage, int]) -> frozenset[Storage]:
        """Storages of tensors, with their bytes; what is there for good is left out."""
        tensors = [x for x in values if isinstance(x, Tensor) and storage_id(x) not in self.permanent]
        num_bytes.update((storage_id(x), x.untyped_storage().nbytes()) for x in tensors)
        return frozenset(map(storage_id, tensors))


def trace_kinds(assignment: Assignment, mesh: Mesh, kinds: Sequence[str]) -> dict[str, Trace]:
    """Traces of some kinds."""
    tracer = Tracer(assignment, mesh, kinds)
    run_trial(tracer, assignment, mesh, {})
    return tracer.traces
