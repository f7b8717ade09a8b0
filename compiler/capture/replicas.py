"""Layers that need no tracing: of layers that are alike (alike.py) one is traced, and the others leave one op each in the exported program.

    original  the first call of a group of layers with a signature: traced between the ops layer_begin and layer_end
    witness   the second such call, and that of the group's last layer: traced between the same ops, and compared with the original
    copy      any other: its forward is not run, the op layer_copy stands for it

trace.py puts the original's ops in the place of each layer_copy, with the copy's parameters, buffers and inputs (copies.py). The graph is
the one that would have been traced, because:

1. What a forward does under torch.export is known before it runs from its code, the attributes it can reach and its arguments, of
   tensors the metadata alone: values are unknown to it, but for single numbers, which are part of the signature as themselves.
2. Code and attributes are equal, but for numbers that differ in every layer. For the original these are tripwires (tripwire.py): if
   one was used, the group is traced in full.
3. Arguments are equal: the signature has plain values, the metadata of tensors, and which of them are one tensor or share memory. What
   else is given (a cache, a configuration) could change between calls: such a call is traced in full.
4. A forward that does something else than give results could do so differently each time, and what it did would be missing. Hooks
   inside, a forward put on the object, attributes that it set in the layer or in an object there, arguments that it changed, results
   without a new tensor (no op could stand for such a call): traced in full. A tensor that left the original or a witness on another way
   than as a result, one that came in other than as an argument, parameter or buffer, constants that it made, sizes that depend on data:
   the model is traced again, in full (copies.py).
5. What is left (state outside the model, code that asks for an int's very type) would have to be alike for the original and
   unlike for the layers between: the witnesses' ops are compared with what the original's become in their place, names aside.

Gradients need no proof of their own: the graph is forward only, and derivatives are those of its ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from meshwright.compiler.capture.alike import Description, Layer, content, describe, find_alike, is_hooked, kind_of
from meshwright.compiler.capture.tripwire import tripwires

BEGIN, END, COPY = (f"meshwright.layer_{name}.default" for name in ("begin", "end", "copy"))
SCALARS = (bool, int, float, str, torch.dtype, torch.device)
Forward = Callable[..., object]


@torch.library.custom_op("meshwright::layer_begin", mutates_args=())
def layer_begin(inputs: Sequence[torch.Tensor], number: int) -> None:
    """A traced call begins; `number` is the one of its original."""


@torch.library.custom_op("meshwright::layer_end", mutates_args=())
def layer_end(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], number: int) -> None:
    """It ends. An input may be the result of a no-op by now, which gave it back."""


@torch.library.custom_op("meshwright::layer_copy", mutates_args=())
def layer_copy(inputs: Sequence[torch.Tensor], number: int, shapes: Sequence[int], dtypes: str) -> list[torch.Tensor]:
    """A call that is not traced. `shapes`: for each result the number of its dims, its sizes and its strides; `dtypes` by spaces."""
    raise NotImplementedError("layer_copy is there while a model is exported")


def _fake_copy(inputs: Sequence[torch.Tensor], number: int, shapes: Sequence[int], dtypes: str) -> list[torch.Tensor]:
    numbers = iter(shapes)
    made = []
    for dtype in dtypes.split():
        rank = next(numbers)
        size, stride = ([next(numbers) for _ in range(rank)] for _ in range(2))
        made.append(torch.empty_strided(size, stride, dtype=getattr(torch, dtype)))
    return made


layer_begin.register_fake(lambda inputs, number: None)
layer_end.register_fake(lambda results, inputs, number: None)
layer_copy.register_fake(_fake_copy)


@dataclass(frozen=True)
class Signature:
    """The arguments of a call. `tensors`: each once, in order; `key` is equal for calls that a layer cannot tell apart."""

    tensors: tuple[torch.Tensor, ...]
    key: Hashable


@dataclass(frozen=True)
class Outcome:
    """What a call gave: ("input", index of an argument), ("result", index of a new tensor) or ("", a plain value) for each leaf of `spec`.

    kinds         of the new tensors, see alike.kind_of
    """

    spec: TreeSpec
    leaves: tuple[tuple[str, object], ...]
    kinds: tuple[tuple[Hashable, ...], ...]


@dataclass
class Original:
    """A traced call that others repeat; `signature` keeps its tensors alive, whose ids are in keys."""

    number: int
    signature: Signature
    outcome: Outcome
    num_calls: int = 1


@dataclass
class Replication:
    """What happens to calls of layers during an export.

    layers      by id of their attributes' dict
    originals   by group and key of the signature
    refused     groups that are traced in full
    num_copies  calls that were left out
    broken      why the trace is not what it would be without; empty when it is
    """

    layers: Mapping[int, Layer]
    originals: dict[tuple[int, Hashable], Original] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    num_copies: int = 0
    broken: str = ""
    busy: bool = False

    def call(self, forward: Forward, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A module's call: run, run between marks, or left out."""
        layer = self.layers.get(id(vars(module)))
        if layer is None or self.busy or layer.group in self.refused or not _is_plain_mode() or is_hooked(layer.module):
            return forward(module, *args, **kwargs)
        signature = sign(args, kwargs)
        if signature is None:
            return forward(module, *args, **kwargs)
        original = self.originals.get((layer.group, signature.key))
        self.busy = True
        try:
            if original is None:
                return self._record(layer, signature, lambda: forward(module, *args, **kwargs), (args, kwargs))
            original.num_calls += 1
            if original.num_calls == 2 or layer.is_last:
                return self._witness(layer, original, signature, lambda: forward(module, *args, **kwargs))
            return self._copy(original, signature)
        finally:
            self.busy = False

    def _record(self, layer: Layer, signature: Signature, run: Callable[[], object], arguments: object) -> object:
        number = len(self.originals)
        leaves, spec = tree_flatten(arguments)
        before = state(layer.module)
        layer_begin(signature.tensors, number)
        with tripwires(layer.loose) as used:
            found = run()
        outcome = outcome_of(found, signature)
        layer_end(new_tensors(found, outcome), signature.tensors, number)
        leaves_after, spec_after = tree_flatten(arguments)
        changed = spec != spec_after or any(a is not b for a, b in zip(leaves, leaves_after, strict=True))
        if outcome is None or not outcome.kinds or used or changed or state(layer.module) != before:
            self.refused.add(layer.group)
        self.originals[layer.group, signature.key] = Original(number, signature, outcome or Outcome(spec, (), ()))
        return found

    def _witness(self, layer: Layer, original: Original, signature: Signature, run: Callable[[], object]) -> object:
        layer_begin(signature.tensors, original.number)
        found = run()
        outcome = outcome_of(found, signature)
        layer_end(new_tensors(found, outcome), signature.tensors, original.number)
        if outcome != original.outcome:
            self.refused.add(layer.group)
            self.broken = "a layer gives something else than its equals" if original.num_calls > 2 else self.broken
        return found

    def _copy(self, original: Original, signature: Signature) -> object:
        self.num_copies += 1
        outcome = original.outcome
        made: list[torch.Tensor] = []
        if outcome.kinds:
            shapes = [n for _, shape, stride, *_ in outcome.kinds for n in (len(shape), *shape, *stride)]  # type: ignore[arg-type, misc]
            dtypes = " ".join(str(kind[3]).removeprefix("torch.") for kind in outcome.kinds)
            made = layer_copy(signature.tensors, original.number, shapes, dtypes)
        if tuple(map(kind_of, made)) != outcome.kinds:
            self.broken = "a layer's results are of another kind than its equals'"
        sources: dict[str, Sequence[object]] = {"input": signature.tensors, "result": made}
        leaves = [sources[where][what] if where and isinstance(what, int) else what for where, what in outcome.leaves]
        return tree_unflatten(leaves, outcome.spec)


