"""Between a plan's text and the compiler's values: layouts of op classes as a plan writes them, and back.

A kind's `layouts` maps a module path to one layout for all its ops, or to layouts by op name (`view`, `view.1`). Parameters are by
path. Only one mesh axis carries layouts inside a program today: AXIS.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.compiler.assignment import OpClass
from meshwright.compiler.kinds import Kinds
from meshwright.plans.document import KindDeclaration
from meshwright.plans.errors import InputError
from meshwright.plans.layout import I, Layout, Type

AXIS = "tp"

WrittenLayouts = dict[str, Layout | dict[str, Layout]]


def on_axis(layout: Layout, where: str) -> Type:
    """The type on AXIS; InputError when the layout names another axis."""
    for axis, type_ in layout.types:
        if axis != AXIS:
            raise InputError(f"plan.yaml: {where}: {type_}@{axis} is not possible; layouts inside a program are on {AXIS}")
    return layout.on(AXIS)


def write_layouts(kinds: Kinds, kind: str, results: Mapping[OpClass, Type]) -> WrittenLayouts:
    """`layouts` of a kind, in program order; a module whose ops all agree has one entry."""
    found: dict[str, dict[str, Layout]] = {}
    for position, (module, name) in enumerate(kinds.keys[kind]):
        found.setdefault(module, {})[name] = Layout.of({AXIS: results[kind, position]})
    return {
        module: next(iter(ops.values())) if len(set(ops.values())) == 1 else ops for module, ops in found.items()
    }


def read_layouts(kinds: Kinds, written: Mapping[str, KindDeclaration]) -> dict[OpClass, Type]:
    """Result types that a plan or declaration gives. InputError names a kind, module or op that the model lacks."""
    found: dict[OpClass, Type] = {}
    for kind, declared in written.items():
        if kind not in kinds.keys:
            raise InputError(f"plan.yaml: kinds.{kind}: the model has no such kind; it has {', '.join(kinds.keys)}")
        places: dict[str, dict[str, int]] = {}
        for position, (module, name) in enumerate(kinds.keys[kind]):
            places.setdefault(module, {})[name] = position
        for module, layouts in (declared.layouts or {}).items():
            if module not in places:
                raise InputError(f"plan.yaml: kinds.{kind}.layouts.{module}: no such module; it has {', '.join(places)}")
            where = f"kinds.{kind}.layouts.{module}"
            by_op = {name: layouts for name in places[module]} if isinstance(layouts, Layout) else layouts
            for name, layout in by_op.items():
                if name not in places[module]:
                    raise InputError(f"plan.yaml: {where}.{name}: no such op; it has {', '.join(places[module])}")
                found[kind, places[module][name]] = on_axis(layout, f"{where}.{name}")
    return found


def read_parameters(kinds: Kinds, layouts: Mapping[str, Layout]) -> dict[str, Type]:
    """Storage types that a plan or declaration gives, by path. InputError names a parameter that the model lacks."""
    known = {p.path: p for p in kinds.graph.parameters}
    aliases = {alias: p.path for p in kinds.graph.parameters for alias in p.aliases}
    found = {}
    for path, layout in layouts.items():
        if path in aliases:
            raise InputError(f"plan.yaml: parameters.{path}: it is tied to {aliases[path]}; give the layout of that")
        if path not in known:
            raise InputError(f"plan.yaml: parameters.{path}: the model trains no such parameter")
        found[path] = on_axis(layout, f"parameters.{path}")
    return found


def layouts_of(types: Mapping[str, Type]) -> dict[str, Layout]:
    """Parameter layouts by path."""
    return {path: Layout.of({AXIS: type_}) if type_ != I else Layout() for path, type_ in types.items()}
