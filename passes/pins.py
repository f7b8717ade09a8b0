"""Which layouts of a plan were given rather than chosen: names of pins, and which of given layouts are pins.

A plan's `pinned` lists
    stages                                every cut between stages
    parameters.PATTERN                    storage of parameters, as plans.patterns writes their names
    kinds.KIND.layouts.MODULE[.OP]        results of a module's ops, or of one op

Everything that a declaration without `pinned` gives is a pin. A declaration with it is a plan that was written before: of the layouts that
it gives the named ones are pins, and those that the solver would not choose beside them, which are edits. The rest was the solver's
choice and stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from meshwright.compiler.assignment import OpClass
from meshwright.compiler.kinds import Kinds
from meshwright.passes.choose_layouts import LayoutPins
from meshwright.plans.errors import InputError
from meshwright.plans.layout import Type
from meshwright.plans.patterns import compress, expand_all

STAGES = "stages"
PARAMETERS = "parameters."

FreeChoice = Callable[[LayoutPins], tuple[Mapping[OpClass, Type], Mapping[str, Type]]]
"""Result and storage types that the solver chooses under pins."""


def op_names(kinds: Kinds) -> dict[str, tuple[OpClass, ...]]:
    """Op classes by every name of a pin on results: a module's and an op's."""
    found: dict[str, tuple[OpClass, ...]] = {}
    for kind, keys in kinds.keys.items():
        for position, (module, _) in enumerate(keys):
            whole = f"kinds.{kind}.layouts.{module}"
            found[whole] = (*found.get(whole, ()), (kind, position))
        found.update((f"kinds.{kind}.layouts.{module}.{op}", ((kind, p),)) for p, (module, op) in enumerate(keys))
    return found


def pin_names(kinds: Kinds, pins: LayoutPins) -> tuple[str, ...]:
    """Names of given layouts, parameters first; a module whose ops are all given has one."""
    names = [PARAMETERS + pattern for pattern in compress([p.path for p in kinds.graph.parameters if p.path in pins.parameters])]
    named: set[OpClass] = set()
    for name, members in op_names(kinds).items():
        if all(member in pins.results for member in members) and not named.issuperset(members):
            names.append(name)
            named.update(members)
    return tuple(names)


def marked_pins(kinds: Kinds, names: Sequence[str], given: LayoutPins) -> LayoutPins:
    """The part of given layouts that `names` marks. InputError for a name that means nothing."""
    known = op_names(kinds)
    results: dict[OpClass, Type] = {}
    parameters: dict[str, Type] = {}
    for name in names:
        if name.startswith(PARAMETERS):
            paths = expand_all([name.removeprefix(PARAMETERS)])
            parameters.update((path, given.parameters[path]) for path in paths if path in given.parameters)
        elif name in known:
            results.update((member, given.results[member]) for member in known[name] if member in given.results)
        elif name != STAGES:
            raise InputError(
                f"plan.yaml: pinned: found {name}, expected stages, parameters.NAME or kinds.KIND.layouts.MODULE of this model"
            )
    return LayoutPins(results, parameters)


def settle_pins(kinds: Kinds, names: Sequence[str] | None, given: LayoutPins, choose: FreeChoice) -> LayoutPins:
    """The given layouts that are pins: all, or the marked ones and edits."""
    if names is None or not (given.results or given.parameters):
        return given
    marked = marked_pins(kinds, names, given)
    results, parameters = choose(marked)
    return LayoutPins(
        {c: t for c, t in given.results.items() if c in marked.results or results[c] != t},
        {p: t for p, t in given.parameters.items() if p in marked.parameters or parameters[p] != t},
    )


def is_pinned(name: str, pinned: Collection[str]) -> bool:
    """Whether a parameter is among a plan's pins."""
    return name in expand_all([p.removeprefix(PARAMETERS) for p in pinned if p.startswith(PARAMETERS)])
