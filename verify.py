"""The `verify` command: what the ranks compute against what one process computes, on the user's own model.

Every rank runs forward and backward on one global batch, then one AdamW step; after that rank 0 alone does the same with the
unchanged single-process model (module reference) while the others wait. Compared, with the default tolerance:

    loss             |difference|                                                                   2e-6
    gradients        of every parameter: Frobenius norm of the difference, relative                 1e-5
    gradient norm    |difference|, relative                                                         5e-6
    weights          after the update: largest |difference| of an element, relative above 1         1e-5

A plan in bf16 or fp16 is compared with the FP32 model too, and may be as far off as torch's own mixed precision: see `rounding`. The
tolerances given on the command line are those of fp32 plans.

Under pipedream-2bw there are two batches and two updates, both with the gradients of the first weights: what one process computes that
makes the same delayed update, W(t+1) = W(t) - lr g(W(t-1)). Equality with an undelayed process is not claimed, nor compared.

A loss that is no mean over rows (a contrastive one, a router's over several micro-batches, batch norms) cannot equal that of one
process with all rows. Where the comparison fails and the plan has several micro-batches, the single process is given the same
micro-batches, all with the same number of targets, and the verdict says that it was.

A parameter whose true gradient is zero (the bias of attention keys) has only rounding noise, so a gradient's norm counts as no
smaller than FLOOR times what the parameter would have at the model's mean gradient per element, and than NOTHING times the
largest. AdamW's first step is lr times the sign of the gradient, so elements whose gradient is below NOISE times that mean are
left out of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import sqrt
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from meshwright.materialize import build_plan_model
from meshwright.plans.document import PlanDocument
from meshwright.plans.save import load_checked
from meshwright.plans.signature import Signature
from meshwright.reference import (
    Chunks,
    Reference,
    Update,
    autocast_reference,
    compute_reference,
    micro_batches_of_all,
    micro_batches_of_each,
    random_batch,
    whole_batch,
)
from meshwright.rounding import FACTOR, rounding_rows
from meshwright.runtime.engine import Engine, dtype_of
from meshwright.runtime.orders import ASYNCHRONOUS
from meshwright.train import PATIENCE_S

FLOOR = 0.03
NOTHING = 1e-3
NOISE = 1e-3
LOG_WIDTH = 160
WAIT = timedelta(hours=24)


class DiffersError(Exception):
    """The ranks compute something else than one process; the message is the verdict."""


@dataclass(frozen=True)
class Parallel:
    """What the ranks computed; the tensors are on rank 0 only."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One compared quantity: single-process and parallel value (as text), the difference, and where it is worst."""

    quantity: str
    single: str
    parallel: str
    difference: float
    tolerance: float
    worst: str = ""

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance


def command(
    ctx: typer.Context,
    loss_tolerance: Annotated[float, typer.Option(min=0.0)] = 2e-6,
    gradient_tolerance: Annotated[float, typer.Option(min=0.0)] = 1e-5,
    norm_tolerance: Annotated[float, typer.Option(min=0.0)] = 5e-6,
    weight_tolerance: Annotated[float, typer.Option(min=0.0)] = 1e-5,
    seed: Annotated[int, typer.Option(min=0, help="of the random batch")] = 0,
) -> None:
    """Compares loss, every gradient and one update with the single-process model. Exit status 1 when they differ."""
    plan_dir: Path = ctx.obj
    document, signature = load_checked(plan_dir)
    tolerances = Tolerances(loss_tolerance, gradient_tolerance, norm_tolerance, weight_tolerance)
    patient: dist.ProcessGroup | None = None
    verdicts: list[str] = []
    for attempt in attempts(document):
        batches = [random_batch(signature, document, seed + i, attempt.even) for i in range(num_updates(document))]
        found = run_parallel(plan_dir, batches, Update())
        patient = patient or dist.new_group(backend="gloo", timeout=WAIT)
        verdict = [""]
        if dist.get_rank() == 0:
            verdict = [judge(plan_dir, document, signature, batches, attempt, found, tolerances, verdicts)]
        dist.barrier(patient)
        dist.broadcast_object_list(verdict, src=0)
        verdicts += verdict
        if not verdict[0]:
            return
    raise DiffersError(f"DIFFERS beyond tolerance: {verdicts[0]}")


@dataclass(frozen=True)
class Tolerances:
    """Of the four compared quantities."""

    loss: float
    gradients: float
    norm: float
    weights: float


@dataclass(frozen=True)
class Attempt:
    """How the single process takes the batch: the first of `ways` with which it agrees."""

    even: bool
    ways: tuple[Callable[[PlanDocument], Chunks], ...]


def attempts(document: PlanDocument) -> tuple[Attempt, ...]:
    """The whole batch at once; then, where the plan has several micro-batches, the same micro-batches."""
    whole = Attempt(False, (whole_batch,))
    if document.global_batch == document.micro_batch:
        return (whole,)
    ways = (micro_batches_of_all, micro_batches_of_each) if document.mesh.dp > 1 else (micro_batches_of_each,)
    return whole, Attempt(True, ways)


