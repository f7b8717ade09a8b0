"""One form for each thing that ATen says in several ways: an op's target and arguments as the IR has them."""

from __future__ import annotations

import torch

from meshwright.compiler.graph import Ref, aten_packet

PLACEMENT = ("device", "layout", "pin_memory")
SHAPE_ONLY = {
    "zeros_like": 0,
    "ones_like": 1,
    "empty_like": 0,
    "new_zeros": 0,
    "new_ones": 1,
    "new_empty": 0,
    "empty": 0,
    "full_like": None,
    "new_full": None,
}
"""Ops whose result depends on shapes alone, and the value they fill with (None: their last positional argument)."""


LISTS = frozenset({"chunk", "split", "split_with_sizes", "unsafe_chunk", "unsafe_split", "tensor_split", "unbind"})
"""Ops that give a list, which may have one item."""


def canonical(
    target: str, args: tuple[object, ...], kwargs: dict[str, object], result: torch.Tensor, count: int
) -> tuple[str, tuple[object, ...], dict[str, object]]:
    """One form for each thing that ATen says in several ways. `result` is the first of `count`."""
    base = aten_packet(target)
    if base in ("to", "_to_copy", "type_as"):
        return "aten.to.dtype", (args[0], result.dtype), {}
    if base in ("view_as", "reshape_as", "expand_as"):
        return ("aten.expand.default" if base == "expand_as" else "aten.view.default"), (args[0], list(result.shape)), {}
    if base in LISTS and isinstance(args[0], Ref) and count == 1:
        return ("aten.alias.default", args[:1], {}) if base != "unbind" else ("aten.select.int", (args[0], *(args[1:] or (0,)), 0), {})
    if base in SHAPE_ONLY:
        fill = SHAPE_ONLY[base] if SHAPE_ONLY[base] is not None else kwargs.get("fill_value", args[-1])
        if isinstance(fill, (bool, int, float)):
            return "aten.full.default", (list(result.shape), fill), {"dtype": result.dtype}
    if base in ("_grouped_mm", "grouped_mm") and len(args) == 3 and not kwargs and result.dim() == 2:
        return "transformers.grouped_mm_fallback.default", args, {}
    if base in ("zeros", "ones"):
        return "aten.full.default", (list(result.shape), int(base == "ones")), {"dtype": result.dtype}
    if base in ("lift_fresh_copy", "lift_fresh"):
        return "aten.alias.default", args[:1], {}
    if target == "aten._unsafe_view.default":
        return "aten.view.default", args, kwargs
    if base == "batch_norm" and len(args) > 5 and args[5] is True:
        return target, (*args[:3], None, None, *args[5:]), {}
    if base in ("full", "arange", "linspace", "scalar_tensor") and kwargs.get("dtype") is None:
        return target, args, {**kwargs, "dtype": result.dtype}
    return target, args, {k: v for k, v in kwargs.items() if not is_default_kwarg(k, v)}


def written_arguments(target: str, args: tuple[object, ...]) -> tuple[object, ...]:
    """What an op writes into: an in-place op its first argument, a batch norm in training its running statistics."""
    base = aten_packet(target)
    if base == "batch_norm" and len(args) > 5 and args[5] is True:
        return args[3:5]
    return args[:1] if base.endswith("_") and not base.endswith("__") else ()


def is_default_kwarg(name: str, value: object) -> bool:
    """Optional keyword arguments that say nothing."""
    return value is None or (name == "memory_format" and value in (torch.contiguous_format, torch.preserve_format))
