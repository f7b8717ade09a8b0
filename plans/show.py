"""A plan on the screen, as rich renderables; `plain` makes text of them, a terminal is not needed.

    summary       the plan in a few lines
    show_plan     model, mesh and batch; stages; schedule; parameters; notes; predictions
    show_layer    all layouts inside one layer (or another segment), with full and local shapes of its parameters
    show_rank     one rank: where it is, whom it talks to, what it holds
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from math import prod

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.layout import Layout
from meshwright.plans.mesh import AXES, RANK_AXES
from meshwright.plans.patterns import compress, form
from meshwright.plans.signature import ParameterSpec, Signature
from meshwright.plans.timeline import draw
from meshwright.plans.units import format_bytes, format_seconds

WIDTH = 110
"""Columns of plain text."""
BLOCKS = 4
"""Blocks of that width that a schedule may be drawn in."""

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def plain(renderable: RenderableType, width: int = WIDTH) -> str:
    """The renderable as text without colours."""
    console = Console(file=StringIO(), width=width, color_system=None, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def summary(document: PlanDocument) -> str:
    """The plan in a few lines: what, where, how, at what cost, and what could not be had."""
    stages = [f"  stage {i}: {', '.join(stage.layers)}" for i, stage in enumerate(document.stages)]
    notes = [f"  note: {note}" for note in document.notes]
    return "\n".join([*(f"{name}: {text}" for name, text in _header(document)), *stages, *notes])


def show_plan(document: PlanDocument, schedule: Sequence[Sequence[str]] = ()) -> RenderableType:
    """The whole plan but for layouts inside layers. `schedule` has each pipeline rank's actions as text."""
    parts: list[RenderableType] = [_pairs(_header(document)), *_section("Stages", _stages(document))]
    if len(document.stages) > 1 and schedule:
        lines = draw(schedule, WIDTH, BLOCKS) or [f"too long to draw: {_count(document.num_micro_batches, 'micro-batch')}"]
        parts += _section("Schedule of a step", Text("\n".join(lines), no_wrap=True))
    parts += _section("Parameters", _layouts(document.parameters.items(), "parameter"))
    if document.notes:
        parts += _section("Notes", Text("\n".join(f"- {note}" for note in document.notes)))
    if document.predicted.collectives:
        rows = [(name, format_seconds(s)) for name, s in document.predicted.collectives.items()]
        parts += _section("Collectives (predicted seconds of a step)", _pairs(rows))
    return Group(*parts)


def show_layer(document: PlanDocument, layer: str, signature: Signature) -> RenderableType:
    """Layouts inside the segments that `layer` names: an index ("3") or a segment ("embedding", "model.layers.3")."""
    names = [name for name in document.stage_of if name == layer or _index(name) == layer]
    if not names:
        known = ", ".join(compress(document.stage_of))
        raise InputError(f"--layer: found {layer}, expected a layer's index or one of {known}")
    parts: list[RenderableType] = []
    for name in names:
        kind = document.kind_of.get(name, "")
        parts += _section(f"{name} (kind {kind}, stage {document.stage_of[name]})", Text(""))[:-1]
        held = {path: spec for path, spec in signature.parameters.items() if path.startswith(f"{name}.")}
        if held:
            parts += [Padding(_shapes(document, held, f"{name}."), (0, 0, 1, 2))]
        if kind:
            parts += [Padding(_layouts(_results(document, kind), "result"), (0, 0, 0, 2))]
    return Group(*parts)


def show_rank(
    document: PlanDocument, rank: int, signature: Signature, stage_parameters: Mapping[int, Sequence[str]]
) -> RenderableType:
    """One rank. `stage_parameters` has the parameter patterns of stages, as their programs name them."""
    mesh = document.mesh
    if not 0 <= rank < mesh.world_size:
        raise InputError(f"--rank: found {rank}, expected 0 to {mesh.world_size - 1} on the mesh {mesh}")
    at = mesh.coordinates(rank)
    stages = document.stages_of(at["pp"])
    held = {path: signature.parameters[path] for stage in stages for path in stage_parameters[stage]}
    peers = [
        (f"{axis} group", ", ".join(map(str, group)))
        for axis in AXES
        if len(group := mesh.group(rank, axis)) > 1
    ]
    named = RANK_AXES if mesh.ep == 1 else AXES
    rows = [
        ("rank", f"{rank} of {mesh.world_size}: {', '.join(f'{a}={at[a]}' for a in named)}"),
        *(("stage", f"{stage}: {', '.join(document.stages[stage].layers)}") for stage in stages),
        *((name, text if len(text) <= 80 else text[:77] + "...") for name, text in peers),
        ("parameters", _held(document, held)),
    ]
    return Group(_pairs(rows), *_section("Parameters on this rank", _shapes(document, held, "")))


