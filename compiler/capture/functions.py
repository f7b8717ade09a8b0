"""Custom autograd.Functions: torch.export inlines their forward and drops their backward.

That changes nothing when the backward is the derivative of the forward (a GELU written by hand), and silently gives wrong gradients
when it is not (straight-through estimators, some routers). `recorded_applications` notes every application during an
export, and `own_backwards` runs each once on small random tensors, its own backward against autograd through its
forward. A Function that differs, or cannot be tried, is exported as an op that keeps it whole (compiler.capture.opaque).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from meshwright.compiler.capture.source import FAILURES

SMALL_SIZE = 32
TOLERANCE = 1e-4
SCALES = (1.0, 0.03, 30.0)
"""Standard deviations of the random floating tensors tried; the second is for functions of a bounded domain."""
GRADIENTS = (1.0, 1e-5, 1e5)
"""Of the gradients that come in: a backward may clip large ones, or drop small ones."""
WHOLE = 1 << 20
"""Elements of an application's tensors up to which they are tried in their own sizes."""
FILLS = (0, 1)
"""What integer and bool tensors are filled with: 0 is a valid index, 1 a mask that lets through."""


@dataclass(frozen=True)
class Application:
    """One application: the Function, its arguments (tensors as (shape, dtype, requires_grad)), the module that applied it."""

    function: type[torch.autograd.Function]
    arguments: tuple[object, ...]
    module: str