def judge(
    plan_dir: Path,
    document: PlanDocument,
    signature: Signature,
    batches: Sequence[Mapping[str, torch.Tensor]],
    attempt: Attempt,
    found: Parallel,
    tolerances: Tolerances,
    before: list[str],
) -> str:
    """Compares with the single process and prints what was found; gives the quantities beyond tolerance, "" for none."""
    beyond = ""
    for way in attempt.ways:
        model = build_plan_model(document, plan_dir)
        reference = compute_reference(model, signature, batches, document, Update(), way(document))
        findings = compare(reference, found, tolerances)
        if document.precision != "fp32":
            yardstick = build_plan_model(document, plan_dir), signature, batches[0], document, way(document), dtype_of(document.precision)
            findings = compare_rounded(document, reference, autocast_reference(*yardstick), found)
        beyond = ", ".join(finding.quantity for finding in findings if not finding.ok)
        if not beyond:
            break
    if not beyond or not before:
        if len(batches) > 1:
            print(f"{document.schedule}: compared with one process that makes the same delayed updates, W(t+1) = W(t) - lr g(W(t-1)).")
        if document.precision != "fp32":
            print(f"{document.precision}: compared with the model in fp32; allowed is {FACTOR:g} times the error of torch's autocast.")
        show(findings)
    if not beyond and before:
        print(
            f"One process that takes the whole batch at once differs ({before[0]}): the loss is no mean over rows (see the plan's notes).\n"
            f"Verified per micro-batch: the mean of the losses of {len(way(document))} micro-batches."
        )
    elif beyond and not before and document.global_batch > document.micro_batch:
        print("Trying micro-batch by micro-batch, for a loss that is no mean over rows.")
    return beyond


def compare(reference: Reference, found: Parallel, tolerances: Tolerances) -> list[Finding]:
    """All four quantities."""
    pairs = zip((found.loss, *found.losses), (reference.loss, *reference.losses), strict=True)
    loss = max(abs(there - here) for there, here in pairs)
    return [
        Finding("loss", f"{reference.loss:.7f}", f"{found.loss:.7f}", loss, tolerances.loss),
        compare_gradients(reference, found, tolerances.gradients),
        compare_norms(reference, found, tolerances.norm),
        compare_weights(reference, found, tolerances.weights),
    ]


def compare_rounded(document: PlanDocument, reference: Reference, yardstick: Reference, found: Parallel) -> list[Finding]:
    """All four quantities of a 16-bit plan."""
    losses = (found.loss, *found.losses)
    rows = rounding_rows(document, reference, yardstick, losses, found.grad_norm, found.gradients, found.weights)
    return [Finding(*row) for row in rows]


def num_updates(document: PlanDocument) -> int:
    """Two show that an update is delayed."""
    return 2 if document.schedule == ASYNCHRONOUS else 1


def run_parallel(plan_dir: Path, batches: Sequence[Mapping[str, torch.Tensor]], update: Update) -> Parallel:
    """Forward and backward of the first batch, then an update for each, on all ranks; the engine's memory is free again afterwards."""
    engine = Engine(plan_dir, optimizer=update.settings(), timeout_s=PATIENCE_S, dropout=False)
    metrics = engine.forward_backward(batches[0])
    while not metrics.is_finite and engine.lower_loss_scale():
        metrics = engine.forward_backward(batches[0])
    gradients = {name: grad.clone() for name, grad in engine.gradients().items()}
    steps = [engine.train_step(batch) for batch in batches]
    return Parallel(metrics.loss, metrics.grad_norm, gradients, engine.state_dict(), tuple(step.loss for step in steps))


def compare_gradients(reference: Reference, found: Parallel, tolerance: float) -> Finding:
    """The parameter whose gradient is furthest off."""
    mean = reference.mean_gradient
    least = NOTHING * max((float(g.norm()) for g in reference.gradients.values()), default=0.0)
    worst, name = -1.0, ""
    for path, truth in reference.gradients.items():
        floor = max(least, FLOOR * mean * sqrt(truth.numel()))
        difference = float("inf")
        if path in found.gradients:
            off = found.gradients[path] - truth
            difference = finite(off.norm()) / max(float(truth.norm()), floor, 1e-30)
        if difference > worst:
            worst, name = difference, path
    counts = f"{len(reference.gradients)}", f"{len(found.gradients)}"
    return Finding("gradients", *counts, worst, tolerance, name)


def finite(value: torch.Tensor) -> float:
    """A scalar as a float; infinity when it is not a number."""
    return float(value.nan_to_num(nan=float("inf")))


def compare_norms(reference: Reference, found: Parallel, tolerance: float) -> Finding:
    """The global gradient norm before clipping."""
    difference = abs(found.grad_norm - reference.grad_norm) / max(reference.grad_norm, 1e-30)
    return Finding("gradient norm", f"{reference.grad_norm:.6f}", f"{found.grad_norm:.6f}", difference, tolerance)


def compare_weights(reference: Reference, found: Parallel, tolerance: float) -> Finding:
    """The parameter with the element that is furthest off after the update."""
    noise = NOISE * reference.mean_gradient
    worst, name, compared, total = -1.0, "", 0, 0
    for path, truth in reference.weights.items():
        clear = reference.gradients[path].abs() > noise
        compared, total = compared + int(clear.sum()), total + clear.numel()
        difference = float("inf")
        if path in found.weights:
            off = (found.weights[path] - truth).abs() / truth.abs().clamp(min=1.0)
            difference = finite(off[clear].max()) if bool(clear.any()) else 0.0
        if difference > worst:
            worst, name = difference, path
    share = f"{compared / max(1, total):.1%} of elements"
    return Finding("weights after AdamW", share, share, worst, tolerance, name)


def show(findings: list[Finding]) -> None:
    """Prints the table, and the verdict when it is good."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    table = Table("", "single process", "parallel", "difference", "tolerance", Column("worst at", overflow="fold"), box=SIMPLE)
    for f in findings:
        colour = "green" if f.ok else "red"
        table.add_row(f.quantity, f.single, f.parallel, f"[{colour}]{f.difference:.1e}[/]", f"{f.tolerance:.0e}", f.worst)
    console.print(table)
    if all(f.ok for f in findings):
        console.print("[green]verified[/]")
