"""Hooks that change gradients: torch.export drops them without a word, so a model that has any is refused.

    refuse_hooks(module)     hooks of modules and parameters that are there already
    no_new_hooks()           while active, Tensor.register_hook is an InputError
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from meshwright.plans.errors import InputError

INSTEAD = "make it a torch.autograd.Function, which is kept"
ON_TENSORS = ("register_hook", "register_post_accumulate_grad_hook")


def refuse_hooks(module: nn.Module) -> None:
    """InputError for the first module or parameter that has a backward hook."""
    for path, child in module.named_modules():
        if child._backward_hooks or child._backward_pre_hooks:
            raise InputError(f"{path or 'the model'}: has a backward hook, which a captured program would not run; {INSTEAD}")
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InputError(f"{path}: has a gradient hook, which a captured program would not run; remove it")


@contextlib.contextmanager
def no_new_hooks() -> Iterator[None]:
    """Refuses hooks that a forward puts on its tensors."""

    def refuse(*_: object, **__: object) -> None:
        raise InputError(f"the model's forward puts a gradient hook on a tensor, which a captured program would not run; {INSTEAD}")

    own = {name: getattr(torch.Tensor, name) for name in ON_TENSORS}
    for name in own:
        setattr(torch.Tensor, name, refuse)
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(torch.Tensor, name, method)
