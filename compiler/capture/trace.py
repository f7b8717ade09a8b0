"""torch.export to the Graph IR: a module and example inputs in, a raw graph and the buffers it reads out.

The raw graph still has in-place ops and views (see functionalize.py), no-ops and ops that the loss does not need (simplify.py).
Already done:
    getitem          gone: an op with several results lists them
    dtype and device every form of `to` is aten.to.dtype; device, layout and pin_memory are gone: emission places factories
    shape only       zeros_like, new_ones and the like become aten.full: they depend on no data
    grad modes       regions under no_grad are inlined, what enters them passes through aten.detach
    tied parameters  one Parameter with aliases
    numbers          sizes and numbers that depend on constants are literals (see concretize.py); checks of them are gone
    inputs           one per tensor of the example, nested ones too (see flat_example); what is no tensor is part of the program
    layers           those that were not traced (see replicas.py) have the ops of those that were
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind

from meshwright.compiler.capture.canonical import PLACEMENT, canonical, written_arguments
from meshwright.compiler.capture.concretize import NUMBERS, concretize, is_symbolic, model_line
from meshwright.compiler.capture.copies import Call, Copies, NotAlikeError, States
from meshwright.compiler.capture.exporting import Exported, export, flat_example
from meshwright.compiler.capture.replicas import BEGIN, COPY, END
from meshwright.compiler.graph import Graph, Op, Parameter, Ref, Value
from meshwright.plans.errors import InputError
from meshwright.plans.patterns import compress

INNER = "inner"
GIVE_BACK = frozenset({"aten.to.dtype", "aten.contiguous.default"})
"""Ops that return their operand itself when there is nothing to do."""


@dataclass(frozen=True)
class Traced:
    """A raw graph; `aliases` maps a value to the operand whose storage it shares; `buffers` are values by model path."""

    graph: Graph
    aliases: dict[str, str]
    buffers: dict[str, torch.Tensor]


def trace(
    module: nn.Module, example: Mapping[str, object], quiet_modules: frozenset[str] = frozenset(), replicate: bool = True
) -> Traced:
    """Exports `module` on example keyword arguments and converts the result; `quiet_modules` (paths) are in evaluation meanwhile.

    replicate  trace one layer for many that are alike; the result is the same without
    """
    exported = export(module, example, quiet_modules, replicate)
    try:
        return _converted(module, exported, example)
    except NotAlikeError:
        return _converted(module, export(module, example, quiet_modules, False), example)


def _converted(module: nn.Module, exported: Exported, example: Mapping[str, object]) -> Traced:
    conversion = _Conversion(module, exported)
    traced = conversion.run(flat_example(example))
    if exported.has_copies:
        conversion.copies.check(traced.graph.ops, traced.graph.loss)
    return traced


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Conversion:
    """One fx graph on its way to the IR: `env` maps fx nodes to Refs or literals, `ops` grows in program order."""

    def __init__(self, module: nn.Module, exported: Exported) -> None:
        self.module = module
        self.program = exported.program
        self.has_copies = exported.has_copies
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self.storages: dict[int, str] = {}
        self.aliases: dict[str, str] = {}
        self.notes: list[str] = list(exported.notes)
        self.inside = ""
        self.written: set[str] = set()
        self.copies = Copies()

    def run(self, example: Mapping[str, object]) -> Traced:
        env: dict[fx.Node, object] = {}
        inputs, parameters, buffers, tensors = self._placeholders(env, example)
        self.copies.states = States.of(self.module, {p.path: p.value.name for p in parameters} | {path: v.name for v, path in buffers})
        if is_symbolic(self.program.graph_module):
            if self.has_copies:
                raise NotAlikeError("sizes or numbers that depend on data")
            concretize(self.program.graph_module, {value.name: tensors[path] for value, path in buffers})
        loss = self._body(self.program.graph_module, env)[0]
        if not isinstance(loss, Ref):
            raise InputError("the model's loss does not depend on anything: it is a constant")
        paths = {path: None for value, path in buffers if value.name in self.written}
        paths |= {_inner_path(path): None for path in self.program.graph_signature.buffers_to_mutate.values()}
        if paths:
            self.notes.append(f"buffers that the model's forward updates keep their values: {', '.join(compress(paths))}")
        graph = Graph(
            inputs=inputs,
            denominators=(),
            counts=(),
            parameters=parameters,
            buffers=buffers,
            ops=tuple(self.ops),
            loss=loss.name,
            notes=tuple(self.notes),
        )
        return Traced(graph, self.aliases, tensors)

    def _placeholders(
        self, env: dict[fx.Node, object], example: Mapping[str, object]
    ) -> tuple[tuple[Value, ...], tuple[Parameter, ...], tuple[tuple[Value, str], ...], dict[str, torch.Tensor]]:
        """Binds the program's placeholders; tied parameters share one value."""
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        names = _parameter_names(self.module)
        inputs: list[Value] = []
        parameters: dict[str, Parameter] = {}
        buffers: list[tuple[Value, str]] = []
        tensors: dict[str, torch.Tensor] = {}
        real_buffers = dict(self.module.named_buffers(remove_duplicate=False))
        given = iter(example.items())
        for node in self.program.graph_module.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = specs[node.name]
            if spec.kind == InputKind.PARAMETER:
                path, aliases = names[_inner_path(spec.target or "")]
                if path not in parameters:
                    parameter = self.module.get_parameter(path)
                    value = self._value(_outer_name(node.name), node.meta["val"], parameter.requires_grad)
                    parameters[path] = Parameter(value, path, aliases, parameter.requires_grad)
                env[node] = Ref(parameters[path].value.name)
            elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                path = _inner_path(spec.target or "")
                value = self._value(_outer_name(node.name), node.meta["val"])
                buffers.append((value, path))
                tensors[path] = real_buffers[path] if path in real_buffers else self.program.constants[spec.target or ""]
                env[node] = Ref(value.name)
            else:
                name, item = next(given)
                if isinstance(item, torch.Tensor):
                    inputs.append(self._value(name, node.meta["val"]))
                    item = Ref(name)
                env[node] = item
        return tuple(inputs), tuple(parameters.values()), tuple(buffers), tensors

    def _value(self, name: str, fake: torch.Tensor, requires_grad: bool = False) -> Value:
        """A new Value for a traced tensor, remembering its storage."""
        if name in self.values:
            raise InputError(f"two values of the exported graph are named {name!r}")
        value = Value(name, tuple(int(s) for s in fake.shape), dtype_name(fake.dtype), requires_grad)
        self.values[name] = value
        return value

    def _body(self, graph_module: fx.GraphModule, env: dict[fx.Node, object]) -> list[object]:
        """Converts the calls of one (sub)graph; returns what it outputs."""
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return [_literals(item, env) for item in node.args[0]]
            if node.op == "get_attr":
                env[node] = operator.attrgetter(node.target)(graph_module)
            elif node.target is operator.getitem:
                env[node] = env[node.args[0]][node.args[1]]  # type: ignore[index]
            elif isinstance(node.target, torch._ops.HigherOrderOperator):
                env[node] = self._region(node, env)
            else:
                env[node] = self._call(node, env)
        raise AssertionError("an fx graph without output")

    def _region(self, node: fx.Node, env: dict[fx.Node, object]) -> list[object]:
        """Inlines a higher-order op that only sets a mode."""
        kind = str(node.target)
        outside, self.inside = self.inside, _module_path(node) or self.inside
        if kind == "wrap_with_set_grad_enabled":
            enabled, body, *operands = node.args
        elif kind == "wrap_with_autocast" and not node.args[2]:
            enabled, (body, *operands) = True, node.args[4:]
        else:
            raise InputError(f"{model_line(node) or _module_path(node) or 'model'}: op {kind} of the exported graph is not supported")
        graph_module = _literals(body, env)
        if not isinstance(graph_module, fx.GraphModule):
            raise InputError(f"op {kind} of the exported graph has no body")
        places = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        inner = {place: _literals(operand, env) for place, operand in zip(places, operands, strict=True)}
        entered: dict[str, Ref] = {}
        if not enabled:
            for place, item in inner.items():
                if isinstance(item, Ref):
                    inner[place] = detached = self._detached(item)
                    entered[detached.name] = item
        start = len(self.ops)
        results = self._body(graph_module, inner)
        self.inside = outside
        return [self._passed_through(item, self.ops[start:], entered) for item in results]

    def _passed_through(self, result: object, body: list[Op], entered: Mapping[str, Ref]) -> object:
        """A region's result, or what entered the region where an op gave that back as it is (`x.to(x.dtype)` is x, gradient and all)."""
        made = {op.name: op for op in body if op.target in GIVE_BACK}
        ref = result
        while isinstance(ref, Ref) and ref.name not in entered:
            op = made.get(ref.name)
            if op is None or self.aliases.get(op.name) != op.operands[0]:
                return result
            ref = Ref(op.operands[0])
        return entered[ref.name] if isinstance(ref, Ref) else result

    def _detached(self, ref: Ref) -> Ref:
        source = self.values[ref.name]
        result = Value(self._fresh(f"{ref.name}_detached"), source.shape, source.dtype)
        self.values[result.name] = result
        self.aliases[result.name] = ref.name
        self.ops.append(Op("aten.detach.default", (ref,), (), (result,), self.inside))
        return Ref(result.name)

    def _fresh(self, name: str) -> str:
        index, candidate = 0, name
        while candidate in self.values:
            index += 1
            candidate = f"{name}_{index}"
        return candidate

    def _call(self, node: fx.Node, env: dict[fx.Node, object]) -> object:
        """One ATen call: appends its Op and returns a Ref, or a list of Refs when there are several results."""
        target = str(node.target)
        if target in (BEGIN, END, COPY):
            return self._layer(target, node, env)
        fakes = node.meta.get("val")
        if fakes is None and not says_nothing(target):
            raise InputError(f"{_where(node)}: {target} gives no result, so what it does would be lost")
        if fakes is None or isinstance(fakes, (bool, int, float)):
            return fakes
        if writes_unseen(node.target):
            raise InputError(f"{_where(node)}: {target} writes into its arguments, which is not supported")
        module = _module_path(node) or self.inside
        results = list(fakes) if isinstance(fakes, (tuple, list)) else [fakes]
        if not all(isinstance(fake, torch.Tensor) for fake in results):
            raise InputError(f"{model_line(node) or module or 'model'}: {target} gives {fakes}, a number that depends on the data")
        args = tuple(_literals(item, env) for item in node.args)
        self.written.update(item.name for item in written_arguments(target, args) if isinstance(item, Ref))
        kwargs = {name: _literals(item, env) for name, item in node.kwargs.items() if name not in PLACEMENT}
        target, args, kwargs = canonical(target, args, kwargs, results[0], len(results))
        names = [node.name] if len(results) == 1 else _result_names(node, len(results))
        values = tuple(self._value(self._fresh(name), fake) for name, fake in zip(names, results, strict=True))
        op = Op(target, args, tuple(kwargs.items()), values, module)
        self.ops.append(op)
        self._record_aliases(op, node, results, env)
        refs = [Ref(value.name) for value in values]
        return refs if isinstance(fakes, (tuple, list)) else refs[0]

    def _layer(self, target: str, node: fx.Node, env: dict[fx.Node, object]) -> list[Ref] | None:
        """A layer's call begins, ends, or was left out: then its original's ops take its place."""
        given, *rest = (_literals(item, env) for item in node.args)
        names = _names(given)
        if target == END:
            self.copies.end(names, _names(rest[0]), self.ops, self.aliases)
            return None
        number, module = rest[0], _module_path(node) or self.inside
        assert isinstance(number, int)
        if target == BEGIN:
            self.copies.begin(number, module, names, len(self.ops), len(self.aliases))
            return None
        call = self.copies.copy(number, module, names)
        self._take(call)
        return [Ref(name) for name in call.results]

    def _take(self, call: Call) -> None:
        """The ops of a copy."""
        self.ops.extend(call.ops)
        self.values.update((value.name, value) for op in call.ops for value in op.results)
        self.aliases.update(call.aliases)

    def _record_aliases(self, op: Op, node: fx.Node, fakes: list[torch.Tensor], env: dict[fx.Node, object]) -> None:
        """Results that share the storage of an operand."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or all(argument.alias_info is None for argument in schema.arguments):
            return
        for source in node.all_input_nodes:
            base = source.meta.get("val")
            ref = env.get(source)
            if not isinstance(base, torch.Tensor) or not isinstance(ref, Ref):
                continue
            for value, fake in zip(op.results, fakes, strict=True):
                if fake.untyped_storage()._cdata == base.untyped_storage()._cdata:
                    self.aliases.setdefault(value.name, ref.name)


def _names(refs: object) -> list[str]:
    """Names of a list of Refs."""
    assert isinstance(refs, (list, tuple))
    names = [ref.name for ref in refs if isinstance(ref, Ref)]
    if len(names) < len(refs):
        raise NotAlikeError("an argument of a layer is no value of the graph")
    return names


def _inner_path(path: str) -> str:
    return path.removeprefix(INNER + ".")


def _outer_name(name: str) -> str:
    """A placeholder's name without the wrapper: p_inner_model_x -> p_model_x."""
    return name.replace(f"_{INNER}_", "_", 1)


