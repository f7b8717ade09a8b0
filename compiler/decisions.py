"""Between a plan's text and the compiler's values: layouts of op classes as a plan writes them, and back.

A kind's `layouts` maps a module path to one layout for all its ops, or to layouts by op name (`view`, `view.1`). Parameters are by
path. Two mesh axes carry layouts inside a program: AXIS, on which any type is possible, and `ep`, on which S(0) says that an
op's rows, or the experts of a weight, are on the rank of their expert (compiler.experts).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from meshwright.compiler.assignment import Assignment, OpClass
from meshwright.compiler.experts import EP, Region, Regions, expert_paths
from meshwright.compiler.kinds import Kinds
from meshwright.plans.document import KindDeclaration
from meshwright.plans.errors import InputError
from meshwright.plans.layout import Layout, Type, shard

AXIS = "tp"
EXPERTS = shard(0)
Key = TypeVar("Key")

WrittenLayouts = dict[str, Layout | dict[str, Layout]]


def on_axis(layout: Layout, where: str) -> Type:
    """The type on AXIS; InputError when the layout names an axis that carries none."""
    for axis, type_ in layout.types:
        if axis == EP and type_ != EXPERTS:
            raise InputError(f"plan.yaml: {where}: {type_}@{axis} is not possible; on {EP} a layout is {EXPERTS} or I")
        if axis not in (AXIS, EP):
            raise InputError(f"plan.yaml: {where}: {type_}@{axis} is not possible; layouts inside a program are on {AXIS} and {EP}")
    return layout.on(AXIS)


def write_layouts(assignment: Assignment, kind: str) -> WrittenLayouts:
    """`layouts` of a kind, in program order; a module whose ops all agree has one entry."""
    found: dict[str, dict[str, Layout]] = {}
    marked = {position for region in assignment.regions.get(kind, ()) for position in region.marked}
    for position, (module, name) in enumerate(assignment.kinds.keys[kind]):
        types = {AXIS: assignment.strategies[kind, position].results[0], **({EP: EXPERTS} if position in marked else {})}
        found.setdefault(module, {})[name] = Layout.of(types)
    return {
        module: next(iter(ops.values())) if len(set(ops.values())) == 1 else ops for module, ops in found.items()
    }


def read_layouts(kinds: Kinds, written: Mapping[str, KindDeclaration]) -> dict[OpClass, Layout]:
    """Result layouts that a plan or declaration gives. InputError names a kind, module or op that the model lacks."""
    found: dict[OpClass, Layout] = {}
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
                on_axis(layout, f"{where}.{name}")
                found[kind, places[module][name]] = layout
    return found


def read_parameters(kinds: Kinds, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Storage layouts that a plan or declaration gives, by path. InputError names a parameter that the model lacks."""
    known = {p.path: p for p in kinds.graph.parameters}
    aliases = {alias: p.path for p in kinds.graph.parameters for alias in p.aliases}
    found = {}
    for path, layout in layouts.items():
        if path in aliases:
            raise InputError(f"plan.yaml: parameters.{path}: it is tied to {aliases[path]}; give the layout of that")
        if path not in known:
            raise InputError(f"plan.yaml: parameters.{path}: the model trains no such parameter")
        on_axis(layout, f"parameters.{path}")
        found[path] = layout
    return found


def settle_regions(
    kinds: Kinds,
    legal: Regions,
    results: Mapping[OpClass, Layout],
    parameters: Mapping[str, Layout],
    ranks: int,
) -> dict[str, tuple[Region, ...]]:
    """The legal regions that given layouts want: all that they leave open, none that they lay out otherwise.

    InputError names the key of a layout on ep that is legal nowhere, or of one that contradicts the rest of its region.
    """
    kept = {
        name: tuple(r for r in regions if ranks > 1 and wanted(kinds, r, results, parameters))
        for name, regions in legal.by_kind.items()
    }
    marked = {(name, position) for name, regions in kept.items() for r in regions for position in r.marked}
    keys = {(kind, p): f"kinds.{kind}.layouts.{'.'.join(key)}" for kind, found in kinds.keys.items() for p, key in enumerate(found)}
    check_marks(results, marked, keys, ranks)
    paths = expert_paths(kept)
    check_marks(parameters, paths, {path: f"parameters.{path}" for path in parameters}, ranks)
    return {name: regions for name, regions in kept.items() if regions}


def wanted(kinds: Kinds, region: Region, results: Mapping[OpClass, Layout], parameters: Mapping[str, Layout]) -> bool:
    """Whether nothing is given of a region, or anything of it is laid out over ep."""
    given = [results[region.kind, p] for p in region.marked if (region.kind, p) in results]
    given += [parameters[path] for path in region.parameters if path in parameters]
    return not given or any(layout.on(EP) == EXPERTS for layout in given)


def check_marks(given: Mapping[Key, Layout], marked: Collection[Key], where: Mapping[Key, str], ranks: int) -> None:
    """InputError for the first given layout that differs on ep from what its region has."""
    for key, layout in given.items():
        if (layout.on(EP) == EXPERTS) == (key in marked):
            continue
        if key in marked:
            raise InputError(f"plan.yaml: {where[key]}: {layout} is not on {EP}, its experts are; make it {EXPERTS}@{EP}, or none of them")
        raise InputError(f"plan.yaml: {where[key]}: {EXPERTS}@{EP} is legal for experts that divide by {EP}={ranks} alone; leave it out")


def types_on_axis(layouts: Mapping[Key, Layout]) -> dict[Key, Type]:
    """Types on AXIS."""
    return {key: layout.on(AXIS) for key, layout in layouts.items()}


def layouts_of(assignment: Assignment) -> dict[str, Layout]:
    """Parameter layouts by path."""
    return {path: assignment.parameter_layout(path) for path in assignment.parameters}
