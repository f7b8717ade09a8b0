"""Small passes Graph -> Graph that remove what the loss does not need, and fill in levels and gradient flow.

    assign_levels          CONSTANT, INPUT or COMPUTE for every op
    mark_gradients         requires_grad of every value, from trainable parameters through differentiable ops
    drop_no_ops            casts to the same dtype, views to the same shape, + 0, * 1, dropout that is off ...
    drop_unused            ops, parameters and buffers that the loss and the counts do not need
    merge_equal            the same op on the same operands twice, among CONSTANT and INPUT ops
    rename                 values named after their op, in program order

Values are pure by now, so `contiguous` and `clone` are no-ops unless something reads strides (aten.as_strided).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from meshwright.compiler.graph import Graph, Level, Op, Ref, Value, aten_packet, map_refs
from meshwright.plans.errors import InputError

NO_GRADIENT = frozenset({"detach", "histc", "full", "arange", "bucketize", "one_hot", "isnan", "eye", "linspace"})
"""Op packets whose floating-point results carry no gradient."""

DROPOUTS = frozenset({"aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default"})


def rebind(op: Op, names: Mapping[str, str]) -> Op:
    """The op with operands renamed."""
    if not any(name in names for name in op.operands):
        return op

    def read(ref: Ref) -> Ref:
        return Ref(names[ref.name]) if ref.name in names else ref

    args = map_refs(op.args, read)
    assert isinstance(args, tuple)
    kwargs = tuple([(name, map_refs(item, read)) for name, item in op.kwargs])
    return Op(op.target, args, kwargs, op.results, op.module, op.level)


def packet(op: Op) -> str:
    """The `linear` of aten.linear.default."""
    return aten_packet(op.target) or op.target.replace(".", "_")


# levels and gradients


def assign_levels(graph: Graph) -> Graph:
    """CONSTANT: neither inputs nor parameters; INPUT: inputs but no parameters; COMPUTE: parameters."""
    levels = {value.name: Level.CONSTANT for value, _ in graph.buffers}
    levels.update({value.name: Level.INPUT for value in graph.inputs})
    levels.update({value.name: Level.COMPUTE for value in graph.denominators})
    levels.update({parameter.value.name: Level.COMPUTE for parameter in graph.parameters})
    order = (Level.CONSTANT, Level.INPUT, Level.COMPUTE)
    ops = []
    for op in graph.ops:
        level = max((levels[name] for name in op.operands), key=order.index, default=Level.CONSTANT)
        if level is not Level.COMPUTE and op.target in DROPOUTS:
            level = Level.COMPUTE
        levels.update((result.name, level) for result in op.results)
        ops.append(op if op.level is level else replace(op, level=level))
    return replace(graph, ops=tuple(ops))


def carries_gradient(value: Value) -> bool:
    """Whether a gradient can flow into a value of this dtype: real or complex."""
    dtype: torch.dtype = getattr(torch, value.dtype)
    return dtype.is_floating_point or dtype.is_complex


def mark_gradients(graph: Graph) -> Graph:
    """requires_grad of every result."""
    flows = {parameter.value.name for parameter in graph.parameters if parameter.trainable}
    ops = []
    for op in graph.ops:
        differentiable = packet(op) not in NO_GRADIENT and any(name in flows for name in op.operands)
        marks = [differentiable and carries_gradient(r) for r in op.results]
        flows.update(r.name for r, marked in zip(op.results, marks, strict=True) if marked)
        if any(r.requires_grad is not marked for r, marked in zip(op.results, marks, strict=True)):
            results = tuple(replace(r, requires_grad=marked) for r, marked in zip(op.results, marks, strict=True))
            op = Op(op.target, op.args, op.kwargs, results, op.module, op.level)
        ops.append(op)
    return replace(graph, ops=tuple(ops))


class RandomOpsError(InputError):
    """Ops that draw random numbers, other than dropout; `modules` are the paths of the modules that they are in."""

    def __init__(self, message: str, modules: frozenset[str]) -> None:
        super().__init__(message)
        self.modules = modules


def draws_random(op: Op) -> bool:
    """Whether an op draws random numbers and is no dropout."""
    if op.target in DROPOUTS or not op.target.startswith("aten.") or packet(op) == "scaled_dot_product_attention":
        return False
    function = getattr(getattr(torch.ops.aten, packet(op)), op.target.split(".")[2])
    return torch.Tag.nondeterministic_seeded in function.tags


def refuse_random(graph: Graph) -> Graph:
    """Random numbers other than dropout's would differ between ranks that must agree: RandomOpsError."""
    found = [op for op in graph.ops if draws_random(op)]
    if found:
        raise RandomOpsError(
            f"{found[0].module or 'model'}: {found[0].target} draws random numbers; only dropout is supported: "
            f"turn this noise off in the model's configuration",
            frozenset(op.module for op in found),
        )
    return graph


# no-ops


def _same(op: Op, source: Value) -> bool:
    result = op.results[0]
    return result.shape == source.shape and result.dtype == source.dtype


def _always(op: Op, source: Value) -> bool:
    return True


def _adds_zero(op: Op, source: Value) -> bool:
    return _is_number(op.args[1], 0) and _same(op, source)


def _times_one(op: Op, source: Value) -> bool:
    return _is_number(op.args[1], 1) and _same(op, source)


def _is_number(item: object, number: int) -> bool:
    return isinstance(item, (int, float)) and not isinstance(item, bool) and item == number


def _is_off(op: Op, source: Value) -> bool:
    return op.args[1] == 0.0 or op.args[2] is False


