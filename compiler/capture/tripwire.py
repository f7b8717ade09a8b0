"""Numbers that tell when they are used.

A layer often keeps its own number (its place in a cache, its name in messages), which alone tells it from its equals. While such a layer
is traced, a `Tripwire` stands for the number: whatever looks at the value (arithmetic, comparison, hash, index, truth, format, any
attribute) is noted, and gets what the number itself would give. A Tripwire is no subclass of int, whose value C code may read unseen:
nothing but the methods below knows the value, so code that got past them without a note cannot depend on it. What insists on a true
int raises TypeError, and the model is traced without tripwires then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch import nn

OPERATORS = (
    "abs add and bool ceil divmod eq float floor floordiv format ge gt hash index int invert le lshift lt mod mul ne neg or pos pow "
    "radd rand rdivmod repr rfloordiv rlshift rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor str sub truediv trunc xor"
)
Place = tuple[nn.Module, str]
"""A module and the name of one of its attributes."""


class Tripwire:
    """Stands for the int `value`; appends to `used` whenever the value is looked at."""

    def __init__(self, value: int, used: list[str]) -> None:
        def look(name: str) -> Callable[..., object]:
            used.append(name)
            found: Callable[..., object] = getattr(value, name)
            return found

        object.__setattr__(self, "_look", look)

    @property
    def __class__(self) -> type:
        return int

    @__class__.setter
    def __class__(self, cls: type) -> None:
        raise TypeError("a number has the class that it has")

    def __getattr__(self, name: str) -> object:
        return _look(self, name)

    def __copy__(self) -> object:
        return _look(self, "__int__")()

    def __deepcopy__(self, memo: object) -> object:
        return _look(self, "__int__")()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return int, (_look(self, "__int__")(),)


def _look(wire: Tripwire, name: str) -> Callable[..., object]:
    look: Callable[[str], Callable[..., object]] = object.__getattribute__(wire, "_look")
    return look(name)


def _method(name: str) -> Callable[..., object]:
    def method(self: Tripwire, *args: object) -> object:
        plain = [_look(a, "__int__")() if type(a) is Tripwire else a for a in args]
        return _look(self, name)(*plain)

    return method


for _operator in OPERATORS.split():
    setattr(Tripwire, f"__{_operator}__", _method(f"__{_operator}__"))


@contextlib.contextmanager
def tripwires(places: Sequence[Place]) -> Iterator[list[str]]:
    """While active, the ints at these places are tripwires. Gives the list of their uses, in which an attribute that was set counts."""
    used: list[str] = []
    before = [vars(module)[name] for module, name in places]
    wires = [Tripwire(value, used) for value in before]
    for (module, name), wire in zip(places, wires, strict=True):
        vars(module)[name] = wire
    try:
        yield used
    finally:
        for (module, name), wire, value in zip(places, wires, before, strict=True):
            if vars(module).get(name) is wire:
                vars(module)[name] = value
            else:
                used.append(f"{name} was set")
