"""The reference interpreter: runs a Graph in one process, differentiably. What every emitted program must equal.

`aten.x.y` is torch.ops.aten.x.y, other namespaces are torch.ops' too; `view` runs as reshape, as in emitted programs; `mw.*`
ops are the plain torch functions of `MW`. Dropout draws from torch's default generator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from meshwright.compiler.graph import Graph, Op, Ref, map_refs
from meshwright.runtime.functions import autograd_function

Tensors = Mapping[str, torch.Tensor]


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, label_smoothing: float) -> torch.Tensor:
    """Cross-entropy summed over the targets that are not ignored."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing)


def token_mean(total: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """A sum divided by the global count."""
    return total / denominator.to(total.dtype)


def batch_mean(statistic: torch.Tensor) -> torch.Tensor:
    """One process has all rows."""
    return statistic


MW: dict[str, Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "mw.cross_entropy_sum": cross_entropy_sum,
    "mw.token_mean": token_mean,
    "mw.batch_mean": batch_mean,
    "meshwright.autograd_function.default": autograd_function,
}


def function_of(target: str) -> Callable[..., object]:
    """The callable of an op's target; KeyError when torch has no such op."""
    if target in MW:
        return MW[target]
    if target == "aten.view.default":
        target = "aten.reshape.default"
    namespace, packet, overload = target.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    if found is None:
        raise KeyError(f"torch.ops has no {target}")
    return found  # type: ignore[no-any-return]


def call(op: Op, values: Tensors) -> tuple[torch.Tensor, ...]:
    """The results of one op."""

    def read(ref: Ref) -> torch.Tensor:
        return values[ref.name]

    args = map_refs(op.args, read)
    assert isinstance(args, tuple)
    made = function_of(op.target)(*args, **{name: map_refs(item, read) for name, item in op.kwargs})
    results = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    assert all(isinstance(tensor, torch.Tensor) for tensor in results)
    return results


def run_graph(
    graph: Graph, parameters: Tensors, buffers: Tensors, inputs: Tensors, denominators: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The loss of one micro-batch. Parameters and buffers by model path, inputs by name, denominators in order."""
    values = {p.value.name: parameters[p.path] for p in graph.parameters}
    values.update((value.name, buffers[path]) for value, path in graph.buffers)
    values.update((value.name, inputs[value.name]) for value in graph.inputs)
    values.update((value.name, given) for value, given in zip(graph.denominators, denominators, strict=True))
    for op in graph.ops:
        values.update((result.name, tensor) for result, tensor in zip(op.results, call(op, values), strict=True))
    return values[graph.loss]


def count_targets(graph: Graph, buffers: Tensors, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """The values of `graph.counts` for one micro-batch: what its denominators sum up."""
    needed = set(graph.counts)
    ops = []
    for op in reversed(graph.ops):
        if any(result.name in needed for result in op.results):
            needed.update(op.operands)
            ops.append(op)
    values = {value.name: buffers[path] for value, path in graph.buffers if value.name in needed}
    values.update((value.name, inputs[value.name]) for value in graph.inputs if value.name in needed)
    for op in reversed(ops):
        values.update((result.name, tensor) for result, tensor in zip(op.results, call(op, values), strict=True))
    return tuple(values[name] for name in graph.counts)