def _without_gradient(op: Op, source: Value) -> bool:
    return not source.requires_grad


def _same_dims(op: Op, source: Value) -> bool:
    rank = len(source.shape)
    return rank == 0 or int(str(op.args[1])) % rank == int(str(op.args[2])) % rank


def _same_order(op: Op, source: Value) -> bool:
    dims = op.args[1]
    return isinstance(dims, (list, tuple)) and [d % len(source.shape) for d in dims] == list(range(len(source.shape)))


def _single(op: Op, source: Value) -> bool:
    return isinstance(op.args[0], (list, tuple)) and len(op.args[0]) == 1


def _step_one(op: Op, source: Value) -> bool:
    return (len(op.args) < 5 or op.args[4] == 1) and _same(op, source)


NO_OPS: dict[str, Callable[[Op, Value], bool]] = {
    "aten.alias.default": _always,
    "aten.contiguous.default": _always,
    "aten.clone.default": _always,
    "aten.to.dtype": _same,
    "aten.detach.default": _without_gradient,
    "aten.view.default": _same,
    "aten.reshape.default": _same,
    "aten.expand.default": _same,
    "aten.expand_as.default": _same,
    "aten.view_as.default": _same,
    "aten.squeeze.default": _same,
    "aten.squeeze.dim": _same,
    "aten.flatten.using_ints": _same,
    "aten.repeat.default": _same,
    "aten.slice.Tensor": _step_one,
    "aten.transpose.int": _same_dims,
    "aten.permute.default": _same_order,
    "aten.add.Tensor": _adds_zero,
    "aten.sub.Tensor": _adds_zero,
    "aten.mul.Tensor": _times_one,
    "aten.div.Tensor": _times_one,
    "aten.pow.Tensor_Scalar": _times_one,
    "aten.cat.default": _single,
    "aten.dropout.default": _is_off,
    "aten.feature_dropout.default": _is_off,
    "aten.alpha_dropout.default": _is_off,
}
"""Target -> does this call give its first operand back unchanged?"""


def drop_no_ops(graph: Graph) -> Graph:
    """Readers of a no-op read its operand instead."""
    strided = any(packet(op).startswith("as_strided") for op in graph.ops)
    names: dict[str, str] = {}
    ops = []
    for op in graph.ops:
        op = rebind(op, names)
        is_no_op = NO_OPS.get(op.target)
        if strided and packet(op) in ("contiguous", "clone"):
            is_no_op = None
        if is_no_op is not None and op.operands and is_no_op(op, graph.values[op.operands[0]]):
            names[op.name] = op.operands[0]
        else:
            ops.append(op)
    return _renamed_outputs(replace(graph, ops=tuple(ops)), names)


def _renamed_outputs(graph: Graph, names: Mapping[str, str]) -> Graph:
    counts = tuple(names.get(count, count) for count in graph.counts)
    return replace(graph, loss=names.get(graph.loss, graph.loss), counts=counts)


# unused and equal


def drop_unused(graph: Graph) -> Graph:
    """Keeps what the loss and the counts need."""
    needed = {graph.loss, *graph.counts}
    kept = []
    for op in reversed(graph.ops):
        if any(result.name in needed for result in op.results):
            needed.update(op.operands)
            kept.append(op)
    return replace(
        graph,
        ops=tuple(reversed(kept)),
        parameters=tuple(p for p in graph.parameters if p.value.name in needed),
        buffers=tuple((value, path) for value, path in graph.buffers if value.name in needed),
    )


def merge_equal(graph: Graph) -> Graph:
    """One op for equal ones, among CONSTANT and INPUT ops: they have no module that matters and no parameter."""
    first: dict[str, Op] = {}
    names: dict[str, str] = {}
    ops = []
    for op in graph.ops:
        op = rebind(op, names)
        if op.level is Level.COMPUTE:
            ops.append(op)
            continue
        key = f"{op.target}({op.args!r}, {op.kwargs!r})"
        if key in first:
            names.update((old.name, new.name) for old, new in zip(op.results, first[key].results, strict=True))
        else:
            first[key] = op
            ops.append(op)
    return _renamed_outputs(replace(graph, ops=tuple(ops)), names)


def rename(graph: Graph) -> Graph:
    """Values named after their op: linear, linear_1, ...; several results of one op: topk_values, topk_indices."""
    taken = {value.name for value in _given(graph)}
    used: dict[str, int] = {}
    names: dict[str, str] = {}
    ops = []
    for op in graph.ops:
        op = rebind(op, names)
        results = []
        for result in op.results:
            suffix = result.name.rsplit("_", 1)[-1] if len(op.results) > 1 else ""
            name = _free_name("_".join(filter(None, (packet(op).strip("_"), suffix))), taken, used)
            if name != result.name:
                names[result.name] = name
                result = Value(name, result.shape, result.dtype, result.requires_grad)
            results.append(result)
        ops.append(Op(op.target, op.args, op.kwargs, tuple(results), op.module, op.level))
    return _renamed_outputs(replace(graph, ops=tuple(ops)), names)


def _given(graph: Graph) -> Iterable[Value]:
    yield from graph.inputs
    yield from graph.denominators
    yield from (value for value, _ in graph.buffers)
    yield from (parameter.value for parameter in graph.parameters)


def _free_name(stem: str, taken: set[str], used: dict[str, int]) -> str:
    while True:
        index = used.get(stem, 0)
        used[stem] = index + 1
        name = f"{stem}_{index}" if index else stem
        if name not in taken:
            taken.add(name)
            return name
