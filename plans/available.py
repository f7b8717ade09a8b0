"""What this version has of the values that the plan's schema knows: one table.

A new capability deletes or widens its line here; schema, command line and errors follow.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.plans.mesh import Mesh

AVAILABLE: Mapping[str, tuple[object, ...]] = {
    "zero": (0, 1, 2, 3),
    "precision": ("fp32", "bf16", "fp16"),
    "reduce_dtype": ("fp32", "bf16"),
    "recompute": ("none", "selective", "full", "auto"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "pipedream-2bw", "synthesised", "auto"),
}
"""By key of the plan."""

AVAILABLE_AXES: Mapping[str, int] = {"cp": 1}
"""Largest size of mesh axes that are limited."""


def unavailable(key: str, value: object) -> str | None:
    """Why `value` of `key` cannot be had in this version, in one line; None when it can."""
    if key == "mesh" and isinstance(value, Mesh):
        return next((_missing_axis(a, value.size(a), n) for a, n in AVAILABLE_AXES.items() if value.size(a) > n), None)
    if key not in AVAILABLE or value is None or value in AVAILABLE[key]:
        return None
    return f"{value} is not in this version, which has {', '.join(map(str, AVAILABLE[key]))}"


def _missing_axis(axis: str, size: int, largest: int) -> str:
    return f"{axis}={size} is not in this version, which has {axis}={largest}"