def sign(args: tuple[object, ...], kwargs: dict[str, object]) -> Signature | None:
    """The signature of a call; None when it has an argument that is no tensor and no plain value, or a tensor of unknown size."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors: dict[int, torch.Tensor] = {}
    storages: dict[int, int] = {}
    parts: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if not is_known(leaf):
                return None
            tensors.setdefault(id(leaf), leaf)
            storage = storages.setdefault(storage_of(leaf), len(storages))
            itself = id(leaf) if leaf.numel() < 2 else 0
            parts.append((list(tensors).index(id(leaf)), storage, *kind_of(leaf), leaf.storage_offset(), itself))
        elif leaf is None or type(leaf) in SCALARS:
            parts.append((type(leaf), repr(leaf)))
        else:
            return None
    return Signature(tuple(tensors.values()), (str(spec), tuple(parts)))


def outcome_of(found: object, signature: Signature) -> Outcome | None:
    """What a call gave; None when that cannot be had without running it: views of arguments, objects, more than one view of one tensor."""
    leaves, spec = tree_flatten(found)
    inputs = [id(tensor) for tensor in signature.tensors]
    storages = {storage_of(tensor) for tensor in signature.tensors}
    places: list[tuple[str, object]] = []
    new: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            if leaf is not None and type(leaf) not in SCALARS:
                return None
            places.append(("", leaf))
        elif id(leaf) in inputs:
            places.append(("input", inputs.index(id(leaf))))
        elif id(leaf) in new:
            places.append(("result", list(new).index(id(leaf))))
        else:
            if not is_known(leaf) or storage_of(leaf) in storages or leaf.storage_offset() or isinstance(leaf, nn.Parameter):
                return None
            places.append(("result", len(new)))
            new[id(leaf)] = leaf
            storages.add(storage_of(leaf))
    return Outcome(spec, tuple(places), tuple(map(kind_of, new.values())))


def new_tensors(found: object, outcome: Outcome | None) -> list[torch.Tensor]:
    """The tensors of a result that are not the arguments themselves, in order."""
    if outcome is None:
        return []
    leaves = tree_flatten(found)[0]
    made = {index: leaf for leaf, (where, index) in zip(leaves, outcome.leaves, strict=True) if where == "result"}
    return [made[index] for index in range(len(made))]


def is_known(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one of known size."""
    return tensor.layout == torch.strided and all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def state(module: nn.Module) -> tuple[Description, list[int], list[Hashable]]:
    """A layer's attributes, tensors, and the objects that it has, to see what a call changes."""
    modules = list(module.modules())
    tensors = [id(tensor) for child in modules for part in (child._parameters, child._buffers) for tensor in part.values()]
    return describe(module), tensors, [content(item) for child in modules for item in vars(child).values()]


def _is_plain_mode() -> bool:
    """Whether gradients are on and casts are off: ops under other modes are in regions of the program."""
    return torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and not nn.modules.module._global_forward_hooks


@contextlib.contextmanager
def replicated_layers(module: nn.Module) -> Iterator[Replication]:
    """While active, calls of alike layers inside `module` are replicated."""
    replication = Replication(find_alike(module))
    original: Forward = nn.Module._call_impl

    def call(self: nn.Module, *args: object, **kwargs: object) -> object:
        return replication.call(original, self, args, kwargs)

    if replication.layers:
        nn.Module._call_impl = call  # type: ignore[method-assign]
    try:
        yield replication
    finally:
        nn.Module._call_impl = original  # type: ignore[method-assign]
