"""What a plan cuts on the tensor axis, by the parts of a layer: read from the plan and the captured graph alone.

A part is a child of a layer that holds matrices (`self_attn`, `mlp`, `block_sparse_moe`, `mixer`), the same child of all layers of
a kind together. Small parts (a router, a norm's projection) that hold less than SMALL of the layer's matrix elements are not asked.
A part is cut when

    weights   at least half of its elements in matrices are S on the axis, and
    core      at least half of the multiplications between activations (scores and values of an attention, a scan) are on slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from meshwright.compiler.capture.layers import layer_prefix
from meshwright.compiler.flops import matmul_flops
from meshwright.compiler.graph import Graph
from meshwright.compiler.kinds import Kinds
from meshwright.plans.document import PlanDocument
from meshwright.plans.layout import Layout

SMALL = 0.05
HALF = 0.5


@dataclass
class Part:
    """Sums over a part: matrix elements and activation flops, all and those that are cut; whole matrices by name."""

    elements: int = 0
    cut_elements: int = 0
    flops: float = 0.0
    cut_flops: float = 0.0
    whole: dict[str, None] = field(default_factory=dict)

    @property
    def falls_back(self) -> str:
        """"weights", "core", both, or empty."""
        found = []
        if self.cut_elements < HALF * self.elements:
            found.append("weights")
        if self.cut_flops < HALF * self.flops:
            found.append("core")
        return " and ".join(found)


def parts_of(graph: Graph, document: PlanDocument, axis: str = "tp") -> dict[str, Part]:
    """Parts by `kind: child`."""
    kinds = Kinds(graph)
    kind_of = {segment.prefix: segment.kind for segment in graph.segments if segment.prefix}
    parts: dict[str, Part] = {}
    layouts = document.parameter_layouts
    weights = _weights(graph)
    for parameter in graph.parameters:
        prefix = layer_prefix(parameter.path)
        if len(parameter.value.shape) < 2 or prefix not in kind_of:
            continue
        part = parts.setdefault(f"{kind_of[prefix]}: {_child(parameter.path, prefix)}", Part())
        size = prod(parameter.value.shape)
        part.elements += size
        if layouts[parameter.path].on(axis).kind == "S":
            part.cut_elements += size
        else:
            part.whole[parameter.path[len(prefix) + 1 :]] = None
    for name, kind in kinds.by_name.items():
        prefix = kind.representative.prefix
        for position, index in enumerate(kind.representative.ops if prefix else ()):
            op = graph.ops[index]
            if any(operand in weights for operand in op.operands):
                continue
            flops = matmul_flops(op, graph.values)
            key = f"{name}: {_child(op.module + '.x', prefix)}"
            if flops and key in parts:
                parts[key].flops += flops
                written = document.kinds[name].layouts or {}
                if _layout(written, *kinds.keys[name][position]).on(axis).kind in "SP":
                    parts[key].cut_flops += flops
    return _large(parts)


def _weights(graph: Graph) -> set[str]:
    """Parameters and what is made of them alone (a transposed weight)."""
    found = {parameter.value.name for parameter in graph.parameters}
    for op in graph.ops:
        if op.operands and all(name in found for name in op.operands):
            found.update(result.name for result in op.results)
    return found


def _child(path: str, prefix: str) -> str:
    """First component below a layer; what lies in the layer itself is `(layer)`."""
    rest = path[len(prefix) + 1 :].split(".")
    return rest[0] if len(rest) > 1 and path.startswith(prefix + ".") else "(layer)"


def _layout(written: Mapping[str, Layout | Mapping[str, Layout]], module: str, name: str) -> Layout:
    found = written.get(module, Layout())
    return found if isinstance(found, Layout) else found.get(name, Layout())


def _large(parts: dict[str, Part]) -> dict[str, Part]:
    """Without what is a small share of its layer."""
    totals: dict[str, int] = {}
    for key, part in parts.items():
        kind = key.split(":")[0]
        totals[kind] = totals.get(kind, 0) + part.elements
    return {key: part for key, part in parts.items() if part.elements >= SMALL * totals[key.split(":")[0]]}
