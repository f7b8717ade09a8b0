"""The `bench` command: how fast a plan runs here, beside what it was predicted to do.

    step        median wall seconds of a step, all ranks in step with each other (but under pipedream-2bw, which has no flush)
    CPU         process_time of a step summed over ranks (mean over steps): what the machine spends, whoever waits
    memory      per rank, from `Engine.memory`
    actions     seconds of every stage's forward, backward and weight gradient, and the bubble, from recorded steps (runtime.trace) of
                their own: without updates, with a flush, and on GPUs with a wait after each action
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from meshwright.plans.document import PlanDocument
from meshwright.plans.save import load_checked
from meshwright.plans.units import format_bytes, format_seconds
from meshwright.reference import random_batch
from meshwright.runtime.engine import Engine
from meshwright.runtime.execution import StepRecord
from meshwright.runtime.orders import ASYNCHRONOUS
from meshwright.runtime.trace import RankTrace, Span, bubble, mean_seconds, rank_trace, write_trace
from meshwright.train import PATIENCE_S

T = TypeVar("T")
WARM_UP = 2


@dataclass(frozen=True)
class Measured:
    """What a bench found. Memory is bytes per rank by part, `actions` seconds by stage and kind (`0F`)."""

    step_s: float
    fastest_s: float
    cpu_s: float
    tokens_per_s: float
    predicted_s: float
    bubble: float
    predicted_bubble: float
    actions: Mapping[str, float]
    predicted_actions: Mapping[str, float]
    memory: tuple[Mapping[str, int], ...]


def command(
    ctx: typer.Context,
    steps: Annotated[int, typer.Option(min=1, help="steps to measure, after the warm-up")] = 10,
    trace: Annotated[Path | None, typer.Option(help="write a Chrome trace of one step, for Perfetto")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Measures seconds per step, tokens per second, CPU seconds, the pipeline's actions and memory."""
    plan_dir: Path = ctx.obj
    document, signature = load_checked(plan_dir)
    engine = Engine(plan_dir, optimizer={"name": "adamw", "lr": 1e-5, "clip": 1.0}, timeout_s=PATIENCE_S)
    batch = random_batch(signature, document)
    traced = record(engine, batch)
    measured = measure(engine, document, batch, steps, tuple(rank.spans for rank in traced))
    if dist.get_rank() == 0:
        if trace is not None:
            write_trace(trace, traced)
        print(json.dumps(asdict(measured))) if as_json else show(measured, document, steps)


def record(engine: Engine, batch: Mapping[str, torch.Tensor]) -> tuple[RankTrace, ...]:
    """Every rank's step, the last of a few. The same on every rank."""
    for _ in range(WARM_UP):
        found = StepRecord()
        dist.barrier()
        origin_s = time.perf_counter()
        engine.forward_backward(batch, found)
    return tuple(gathered(rank_trace(found, origin_s)))


def predicted_actions(document: PlanDocument, kinds: Collection[str]) -> dict[str, float]:
    """Predicted seconds by stage and kind; a backward has its weight gradients in it where the schedule has no W."""
    found: dict[str, float] = {}
    for number, stage in enumerate(document.stages):
        put_off = stage.backward_weight_s if f"{number}W" in kinds else 0.0
        found |= {f"{number}F": stage.forward_s, f"{number}B": stage.backward_s - put_off, f"{number}W": put_off}
    return {name: found[name] for name in kinds}


def measure(
    engine: Engine,
    document: PlanDocument,
    batch: Mapping[str, torch.Tensor],
    steps: int,
    recorded: tuple[tuple[Span, ...], ...],
) -> Measured:
    """Steps on one batch. The same on every rank."""
    for _ in range(WARM_UP):
        engine.train_step(batch)
    walls = []
    cpu_start = time.process_time()
    for _ in range(steps):
        if document.schedule != ASYNCHRONOUS:
            dist.barrier()
        start = time.perf_counter()
        engine.train_step(batch)
        walls.append(time.perf_counter() - start)
    cpu = sum(gathered((time.process_time() - cpu_start) / steps))
    step_s = statistics.median(walls)
    tokens = document.global_batch * document.seq
    memory = gathered(dict(engine.memory()["peak"]))
    actions = {f"{stage}{kind}": seconds for (stage, kind), seconds in mean_seconds(recorded).items()}
    return Measured(
        step_s,
        min(walls),
        cpu,
        tokens / step_s,
        document.predicted.step_s,
        bubble(recorded),
        document.predicted.bubble,
        actions,
        predicted_actions(document, actions),
        tuple(memory),
    )


def gathered(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank."""
    found: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def show(measured: Measured, document: PlanDocument, steps: int) -> None:
    """Prints the tables."""
    console = Console(highlight=False)
    batch = f"global batch {document.global_batch} x {document.seq}"
    console.print(f"{document.mesh}: {steps} steps after {WARM_UP} of warm-up, {batch}")
    table = Table("", "measured", "predicted", box=SIMPLE)
    table.add_row("seconds per step (median)", f"{measured.step_s:.3f}", f"{measured.predicted_s:.3f}")
    table.add_row("seconds per step (fastest)", f"{measured.fastest_s:.3f}", "")
    table.add_row("tokens per second", f"{measured.tokens_per_s:,.0f}", f"{document.predicted.tokens_per_s:,.0f}")
    table.add_row("CPU seconds per step, all ranks", f"{measured.cpu_s:.3f}", "")
    table.add_row("bubble", f"{measured.bubble:.1%}", f"{measured.predicted_bubble:.1%}")
    for name, seconds in measured.actions.items():
        words = {"F": "forward", "B": "backward", "W": "weight gradients"}[name[-1]]
        table.add_row(f"stage {name[:-1]}: {words}", format_seconds(seconds), format_seconds(measured.predicted_actions[name]))
    console.print(table)
    parts = list(measured.memory[0])
    table = Table("rank", *parts, title="peak memory", box=SIMPLE)
    for rank, memory in enumerate(measured.memory):
        table.add_row(str(rank), *(format_bytes(memory[part]) for part in parts))
    console.print(table)