def _parameter_names(module: nn.Module) -> dict[str, tuple[str, tuple[str, ...]]]:
    """For every name of a parameter: its first name, and the others."""
    by_identity: dict[int, list[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(path)
    return {path: (paths[0], tuple(paths[1:])) for paths in by_identity.values() for path in paths}


def _module_path(node: fx.Node) -> str:
    """Path of the innermost module that made this node, in the user's model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0].split("@")[0] if stack else ""
    return "" if path == INNER else _inner_path(path)


def _literals(item: object, env: Mapping[fx.Node, object]) -> object:
    """An fx argument as Refs and plain Python values."""
    if isinstance(item, fx.Node):
        return env[item]
    if isinstance(item, (list, tuple)):
        literals = [_literals(i, env) for i in item]
        return tuple(literals) if isinstance(item, tuple) else literals
    if isinstance(item, NUMBERS):
        raise InputError(f"a size of the exported graph depends on the data: {item}")
    return item


def _result_names(node: fx.Node, count: int) -> list[str]:
    """Names of an op's several results: the schema's own where it names them."""
    schema = getattr(node.target, "_schema", None)
    returns = [r.name for r in schema.returns] if schema is not None else []
    if len(returns) == count and all(returns):
        return [f"{node.name}_{name}" for name in returns]
    return [f"{node.name}_part{i}" for i in range(count)]


def _where(node: fx.Node) -> str:
    """The model's line that made a node, or its module."""
    return model_line(node) or _module_path(node) or "model"


def says_nothing(target: str) -> bool:
    """Whether an op without result only checks something: assertions on metadata, bounds of sizes, profiler marks."""
    return packet_name(target).startswith(("_assert", "sym_constrain", "_record_function", "record_function"))


def packet_name(target: str) -> str:
    """"aten._assert_async.msg" -> "_assert_async"."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def writes_unseen(function: object) -> bool:
    """Whether an op that is not torch's own writes into its arguments."""
    schema = getattr(function, "_schema", None)
    return schema is not None and not schema.name.startswith("aten::") and bool(schema.is_mutable)
