"""A model's own torch.autograd.Function, called by name: the one way to keep a backward that is not the derivative of its forward.

    autograd_function("package.module:Class", tensors, "(%0, %1, 0.5)")

The last argument is the call's arguments as a Python literal in which the text '%i' stands for tensors[i].
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


@cache
def find_function(name: str) -> type[torch.autograd.Function]:
    """The class "package.module:Class". ImportError or AttributeError when it is not there, TypeError when it is no autograd.Function."""
    module, _, qualified = name.partition(":")
    found: object = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or not issubclass(found, torch.autograd.Function):
        raise TypeError(f"{name} is no torch.autograd.Function")
    return found


def fill(template: object, tensors: Sequence[Tensor]) -> object:
    """A literal with its tensors in place."""
    if isinstance(template, str) and template.startswith("%"):
        return tensors[int(template[1:])]
    if isinstance(template, (list, tuple)):
        return type(template)(fill(item, tensors) for item in template)
    return template


def autograd_function(name: str, tensors: Sequence[Tensor], template: str) -> tuple[Tensor, ...]:
    """All results of the Function, differentiable by its own backward."""
    arguments = fill(ast.literal_eval(template), tensors)
    assert isinstance(arguments, tuple)
    made = find_function(name).apply(*arguments)
    return tuple(made) if isinstance(made, (list, tuple)) else (made,)
