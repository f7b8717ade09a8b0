"""The ops of layers that were not traced, made from those of the layer that was: the other half of replicas.py.

    Call      what was between layer_begin and layer_end: a run of the graph's ops, the values that went in and came out
    Copies    collects calls while a graph is converted, and gives the ops of a copy

An op of a copy is the original's with values renamed: arguments and parameters to the copy's, results to new names, the module's path to
the copy's. The original must read nothing else. `check` compares witnesses with what a copy in their place would be, and
finds values that left a call on another way than as a result. Whatever is not as it must be is a NotAlikeError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from meshwright.compiler.graph import Op, Ref, Value, map_refs


class NotAlikeError(Exception):
    """Layers that were taken for alike are not; the model has to be traced in full."""


@dataclass(frozen=True)
class Call:
    """A call of a layer at `module`, a path. inputs: names of values; results: those of the new tensors that it gave; ends: what the
    inputs had become when it ended; ops, aliases: what was made, and which results share the storage of an operand."""

    module: str
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    ends: tuple[str, ...]
    ops: tuple[Op, ...]
    aliases: tuple[tuple[str, str], ...]


@dataclass
class States:
    """Values of parameters and buffers. names: of a value by the path of its tensor, one for each name of a tied one; paths: the same
    the other way round, with all paths of a value."""

    names: dict[str, str] = field(default_factory=dict)
    paths: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module, values: Mapping[str, str]) -> States:
        """`values`: names of values by the first path of their tensor."""
        first: dict[int, str] = {}
        states = cls()
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        for path, tensor in tensors:
            name = values.get(path) or values.get(first.setdefault(id(tensor), path))
            if name is not None:
                states.names[path] = name
                states.paths.setdefault(name, []).append(path)
        return states


class Copies:
    """Calls by the number of their original."""

    def __init__(self) -> None:
        self.calls: dict[int, list[Call]] = {}
        self.copied: dict[int, int] = {}
        self.states = States()
        self.open: tuple[int, str, tuple[str, ...], int, int] | None = None

    def begin(self, number: int, module: str, inputs: Iterable[str], num_ops: int, num_aliases: int) -> None:
        """A call begins, after so many ops and aliases."""
        self.open = number, module, tuple(inputs), num_ops, num_aliases

    def end(self, results: Iterable[str], ends: Iterable[str], ops: Sequence[Op], aliases: Mapping[str, str]) -> None:
        """The call ends; `ops` and `aliases` are all there are."""
        assert self.open is not None, "layer_end without layer_begin"
        number, module, inputs, num_ops, num_aliases = self.open
        shared = tuple(aliases.items())[num_aliases:]
        self.calls.setdefault(number, []).append(Call(module, inputs, tuple(results), tuple(ends), tuple(ops[num_ops:]), shared))
        self.open = None

    def copy(self, number: int, module: str, inputs: Sequence[str]) -> Call:
        """What the original would be at `module` with these inputs."""
        self.copied[number] = self.copied.get(number, 0) + 1
        return self._translated(self.calls[number][0], module, inputs, f"copy{sum(self.copied.values())}_")

    def _translated(self, original: Call, module: str, inputs: Sequence[str], stem: str) -> Call:
        names = dict(zip(original.inputs, inputs, strict=True))
        if len(names) < len(original.inputs):
            raise NotAlikeError(f"{original.module}: two inputs of one value")
        moved: dict[str, str] = {}

        def read(ref: Ref) -> Ref:
            if ref.name not in names:
                names[ref.name] = self._state(ref.name, original.module, module)
            return Ref(names[ref.name])

        ops = []
        for op in original.ops:
            if op.module not in moved:
                moved[op.module] = _moved(op.module, original.module, module)
            args = map_refs(op.args, read)
            kwargs = tuple((name, map_refs(item, read)) for name, item in op.kwargs)
            made = tuple(Value(stem + r.name, r.shape, r.dtype, r.requires_grad) for r in op.results)
            names.update((old.name, new.name) for old, new in zip(op.results, made, strict=True))
            assert isinstance(args, tuple)
            ops.append(Op(op.target, args, kwargs, made, moved[op.module], op.level))
        pairs = ((names[result], names[operand]) for result, operand in original.aliases)
        results, ends = (tuple(names[name] for name in part) for part in (original.results, original.ends))
        return Call(module, tuple(inputs), results, ends, tuple(ops), tuple(pairs))

    def _state(self, name: str, original: str, module: str) -> str:
        """The copy's parameter or buffer for one that the original reads."""
        paths = self.states.paths.get(name)
        if paths is None:
            raise NotAlikeError(f"{original}: reads %{name}, which is no argument, parameter or buffer of its own")
        inside = next((path for path in paths if path.startswith(f"{original}.")), None)
        if inside is None:
            return name
        path = module + inside[len(original) :]
        if path not in self.states.names:
            raise NotAlikeError(f"{module}: has no {path}")
        return self.states.names[path]

    def check(self, ops: Sequence[Op], loss: str) -> None:
        """That all calls of a number that has copies are alike, and that nothing leaves them on a way of its own."""
        owners: dict[str, Call] = {}
        results: set[str] = set()
        for number in self.copied:
            original, *witnesses = self.calls[number]
            for call in witnesses:
                if numbered(self._translated(original, call.module, call.inputs, "copy_")) != numbered(call):
                    raise NotAlikeError(f"{call.module}: its ops are not those of {original.module}")
            for call in (original, *witnesses):
                owners.update((value.name, call) for op in call.ops for value in op.results)
                results.update((*call.results, *call.ends))
        for op in ops:
            own = owners.get(op.name)
            escaped = next((name for name in op.operands if owners.get(name, own) is not own and name not in results), None)
            if escaped is not None:
                raise NotAlikeError(f"{op.module}: reads %{escaped}, which is no result of its layer")
        if loss in owners and loss not in results:
            raise NotAlikeError(f"%{loss} is no result of its layer")


def _moved(path: str, original: str, module: str) -> str:
    if path != original and not path.startswith(f"{original}."):
        raise NotAlikeError(f"{original}: has an op of {path or 'no module'}")
    return module + path[len(original) :]


def numbered(call: Call) -> tuple[object, ...]:
    """A call with values that it made numbered, so that names do not matter."""
    numbers: dict[str, str] = {}

    def number(ref: Ref) -> Ref:
        return Ref(numbers.get(ref.name, ref.name))

    ops = []
    for op in call.ops:
        args, kwargs = map_refs(op.args, number), tuple((name, repr(map_refs(item, number))) for name, item in op.kwargs)
        for result in op.results:
            numbers[result.name] = f"#{len(numbers)}"
        results = tuple(replace(result, name=numbers[result.name]) for result in op.results)
        ops.append((op.target, repr(args), kwargs, results, op.module, op.level))
    names = [[numbers.get(name, name) for name in part] for part in (call.inputs, call.results, call.ends)]
    aliases = sorted((numbers.get(a, a), numbers.get(b, b)) for a, b in call.aliases)
    return tuple(ops), names, aliases
