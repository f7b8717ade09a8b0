"""Layers of a model that are alike: what they are made of is equal, but for numbers that tell them apart.

`describe` writes a module as a map from places (`self_attn.q_proj.weight`) to what is found there:
    module      its class, whether it is training, the names of its parts
    parameter,  shape, strides, dtype, device, requires_grad, and where in the module the same one is found first; one that is found
    buffer      outside the module too is itself
    attribute   plain values and collections of them by value; functions, classes and tensors as themselves; a module by its place; any
                other object (a configuration) as itself

Layers are the items of a list of modules. Two are alike when their descriptions are equal but for `loose` places: those that hold an int
which differs in every layer of the list with the same places. Replication (replicas.py) has to show that these are not used.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType

import torch
from torch import nn

from meshwright.compiler.capture.tripwire import Place

FEWEST = 4
"""Of fewer layers none is left out: two are traced to be compared, and the last."""
PARTS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
PLAIN = (bool, str, bytes, float, complex, torch.dtype, torch.device, torch.Size, enum.Enum)
DEEPEST = 8
"""Levels of collections in collections that are looked into."""

Description = dict[str, Hashable]


@dataclass(frozen=True)
class Layer:
    """A layer with equals. `group` is one number for all of them; `loose`: where its own numbers are."""

    module: nn.Module
    group: int
    is_last: bool
    loose: tuple[Place, ...]


class Outside:
    """How often each module and tensor is found in a whole model, to tell what is found outside a layer too."""

    def __init__(self, root: nn.Module) -> None:
        self.counts = occurrences(root)

    def shared(self, module: nn.Module) -> frozenset[int]:
        """Ids of what is found both inside and outside a module."""
        return frozenset(i for i, count in occurrences(module).items() if count < self.counts[i])


def occurrences(module: nn.Module) -> Counter[int]:
    """How often each module, parameter and buffer is found, by id."""
    found: Counter[int] = Counter()
    for _, child in module.named_modules(remove_duplicate=False):
        found.update(map(id, (child, *child._parameters.values(), *child._buffers.values())))
    del found[id(None)]
    return found


def find_alike(root: nn.Module) -> dict[int, Layer]:
    """The layers of a model that have FEWEST equals or more, themselves among them, by id of their attributes' dict (which a proxy of a
    module shares). Nothing inside such a layer is among them."""
    outside = Outside(root)
    found: dict[int, Layer] = {}
    pending = [root]
    seen: set[int] = set()
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        items = [child for child in module._modules.values() if child is not None]
        groups = _groups(items, outside) if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(items) >= FEWEST else []
        taken: set[int] = set()
        for members, loose in groups:
            group = len(found)
            for member in members:
                places = tuple((member.get_submodule(path), name) for path, name in loose)
                found[id(vars(member))] = Layer(member, group, member is members[-1], places)
                taken.add(id(member))
        pending.extend(item for item in items if id(item) not in taken)
    return found


def _groups(items: list[nn.Module], outside: Outside) -> list[tuple[list[nn.Module], list[tuple[str, str]]]]:
    """Items that are alike, FEWEST or more together, each with its loose places (module, attribute)."""
    by_places: dict[Hashable, list[tuple[nn.Module, Description]]] = {}
    for item in dict.fromkeys(items):
        shared = outside.shared(item)
        if id(item) in shared or outside.counts[id(item)] > 1 or any(id(m) in shared for m in item.modules()):
            continue
        description = describe(item, shared)
        by_places.setdefault(tuple(description), []).append((item, description))
    found: list[tuple[list[nn.Module], list[tuple[str, str]]]] = []
    for alike in by_places.values():
        loose = _loose([description for _, description in alike])
        by_content: dict[Hashable, list[nn.Module]] = {}
        for item, description in alike:
            content = tuple(what for place, what in description.items() if place not in loose)
            by_content.setdefault(content, []).append(item)
        names = [(path, name) for path, _, name in (place.rpartition(".") for place in loose)]
        found.extend((members, names) for members in by_content.values() if len(members) >= FEWEST)
    return found


def _loose(descriptions: list[Description]) -> dict[str, None]:
    """Attributes of modules that are an int in every description, a different one in each."""
    found: dict[str, None] = {}
    for place in descriptions[0]:
        whats = [description[place] for description in descriptions]
        ints = {what[1] for what in whats if isinstance(what, tuple) and what and what[0] == "int"}
        if len(ints) == len(descriptions) and "[" not in place:
            found[place] = None
    return found


def describe(module: nn.Module, shared: frozenset[int] = frozenset()) -> Description:
    """What a module is made of, by place (see above); `shared`: ids of what counts as itself."""
    places: dict[int, str] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        places.setdefault(id(child), path)
        for name, tensor in _tensors(child):
            places.setdefault(id(tensor), f"{path}.{name}")
    found: Description = {}
    for path, child in module.named_modules(remove_duplicate=False):
        found[f"{path}.(module)"] = (type(child), tuple(child._modules), places[id(child)])
        for name, tensor in _tensors(child):
            found[f"{path}.{name}"] = ("itself", id(tensor)) if id(tensor) in shared else (*kind_of(tensor), places[id(tensor)])
        for name, item in vars(child).items():
            if name not in PARTS:
                found[f"{path}.{name}"] = _what(item, places, DEEPEST)
    return found


def kind_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """What can be known of a tensor without its values."""
    return type(tensor).__name__, tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    for part in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in part.items() if tensor is not None)


def content(item: object) -> Hashable:
    """Any object as a value that is equal for equal ones: those that have attributes by these, else as itself."""
    own = vars(item) if hasattr(item, "__dict__") and not isinstance(item, (type, torch.Tensor)) else {}
    return id(item), tuple((name, _what(value, {}, DEEPEST)) for name, value in own.items())


def _what(item: object, places: Mapping[int, str], depth: int) -> Hashable:
    """An attribute as a value that is equal for equal ones."""
    if item is None or isinstance(item, PLAIN):
        return type(item), repr(item)
    if type(item) is int:
        return "int", item
    if isinstance(item, nn.Module):
        return ("module", places[id(item)]) if id(item) in places else ("itself", id(item))
    if isinstance(item, MethodType):
        return "method", id(item.__func__), _what(item.__self__, places, depth - 1) if depth else id(item.__self__)
    if isinstance(item, (type, FunctionType, BuiltinFunctionType, torch.Tensor)) or not depth:
        return "itself", id(item)
    if isinstance(item, Mapping) and type(item).__module__ in ("builtins", "collections"):
        return type(item), tuple((_what(k, places, depth - 1), _what(v, places, depth - 1)) for k, v in item.items())
    if type(item) in (list, tuple):
        return type(item), tuple(_what(i, places, depth - 1) for i in item)  # type: ignore[attr-defined]
    if type(item) in (set, frozenset):
        return type(item), frozenset(_what(i, places, depth - 1) for i in item)  # type: ignore[attr-defined]
    if type(item) is partial:
        return "partial", *(_what(part, places, depth - 1) for part in (item.func, item.args, item.keywords))
    return "itself", id(item)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module or one inside it has hooks, or a forward that was put on the object."""
    return any("forward" in vars(child) or any(vars(child).get(name) for name in HOOKS) for child in module.modules())
