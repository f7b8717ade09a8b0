"""The global batch: what a step may be given, and which rows are whose.

Every rank has the whole batch, (G, ...) per input. Data-parallel rank d takes rows [d G/dp, (d+1) G/dp); its
micro-batch i is B of them from i B. G is a multiple of dp B.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.signature import InputSpec, Signature

IGNORED = -100
"""The label that counts for nothing."""


def check_batch(batch: Mapping[str, Tensor], plan: PlanDocument, signature: Signature) -> int:
    """Number of micro-batches on each dp rank; InputError names the input that is wrong, alike on every rank."""
    names = [spec.name for spec in signature.inputs]
    if set(batch) != set(names):
        raise InputError(f"batch: found inputs {', '.join(batch) or 'none'}, expected {', '.join(names)}")
    rows = len(batch[names[0]]) if batch[names[0]].dim() else 0
    for spec in signature.inputs:
        _check_input(batch[spec.name], spec, rows, f"batch: {spec.name}")
        if signature.vocab_size is not None and batch[spec.name].dtype == torch.int64:
            _check_ids(batch[spec.name], spec.name, signature.vocab_size, plan.task)
    unit = plan.mesh.dp * plan.micro_batch
    if rows == 0 or rows % unit:
        raise InputError(
            f"batch: {rows} rows do not divide into dp={plan.mesh.dp} x micro-batches of {plan.micro_batch}; "
            f"give {plan.global_batch} rows, or another multiple of {unit}"
        )
    return rows // unit


def _check_input(x: Tensor, spec: InputSpec, rows: int, where: str) -> None:
    expected = (rows, *spec.shape[1:])
    if tuple(x.shape) != expected:
        raise InputError(f"{where}: found shape {list(x.shape)}, the plan was compiled for {list(expected)}")
    if x.dtype != getattr(torch, spec.dtype):
        raise InputError(f"{where}: found {str(x.dtype).removeprefix('torch.')}, expected {spec.dtype}")


def _check_ids(x: Tensor, name: str, vocabulary: int, task: str) -> None:
    """Token ids, and labels that are token ids, must lie in the vocabulary."""
    if name.endswith("labels") and task.endswith("-lm"):
        x = x.where(x != IGNORED, 0)
    elif not name.endswith("input_ids"):
        return
    low, high = (int(bound) for bound in x.aminmax()) if x.numel() else (0, 0)
    if low < 0 or high >= vocabulary:
        found = low if low < 0 else high
        raise InputError(f"batch: {name}: found id {found}, expected 0 to {vocabulary - 1} (the model's vocabulary)")


def rank_rows(x: Tensor, dp: int, index: int) -> Tensor:
    """Rows of a dp rank."""
    rows = len(x) // dp
    return x[index * rows : (index + 1) * rows]


def micro_batches(inputs: Mapping[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Inputs in runs of `size` rows."""
    rows = len(next(iter(inputs.values()))) if inputs else 0
    return [{name: x[i : i + size] for name, x in inputs.items()} for i in range(0, rows, size)]
