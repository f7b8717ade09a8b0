"""The types that a plan's `precision` and `reduce_dtype` stand for."""

from __future__ import annotations

from collections.abc import Mapping

DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's names, by the plan's."""
ITEM_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number."""
