"""What every rank's memory goes to, as rich renderables: by stage and kind of tensor, then by layer.

    show_memory   a table per stage; a table of segments: parameters, activations of one micro-batch, what is recomputed and what that frees
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.plans.document import PlanDocument
from meshwright.plans.patterns import compress, expand_all, expand_mapping
from meshwright.plans.signature import Signature
from meshwright.plans.units import format_bytes, format_seconds

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "transient", "communication", "total")
ELEMENT_BYTES = 4
"""Parameters are kept in fp32."""


def show_memory(document: PlanDocument, signature: Signature) -> RenderableType:
    """See the module."""
    stages = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("stage", *PARTS):
        stages.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    for number, stage in enumerate(document.stages):
        stages.add_row(str(number), *(format_bytes(getattr(stage.memory, part)) for part in PARTS))
    segments = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("segments", "each: parameters", "activations", "recomputed", "frees", "costs"):
        segments.add_column(name, overflow="fold", justify="left" if name in ("segments", "recomputed") else "right")
    for row in segment_rows(document, signature):
        segments.add_row(*map(Text, row))
    return Group(
        Text("Bytes of a rank, by stage", style="bold underline"),
        stages,
        Text(""),
        Text("Per segment, activations of one micro-batch", style="bold underline"),
        segments,
    )


def segment_rows(document: PlanDocument, signature: Signature) -> list[tuple[str, ...]]:
    """Text of a row for every run of segments that are alike."""
    kept = expand_mapping(document.predicted.activations)
    again = {name: entry for entry in document.recomputed for name in expand_all(entry.segments)}
    held = layer_bytes(document, signature)
    rows: dict[tuple[int, str, str, str, str, str], list[str]] = {}
    for name, stage in document.stage_of.items():
        entry = again.get(name)
        size = format_bytes(held[name]) if name in held else "-"
        activations = format_bytes(kept[name]) if name in kept else "-"
        more = (regions_text(entry.regions), format_bytes(entry.frees), format_seconds(entry.costs_s)) if entry else ("", "", "")
        rows.setdefault((stage, size, activations, *more), []).append(name)
    return [(", ".join(compress(names)), *row[1:]) for row, names in rows.items()]


def layer_bytes(document: PlanDocument, signature: Signature) -> dict[str, int]:
    """Of the parameters that lie below a layer's own path, as a rank has them."""
    found: dict[str, int] = {}
    layers: Mapping[str, int] = document.stage_of
    for path, spec in signature.parameters.items():
        parts = path.split(".")
        layer = next((name for i in range(len(parts)) if (name := ".".join(parts[:i])) in layers), None)
        if layer is not None:
            local = document.parameter_layouts[path].local_shape(spec.shape, document.mesh)
            found[layer] = found.get(layer, 0) + ELEMENT_BYTES * prod(local)
    return found


def regions_text(regions: str | Sequence[Sequence[str]]) -> str:
    """What runs again, in words."""
    if isinstance(regions, str):
        return regions
    return "; ".join(region[0] if len(region) == 1 else f"{region[0]} to {region[-1]}" for region in regions)
