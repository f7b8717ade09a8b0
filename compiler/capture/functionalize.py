"""In-place ops and views to pure ops.

An in-place op on %v makes a new value that stands for %v from then on. When %v is a view, the new value is written back into
what it views (slice -> slice_scatter, select -> select_scatter, transpose -> transpose ...), up to the tensor that owns the
storage; other views of the same storage are made again when they are next read.

    `current[v]`   the value that now stands for v
    `views[v]`     (parent, op) for values that share the storage of their parent
    `stale`        views whose parent has been written since they were made

What has no exact pure form is an InputError that names the op and its module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from meshwright.compiler.graph import Graph, Op, Ref, Value, aten_packet, map_refs
from meshwright.plans.errors import InputError

RESHAPES = frozenset({"view", "reshape", "squeeze", "unsqueeze", "flatten", "unflatten", "_unsafe_view", "view_as"})
SAME = frozenset({"alias", "to", "contiguous", "lift_fresh", "expand_as", "detach"})


def is_in_place(target: str) -> bool:
    """aten.add_.Tensor, aten.copy_.default: an op packet that ends in one underscore (not aten.__and__)."""
    packet = aten_packet(target)
    return packet.endswith("_") and not packet.endswith("__")


def functionalize(graph: Graph, aliases: Mapping[str, str]) -> Graph:
    """The same computation without in-place ops; gradients must be marked. Graphs that have none come back as they are."""
    if not any(is_in_place(op.target) for op in graph.ops):
        return graph
    return _Functionalization(graph, aliases).run()


class _Functionalization:
    def __init__(self, graph: Graph, aliases: Mapping[str, str]) -> None:
        self.graph = graph
        self.aliases = aliases
        self.ops: list[Op] = []
        self.current: dict[str, str] = {}
        self.views: dict[str, tuple[str, Op, int]] = {}
        self.children: dict[str, list[str]] = {}
        self.stale: set[str] = set()
        self.values: dict[str, Value] = dict(graph.values)
        self.fresh = 0

    def run(self) -> Graph:
        for op in self.graph.ops:
            if is_in_place(op.target):
                self._write(op)
            else:
                self._keep(op)
        loss = self._read(self.graph.loss)
        return replace(self.graph, ops=tuple(self.ops), loss=loss)

    def _keep(self, op: Op) -> None:
        """A pure op, reading what now stands for its operands; its results may be views."""
        self.ops.append(self._rebound(op))
        for index, result in enumerate(op.results):
            parent = self.aliases.get(result.name)
            if parent is not None:
                self.views[result.name] = (parent, op, index)
                self.children.setdefault(parent, []).append(result.name)

    def _rebound(self, op: Op) -> Op:
        def read(ref: Ref) -> Ref:
            return Ref(self._read(ref.name))

        args = map_refs(op.args, read)
        kwargs = tuple((name, map_refs(item, read)) for name, item in op.kwargs)
        assert isinstance(args, tuple)
        return replace(op, args=args, kwargs=kwargs)

    def _read(self, name: str) -> str:
        """What now stands for a value, made again first when a write made it stale."""
        if name in self.stale:
            self.stale.discard(name)
            _, op, index = self.views[name]
            again = self._rebound(op)
            results = tuple(self._named(r, r.name) for r in again.results)
            self.ops.append(replace(again, results=results))
            self.current[name] = results[index].name
        return self.current.get(name, name)

    def _named(self, like: Value, stem: str, **changes: object) -> Value:
        """A new value like another one."""
        self.fresh += 1
        value = replace(like, name=f"{stem}_w{self.fresh}", **changes)  # type: ignore[arg-type]
        self.values[value.name] = value
        return value

    def _emit(self, target: str, args: tuple[object, ...], like: Value, stem: str, module: str) -> str:
        result = self._named(like, stem)
        self.ops.append(Op(target, args, (), (result,), module))
        return result.name

    def _write(self, op: Op) -> None:
        """An in-place op: its pure form, then the write-back along the views."""
        written = op.args[0]
        if not isinstance(written, Ref):
            raise InputError(f"{op.module or 'model'}: {op.target} writes into something that is not one tensor")
        pure = self._pure(self._rebound(op), op)
        self.ops.append(pure)
        result = op.results[0].name
        new = self._cast(pure, self.values[written.name], op)
        self.current[result] = new
        self._store(written.name, new, op)
        self.views[result] = (written.name, Op("aten.alias.default", (written,), (), op.results, op.module), 0)
        self.children.setdefault(written.name, []).append(result)

    def _pure(self, rebound: Op, op: Op) -> Op:
        """aten.add_.Tensor -> aten.add.Tensor; copy_, fill_ and zero_ have forms of their own."""
        _, packet, overload = op.target.split(".")
        own = op.results[0]
        result = self._named(own, own.name)
        if packet in ("copy_", "fill_") and isinstance(rebound.args[1], Ref):
            source = self._broadcast(rebound.args[1].name, own, op)
            return Op("aten.to.dtype", (Ref(source), _dtype(own)), (), (result,), op.module)
        if packet in ("fill_", "zero_"):
            fill = rebound.args[1] if packet == "fill_" else 0
            args = (list(own.shape), fill)
            return Op("aten.full.default", args, (("dtype", _dtype(own)),), (result,), op.module)
        name = packet[:-1]
        found = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if found is None:
            raise InputError(f"{op.module or 'model'}: in-place op {op.target} has no pure form that is supported")
        result = self._typed(found, rebound, result)
        return replace(rebound, target=f"aten.{name}.{overload}", results=(result,))

    def _typed(self, function: Callable[..., object], rebound: Op, result: Value) -> Value:
        """The dtype that the pure op gives, which promotion may make another than the written tensor's."""

        def meta(ref: Ref) -> torch.Tensor:
            value = self.values[ref.name]
            return torch.empty(value.shape, dtype=_dtype(value), device="meta")

        args = map_refs(rebound.args, meta)
        kwargs = {name: map_refs(item, meta) for name, item in rebound.kwargs}
        made = function(*args, **kwargs)  # type: ignore[misc]
        assert isinstance(made, torch.Tensor)
        typed = replace(result, dtype=str(made.dtype).removeprefix("torch."))
        self.values[typed.name] = typed
        return typed

    def _broadcast(self, name: str, like: Value, op: Op) -> str:
        source = self.values[name]
        if source.shape == like.shape:
            return name
        expanded = replace(source, shape=like.shape)
        return self._emit("aten.expand.default", (Ref(name), list(like.shape)), expanded, f"{op.name}_source", op.module)

    def _cast(self, pure: Op, like: Value, op: Op) -> str:
        made = pure.results[0]
        if made.dtype == like.dtype:
            return made.name
        return self._emit("aten.to.dtype", (Ref(made.name), _dtype(like)), like, op.name, op.module)

    def _store(self, name: str, new: str, op: Op) -> None:
        """Makes `new` stand for value `name`, writes it into what that views, and marks other views stale."""
        if name in self.graph.parameter_of:
            path = self.graph.parameter_of[name].path
            raise InputError(f"{op.module or 'model'}: {op.target} writes into parameter {path}, which training owns")
        self.current[name] = new
        self.stale.discard(name)
        self._spoil(name, new)
        if name not in self.views:
            return
        parent, view, index = self.views[name]
        written = self._scatter(parent, view, index, new, op)
        self._store_parent(parent, written, name, op)

    def _store_parent(self, parent: str, written: str, child: str, op: Op) -> None:
        self._store(parent, written, op)
        self.stale.discard(child)
        self._unspoil(child)

    def _spoil(self, name: str, new: str) -> None:
        """All views below a value have to be made again."""
        for child in self.children.get(name, ()):
            self.stale.add(child)
            self._spoil(child, new)

    def _unspoil(self, name: str) -> None:
        """The written view itself is up to date, and what it views was made from it; views below it stay stale."""
        self.stale.discard(name)

    def _scatter(self, parent: str, view: Op, index: int, new: str, op: Op) -> str:
        """The parent's value with its view replaced by `new`."""
        packet = view.target.split(".")[1]
        like = self.values[parent]
        current = Ref(self._read(parent))
        stem = f"{parent}_{op.target.split('.')[1].rstrip('_')}"

        def emit(target: str, *args: object) -> str:
            return self._emit(target, args, like, stem, op.module)

        rest = view.args[1:]
        if packet == "detach" and like.requires_grad and parent not in self.graph.parameter_of:
            raise InputError(f"{op.module or 'model'}: {op.target} writes, without gradient, into a value that carries one")
        if packet in SAME and like.dtype == self.values[new].dtype and like.shape == self.values[new].shape:
            return new
        if packet in RESHAPES and packet != "expand":
            return emit("aten.view.default", Ref(new), list(like.shape))
        if packet in ("transpose", "t"):
            return emit("aten.transpose.int", Ref(new), *(rest if packet == "transpose" else (0, 1)))
        if packet == "permute" and isinstance(rest[0], (list, tuple)):
            dims = [d % len(like.shape) for d in rest[0]]
            return emit("aten.permute.default", Ref(new), [dims.index(i) for i in range(len(dims))])
        if packet == "slice":
            return emit("aten.slice_scatter.default", current, Ref(new), *rest)
        if packet == "select":
            return emit("aten.select_scatter.default", current, Ref(new), *rest)
        if packet == "diagonal":
            return emit("aten.diagonal_scatter.default", current, Ref(new), *rest)
        if packet in ("chunk", "split", "split_with_sizes"):
            dim = rest[1] if len(rest) > 1 and isinstance(rest[1], int) else 0
            start = sum(r.shape[dim] for r in view.results[:index])
            return emit("aten.slice_scatter.default", current, Ref(new), dim, start, start + view.results[index].shape[dim])
        if packet == "unbind":
            return emit("aten.select_scatter.default", current, Ref(new), rest[0] if rest else 0, index)
        raise InputError(
            f"{op.module or 'model'}: {op.target} writes through a {view.target} view, which has no pure form here"
        )


def _dtype(value: Value) -> torch.dtype:
    dtype = getattr(torch, value.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
