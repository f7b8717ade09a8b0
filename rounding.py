"""What `verify` allows a 16-bit plan: it is compared with the FP32 model, and may be as far off as torch's own mixed precision.

The yardstick is the unchanged model under torch.autocast in the plan's precision, in one process: its errors are those of 16-bit numbers
on this model and batch. With u the unit roundoff (2^-8 in bf16, 2^-11 in fp16), and each error against FP32:

    loss             the plan's error at most that of autocast, times FACTOR, or u of the loss
    gradients        of every parameter: Frobenius norm of the error at most FACTOR times that of autocast, which counts as u of the
                     gradient's norm at least; the table has the ratio
    gradient norm    as the loss
    weights          after AdamW's first step, which moves an element by lr against the sign of its gradient: elements whose gradient has
                     one sign there and here, and is no less than NOISE says: 1e-5. (Another sign is the row above's to judge.)
                     After two steps: those that are CLEAR times as large as autocast's error of that parameter, SECOND

A sum that is missing, doubled or of the wrong ranks is off by half a gradient's norm or more, and autocast's errors are a few per cent.
Where tokens are routed to experts a last digit may send one elsewhere, here or there: ROUTED of a gradient's norm is allowed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch

from meshwright.compiler.precision import ROUTER
from meshwright.plans.document import PlanDocument
from meshwright.reference import Reference

ROUNDOFF: Mapping[str, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11}
FACTOR = 4.0
CLEAR = 8.0
NOISE = 1e-2
"""Share of the model's mean gradient per element below which AdamW's epsilon has a part in the step."""
ROUTED = 0.3
TINY = 0.03
"""A gradient's norm counts as no smaller than this share of what it would be at the model's mean gradient per element."""
WEIGHTS = 1e-5
SECOND = 5e-4
"""After two updates: the second divides by a mean over both gradients, so that errors of either show."""

Row = tuple[str, str, str, float, float, str]
"""quantity, single process, parallel, difference, tolerance, worst at."""


def has_router(document: PlanDocument) -> bool:
    """Whether a plan's model sends tokens to experts."""
    return any(ROUTER in text for text in document.precision_ops.values())


def rounding_rows(
    document: PlanDocument,
    truth: Reference,
    yardstick: Reference,
    losses: tuple[float, ...],
    norm: float,
    gradients: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> list[Row]:
    """All compared quantities; `truth` is the FP32 model's, `yardstick` autocast's."""
    unit = ROUNDOFF[document.precision]
    loss = max(abs(there - here) for there, here in zip(losses, (truth.loss, *truth.losses), strict=True))
    allowed = max(FACTOR * abs(yardstick.loss - truth.loss), unit * abs(truth.loss))
    norm_off, norm_allowed = (abs(each / max(truth.grad_norm, 1e-30) - 1) for each in (norm, yardstick.grad_norm))
    return [
        ("loss", f"{truth.loss:.7f}", f"{losses[0]:.7f}", loss, allowed, f"autocast is off by {abs(yardstick.loss - truth.loss):.1e}"),
        gradient_row(document, truth, yardstick, gradients, unit),
        ("gradient norm", f"{truth.grad_norm:.6f}", f"{norm:.6f}", norm_off, max(FACTOR * norm_allowed, unit), ""),
        weight_row(truth, yardstick, gradients, weights),
    ]


def gradient_row(
    document: PlanDocument, truth: Reference, yardstick: Reference, gradients: Mapping[str, torch.Tensor], unit: float
) -> Row:
    """The parameter whose error is largest beside autocast's."""
    least = ROUTED / FACTOR if has_router(document) else unit
    worst = ("gradients", "", "", -1.0, FACTOR, "")
    for path, exact in truth.gradients.items():
        size = max(float(exact.norm()), TINY * truth.mean_gradient * sqrt(exact.numel()), 1e-30)
        expected = float((yardstick.gradients[path] - exact).norm()) / size if path in yardstick.gradients else 0.0
        found = float((gradients[path] - exact).norm().nan_to_num(nan=float("inf"))) / size if path in gradients else float("inf")
        ratio = found / max(expected, least)
        if ratio > worst[3]:
            worst = ("gradients", f"autocast {expected:.1e}", f"{found:.1e}", ratio, FACTOR, path)
    return worst


def weight_row(
    truth: Reference, yardstick: Reference, gradients: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> Row:
    """The parameter with the element that is furthest off after the update."""
    worst, name, compared, total = 0.0, "", 0, 0
    least = NOISE * truth.mean_gradient
    for path, exact in truth.weights.items():
        gradient = truth.gradients[path]
        if len(truth.losses) == 1:
            here = gradients.get(path, gradient)
            clear = (gradient.abs() > least) & (here.abs() > least) & (gradient.sign() == here.sign())
        else:
            noise = (yardstick.gradients[path] - gradient).norm() / sqrt(gradient.numel()) if path in yardstick.gradients else 0.0
            clear = gradient.abs() > CLEAR * noise + least
        compared, total = compared + int(clear.sum()), total + clear.numel()
        if path not in weights:
            worst, name = float("inf"), path
        elif bool(clear.any()):
            off = (weights[path] - exact).abs() / exact.abs().clamp(min=1.0)
            largest = float(off[clear].max().nan_to_num(nan=float("inf")))
            worst, name = max((worst, name), (largest, path))
    share = f"{compared / max(1, total):.1%} of elements"
    return "weights after AdamW", share, share, worst, WEIGHTS if len(truth.losses) == 1 else SECOND, name