@dataclass(frozen=True)
class Shape:
    """A tensor argument."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class Context:
    """Stands for autograd's ctx while a forward runs as plain code: takes whatever is stored on it."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...

    def save_for_forward(self, *tensors: torch.Tensor) -> None: ...

    def mark_dirty(self, *tensors: torch.Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class Recorder:
    """Lists applications, equal ones once, with the module that made the first."""

    def __init__(self, module: nn.Module) -> None:
        self.paths = {id(child): path for path, child in module.named_modules()}
        self.found: dict[object, Application] = {}

    def record(self, function: type[torch.autograd.Function], arguments: tuple[object, ...]) -> None:
        shapes = tuple(_shape(item) for item in arguments)
        key = (function, repr(shapes))
        if key not in self.found:
            self.found[key] = Application(function, shapes, _calling_module(self.paths))

    def recording_forward(self, function: type[torch.autograd.Function]) -> staticmethod[..., object]:
        """The Function's forward that records its arguments first."""
        forward = function.forward
        skipped = 0 if _has_setup_context(function) else 1

        def recorded(*args: object, **kwargs: object) -> object:
            self.record(function, args[skipped:])
            return forward(*args, **kwargs)

        return staticmethod(recorded)


@contextlib.contextmanager
def recorded_applications(module: nn.Module) -> Iterator[list[Application]]:
    """While active, applications of autograd.Functions that are not torch's own are recorded; listed on exit.

    `apply` may have been bound long ago (`act = Straight.apply`), so the forward of every known Function is replaced; `apply`
    itself is replaced for those that are defined meanwhile.
    """
    recorder = Recorder(module)
    listed: list[Application] = []
    original = torch.autograd.Function.__dict__["apply"]
    functions = [cls for cls in _subclasses(torch.autograd.Function) if not cls.__module__.startswith("torch.")]
    own = {cls: cls.__dict__.get("forward") for cls in functions}
    for cls, forward in zip(functions, [recorder.recording_forward(cls) for cls in functions], strict=True):
        cls.forward = forward  # type: ignore[method-assign]

    def apply(cls: type[torch.autograd.Function], /, *args: object, **kwargs: object) -> object:
        if cls not in own and not cls.__module__.startswith("torch."):
            recorder.record(cls, args)
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield listed
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
        for cls, kept in own.items():
            if kept is None:
                del cls.forward
            else:
                cls.forward = kept  # type: ignore[method-assign]
    listed.extend(recorder.found.values())


def _subclasses(cls: type[torch.autograd.Function]) -> list[type[torch.autograd.Function]]:
    """All classes below one, each once."""
    found: dict[type[torch.autograd.Function], None] = {}
    for child in cls.__subclasses__():
        found.update(dict.fromkeys([child, *_subclasses(child)]))
    return list(found)


def _has_setup_context(function: type[torch.autograd.Function]) -> bool:
    return function.setup_context is not torch.autograd.Function.setup_context


def _shape(item: object) -> object:
    return Shape(tuple(int(s) for s in item.shape), item.dtype, item.requires_grad) if isinstance(item, torch.Tensor) else item


def _calling_module(paths: Mapping[int, str]) -> str:
    """Path of the innermost module whose method is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and paths.get(id(owner)):
            return paths[id(owner)]
        frame = frame.f_back
    return "the model"


def own_backwards(applications: list[Application]) -> tuple[type[torch.autograd.Function], ...]:
    """The Functions whose backward is not the derivative of their forward, or that cannot be tried alone: it must be kept."""
    return tuple(dict.fromkeys(a.function for a in applications if not _is_plain(a)))


def _is_plain(application: Application) -> bool:
    """Whether autograd through the forward gives what the Function's own backward gives."""
    errors: list[float] = []
    for scale, fill, gradient in product(SCALES, FILLS, GRADIENTS):
        with contextlib.suppress(*FAILURES):
            errors.append(_gradient_error(application, scale, fill, gradient))
    worst = max(filter(math.isfinite, errors), default=math.inf)
    return worst <= TOLERANCE


def _gradient_error(application: Application, scale: float, fill: int, gradient: float) -> float:
    """The largest difference between its own gradients and those through its forward, relative to the largest gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shapes = [item.sizes for item in application.arguments if isinstance(item, Shape)]
        sizes = sorted({size for shape in shapes for size in shape})
        whole = sum(math.prod(shape) for shape in shapes) <= WHOLE
        small = {size: size if whole else min(size, SMALL_SIZE + sizes.index(size)) for size in sizes}
        arguments = [_example(item, small, scale, fill) for item in application.arguments]
        own = _gradients(application.function.apply, arguments, gradient)
        plain = _gradients(lambda *args: _forward(application.function, args), arguments, own[0])
    pairs = [(a.flatten(), b.flatten()) for a, b in zip(own[1], plain[1], strict=True)]
    if not pairs:
        return 0.0
    mine, theirs = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
    return float((mine - theirs).abs().max() / (torch.maximum(mine.abs().max(), theirs.abs().max()) + 1e-12))


def _example(item: object, small: Mapping[int, int], scale: float, fill: int) -> object:
    if not isinstance(item, Shape):
        return item
    sizes = [small[s] for s in item.sizes]
    if item.dtype.is_floating_point:
        return (scale * torch.randn(sizes)).to(item.dtype)
    return torch.full(sizes, fill, dtype=item.dtype)


def _gradients(
    function: object, arguments: list[object], weights: list[torch.Tensor] | float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights of the results (random ones of a scale when it is a number), and the gradients of the weighted results in every floating
    argument."""
    given = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
    assert callable(function)
    with torch.enable_grad():
        made = function(*given)
    made = made if isinstance(made, (tuple, list)) else [made]
    results = [r for r in made if isinstance(r, torch.Tensor) and r.requires_grad]
    weights = [weights * torch.randn_like(r) for r in results] if isinstance(weights, float) else weights
    leaves = [a for a in given if isinstance(a, torch.Tensor) and a.requires_grad]
    gradients = torch.autograd.grad(results, leaves, weights, allow_unused=True)
    return weights, [torch.zeros_like(a) if g is None else g for g, a in zip(gradients, leaves, strict=True)]


def _forward(function: type[torch.autograd.Function], arguments: tuple[object, ...]) -> object:
    """The forward as plain code, in either of its two styles."""
    if _has_setup_context(function):
        return function.forward(*arguments)
    return function.forward(Context(), *arguments)