def _header(document: PlanDocument) -> list[tuple[str, str]]:
    model, mesh, predicted = document.model, document.mesh, document.predicted
    fullest = max(document.memory_of(rank) for rank in range(mesh.pp))
    limit = f", at most {format_bytes(document.memory_limit)}" if document.memory_limit is not None else ""
    modes = [f"schedule {document.schedule}", f"recompute {document.recompute}", f"zero {document.zero}"]
    return [
        ("model", f"{model.source} ({model.parameters:,} parameters, {document.task})"),
        ("mesh", f"{mesh} ({mesh.world_size} ranks on {document.hardware}{limit})"),
        (
            "batch",
            f"{document.global_batch} sequences of {document.seq} tokens: "
            f"{_count(document.num_micro_batches, 'micro-batch')} of {document.micro_batch} "
            f"on {_count(mesh.dp, 'dp rank')}",
        ),
        ("step", ", ".join([document.precision, *modes])),
        (
            "predicted",
            f"{format_seconds(predicted.step_s)} a step, {predicted.tokens_per_s:,.0f} tokens/s, "
            f"bubble {predicted.bubble:.1%}, {format_bytes(fullest)} on the fullest rank",
        ),
    ]


def _stages(document: PlanDocument) -> Table:
    names = ("stage", "layers", "forward", "backward", "params", "grads", "optim", "activ", "total")
    table = _table(*names, right=names[2:])
    for number, stage in enumerate(document.stages):
        memory = stage.memory
        sizes = (memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.total)
        times = (format_seconds(stage.forward_s), format_seconds(stage.backward_s))
        table.add_row(str(number), Text(", ".join(stage.layers)), *times, *map(format_bytes, sizes))
    return table


def _layouts(layouts: Iterable[tuple[str, Layout]], name: str) -> Table:
    table = _table(name, "layout")
    for text, layout in layouts:
        table.add_row(Text(text), Text(str(layout), style=_style(layout)))
    return table


def _results(document: PlanDocument, kind: str) -> Iterable[tuple[str, Layout]]:
    """Layouts of a kind's op results, one row for each run of equal ones within a module."""
    for module, layouts in document.kinds[kind].layouts.items():
        if isinstance(layouts, Layout):
            yield module or "(the layer itself)", layouts
        else:
            yield from ((f"{module} {op}".strip(), layout) for op, layout in layouts.items())


def _shapes(document: PlanDocument, held: Mapping[str, ParameterSpec], prefix: str) -> Table:
    """Full and local shape of parameters; names that differ in indices only share a row."""
    table = _table("parameter", "layout", "full", "on a rank")
    rows: dict[tuple[str, Layout, tuple[int, ...]], list[str]] = {}
    for path, spec in held.items():
        layout = document.parameter_layouts[path]
        rows.setdefault((form(path)[0], layout, spec.shape), []).append(path.removeprefix(prefix))
    for (_, layout, shape), paths in rows.items():
        local = layout.local_shape(shape, document.mesh)
        for pattern in compress(paths):
            table.add_row(Text(pattern), Text(str(layout), style=_style(layout)), _shape(shape), _shape(local))
    return table


def _held(document: PlanDocument, held: Mapping[str, ParameterSpec]) -> str:
    locals_ = [(document.parameter_layouts[p].local_shape(s.shape, document.mesh), s.dtype) for p, s in held.items()]
    size = sum(prod(shape) * ELEMENT_BYTES.get(dtype, 4) for shape, dtype in locals_)
    return f"{sum(prod(shape) for shape, _ in locals_):,} in {len(held)} tensors, {format_bytes(size)}"


def _index(name: str) -> str:
    """A layer's index, "" for other segments."""
    indices = form(name)[1]
    return str(indices[-1]) if indices and not name.startswith("bridge") else ""


def _style(layout: Layout) -> str:
    return "cyan" if any(type_.kind == "S" for _, type_ in layout.types) else ""


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    return table


def _table(*names: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=name in right)
    return table


def _section(title: str, body: RenderableType) -> list[RenderableType]:
    return [Text(""), Text(title, style="bold underline"), body]
