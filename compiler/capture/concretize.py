"""Sizes and numbers of an exported graph that depend on constants alone, made concrete.

torch.export treats `x[mask]` or `n.item()` as unknown even where `mask` and `n` depend on no input and no parameter (a mask of language
ids that are all the same, a count of positions). `concretize` runs the graph once: constants are computed for real, everything else
on fake tensors. Every node's `meta["val"]` then is a fake tensor with integer sizes, or the number itself. What depends on inputs or
parameters is an InputError that names the line of the model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

from meshwright.compiler.capture.source import FAILURES, first_line
from meshwright.plans.errors import InputError

NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
CHECKS = ("_assert_scalar", "_assert_async", "sym_constrain_range", "_check", "_assert_tensor_metadata")


def is_symbolic(graph_module: fx.GraphModule) -> bool:
    """Whether some size or number of a graph is unknown."""
    for node in graph_module.graph.nodes:
        for item in tree_flatten(node.meta.get("val"))[0]:
            if isinstance(item, NUMBERS):
                return True
            if isinstance(item, torch.Tensor) and any(not isinstance(size, int) for size in item.shape):
                return True
    return any(is_symbolic(child) for child in graph_module.children() if isinstance(child, fx.GraphModule))


def concretize(graph_module: fx.GraphModule, constants: Mapping[str, torch.Tensor]) -> None:
    """Makes every node's meta concrete, in place; `constants` are the real tensors of buffers by placeholder."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given: list[object] = []
    for node in graph_module.graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta.get("val")
        if node.name in constants:
            given.append(constants[node.name].detach().clone())
        elif isinstance(value, torch.Tensor):
            with mode:
                given.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype))
        else:
            given.append(value)
    _Concretization(mode).run(graph_module, given)


class _Concretization:
    """`mode` makes the fake tensors of what is not constant; `spoilt` are storages of constants that other values were written into."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.spoilt: set[int] = set()

    def run(self, graph_module: fx.GraphModule, given: list[object]) -> object:
        env: dict[fx.Node, object] = {}
        arguments = iter(given)
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(arguments)
            elif node.op == "get_attr":
                env[node] = operator.attrgetter(node.target)(graph_module)
            elif node.op == "output":
                return tree_map(lambda item: env[item] if isinstance(item, fx.Node) else item, node.args[0])
            else:
                env[node] = self._call(node, env)
            node.meta["val"] = tree_map(self._fake, env[node])
        raise AssertionError("an fx graph without output")

    def _call(self, node: fx.Node, env: dict[fx.Node, object]) -> object:
        args, kwargs = tree_map(lambda item: env[item] if isinstance(item, fx.Node) else item, (node.args, node.kwargs))
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._region(args)
        assert callable(node.target)
        if any(check in str(node.target) for check in CHECKS):
            return None
        try:
            return self._apply(node.target, args, kwargs)
        except FAILURES as error:
            raise InputError(f"{model_line(node) or 'the model'}: {node.target} gives a size or number that depends on the data "
                             f"({first_line(error)})") from error

    def _region(self, args: tuple[object, ...]) -> object:
        """The body of a higher-order op that sets a mode: its first graph, called with what follows."""
        place = next(i for i, item in enumerate(args) if isinstance(item, fx.GraphModule))
        body = args[place]
        assert isinstance(body, fx.GraphModule)
        return self.run(body, list(args[place + 1 :]))

    def _apply(self, target: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        if all(map(self._is_constant, tensors)):
            with torch.no_grad():
                return target(*args, **kwargs)
        self.spoilt.update(_storage(t) for t in _written(target, args) if not isinstance(t, FakeTensor))
        if str(target).startswith("aten.index"):
            args = self._known_positions(args)
        args, kwargs = tree_map(self._fake, (args, kwargs))
        with self.mode, torch.no_grad():
            return target(*args, **kwargs)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and _storage(tensor) not in self.spoilt

    def _known_positions(self, args: tuple[object, ...]) -> tuple[object, ...]:
        """The arguments of an index op with constant masks as the positions where they are true, whose number is known."""
        if len(args) < 2 or not isinstance(args[1], (list, tuple)):
            return args
        indices: list[object] = []
        for item in args[1]:
            is_mask = isinstance(item, torch.Tensor) and item.dtype == torch.bool and self._is_constant(item)
            indices.extend(item.nonzero(as_tuple=True) if is_mask else [item])
        return (args[0], indices, *args[2:])

    def _fake(self, item: object) -> object:
        if not isinstance(item, torch.Tensor) or isinstance(item, FakeTensor):
            return item
        return self.mode.from_tensor(item, static_shapes=True)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(target: Callable[..., object], args: tuple[object, ...]) -> list[torch.Tensor]:
    """Operands that an op writes into."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return []
    pairs = zip(schema.arguments, args, strict=False)
    return [a for s, a in pairs if s.alias_info is not None and s.alias_info.is_write and isinstance(a, torch.Tensor)]


def model_line(node: fx.Node) -> str:
    """`file:line` of the model's code that made a node; empty when the export kept no trace of it."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    places = [line.split('"') for line in lines if line.startswith("File ")]
    if not places:
        return ""
    _, file, rest = places[-1]
    return f"{file.rpartition('site-packages/')[2]}:{rest.split(',')[1].strip().removeprefix('line ')}"
