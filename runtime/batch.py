"""The global batch: what a step may be given, and which rows are whose.

Every rank has the whole batch, (G, ...) per input, or its own rows of it; an input that was compiled with k B entries for a micro-batch
of B rows has k G. Data-parallel rank d takes rows [d G/dp, (d+1) G/dp); its micro-batch i is B of them from i B. G is a multiple of dp B.
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


def flat_inputs(batch: Mapping[str, object]) -> dict[str, Tensor]:
    """The tensors of a batch by the names of the signature: nested dicts, tuples and lists are joined with underscores
    (`states` with {"full": (a, b)} is states_full_0 and states_full_1). What is no tensor was made part of the program."""
    found: dict[str, Tensor] = {}
    for name, item in batch.items():
        if isinstance(item, Tensor):
            found[name] = item
        elif isinstance(item, Mapping):
            found.update({f"{name}_{key}": part for key, part in flat_inputs(item).items()})
        elif isinstance(item, (tuple, list)):
            found.update(flat_inputs({f"{name}_{i}": part for i, part in enumerate(item)}))
    return found


def check_batch(batch: Mapping[str, Tensor], plan: PlanDocument, signature: Signature, own_rows: bool = False) -> int:
    """Number of micro-batches on each dp rank; InputError names the input that is wrong, alike on every rank that has it."""
    names = [spec.name for spec in signature.inputs]
    if set(batch) != set(names):
        raise InputError(f"batch: found inputs {', '.join(batch) or 'none'}, expected {', '.join(names)}")
    first = signature.inputs[0]
    rows = len(batch[first.name]) * plan.micro_batch // max(1, first.shape[0]) if batch[first.name].dim() else 0
    for spec in signature.inputs:
        _check_input(batch[spec.name], spec, rows * spec.shape[0] // plan.micro_batch, f"batch: {spec.name}")
        if signature.vocab_size is not None and batch[spec.name].dtype == torch.int64:
            _check_ids(batch[spec.name], spec.name, signature.vocab_size, plan.task)
    parts = 1 if own_rows else plan.mesh.dp
    unit = parts * plan.micro_batch
    if rows == 0 or rows % unit:
        raise InputError(
            f"batch: {rows} rows do not divide into dp={parts} x micro-batches of {plan.micro_batch}; "
            f"give {plan.global_batch * parts // plan.mesh.dp} rows, or another multiple of {unit}"
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


def rank_rows(x: Tensor, parts: int, index: int) -> Tensor:
    """One of `parts` equal runs of rows: those of a dp rank."""
    rows = len(x) // parts
    return x[index * rows : (index + 1) * rows]


def micro_batches(inputs: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Inputs in `count` equal runs of rows."""
    return [{name: rank_rows(x, count, i) for name, x in inputs.items()} for i in range(count)] if inputs else []
