"""Custom autograd.Functions whose own backward counts stay one op of the graph, meshwright::autograd_function.

torch.export would inline their forward. While `opaque_functions` is active the forward of each is the op instead, which names the class;
an emitted program calls that class, with its backward (runtime.functions). The op runs whole on every rank: nothing is known of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch

from meshwright.plans.errors import InputError
from meshwright.runtime.functions import autograd_function, find_function

Function = type[torch.autograd.Function]


@torch.library.custom_op("meshwright::autograd_function", mutates_args=())
def _opaque(name: str, tensors: Sequence[torch.Tensor], template: str) -> list[torch.Tensor]:
    return [t.clone() for t in autograd_function(name, tensors, template)]


def _fake(name: str, tensors: Sequence[torch.Tensor], template: str) -> list[torch.Tensor]:
    with inlined(find_function(name)):
        return [t.clone() for t in autograd_function(name, tensors, template)]


_opaque.register_fake(_fake)

_own: dict[Function, object] = {}
"""The forward, as the class has it, of each Function that is opaque now."""


def qualified_name(function: Function) -> str:
    """"package.module:Class"; InputError when the class cannot be found by it."""
    name = f"{function.__module__}:{function.__qualname__}"
    try:
        found = find_function(name)
    except (ImportError, AttributeError, TypeError):
        found = None
    if found is not function:
        raise InputError(
            f"{name} is a custom autograd.Function with a backward of its own, which a program must import, and it cannot be found by its "
            f"name; define it at the top of a module"
        )
    return name


def _as_literal(item: object, tensors: list[torch.Tensor], name: str) -> object:
    """An argument as a literal; tensors are collected."""
    if isinstance(item, torch.Tensor):
        tensors.append(item)
        return f"%{len(tensors) - 1}"
    if isinstance(item, (list, tuple)):
        return type(item)(_as_literal(i, tensors, name) for i in item)
    if item is None or isinstance(item, (bool, int, float)) or (isinstance(item, str) and not item.startswith("%")):
        return item
    raise InputError(
        f"{name} is a custom autograd.Function with a backward of its own and an argument of type {type(item).__name__}, "
        f"which cannot be written into a program; tensors and literals can"
    )


@contextlib.contextmanager
def opaque_functions(functions: Collection[Function]) -> Iterator[None]:
    """While active these Functions are exported as one op each."""
    for function in functions:
        name = qualified_name(function)
        skipped = 0 if function.setup_context is not torch.autograd.Function.setup_context else 1

        def forward(*args: object, name: str = name, skipped: int = skipped) -> object:
            tensors: list[torch.Tensor] = []
            template = repr(tuple(_as_literal(item, tensors, name) for item in args[skipped:]))
            results = _opaque(name, tensors, template)
            return results[0] if len(results) == 1 else tuple(results)

        _own[function] = function.__dict__.get("forward")
        function.forward = staticmethod(forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for function in functions:
            _restore(function)


@contextlib.contextmanager
def inlined(function: Function) -> Iterator[None]:
    """While active an opaque Function has its own forward."""
    kept = function.__dict__.get("forward")
    if function in _own:
        _put(function, _own[function])
    try:
        yield
    finally:
        _put(function, kept)


def _restore(function: Function) -> None:
    _put(function, _own.pop(function))


def _put(function: Function, forward: object) -> None:
    if forward is not None:
        function.forward = forward  # type: ignore[assignment, method-assign]
    elif "forward" in function.__dict__:
        del function.forward
