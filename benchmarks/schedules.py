"""Named and synthesised schedules on uneven stages: simulated step times beside those of the engine, on stages that sleep.

    python -m meshwright.benchmarks.schedules [UNIT_MS]          0: simulate only

Each stage's forward, input gradient and weight gradient take its time in units (20 ms unless told) and no CPU, so that four ranks run at
once on any machine; everything else is the engine's own: programs, messages, deferred weight gradients. What a unit cannot hide
(messages, Python) makes the measured times longer.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.passes.order_problem import Problem, taken_bytes
from meshwright.passes.simulate import Times, timed
from meshwright.passes.stage_memory import Needs
from meshwright.passes.synthesise import synthesise
from meshwright.plans.mesh import Mesh
from meshwright.plans.save import save_plan_dir
from meshwright.runtime.actions import Schedule
from meshwright.runtime.engine import Engine
from meshwright.runtime.execution import StepRecord
from meshwright.runtime.main_gradients import add_later
from meshwright.runtime.orders import SCHEDULES
from meshwright.runtime.schedules import named_order
from meshwright.tests import toy
from meshwright.tests.ranks import run_ranks

RANKS, MICRO_BATCHES = 4, 8
BACKWARD, WEIGHT = 1.2, 0.8
"""Input and weight gradient of a stage, in forwards."""
CHAINS: Mapping[str, tuple[list[float], list[float]]] = {
    "heavy head": ([1, 1, 1, 1.6], [0.5] * 7 + [1.1]),
    "heavy embedding": ([1.8, 1, 1, 1], [1.3] + [0.5] * 7),
    "alternating": ([1, 2, 1, 2], [0.5, 1] * 4),
}
"""Forwards of the stages with one chunk per rank, and with two."""


class Sleep(torch.autograd.Function):
    """Identity that takes time: forward, backward, and a weight gradient that may be put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        seconds = ctx.seconds
        time.sleep(BACKWARD * seconds)
        add_later(ctx.weight, lambda: time.sleep(WEIGHT * seconds))
        return grads[0], None, None


def sleep(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """See Sleep."""
    found: Tensor = Sleep.apply(x, weight, seconds)  # type: ignore[no-untyped-call]
    return found


def stage_text(stage: int, forward_s: Sequence[float]) -> str:
    """A program that sleeps."""
    last = len(forward_s) - 1
    names = [n for i, n in enumerate(toy.shapes()) if i % len(forward_s) == stage]
    weight = next(n for n in names if n != "scale")
    boundary = (("h", (1, toy.SEQ, toy.HIDDEN), "float32", True),)
    start = "received[0]" if stage else f"torch.ones(1, {toy.SEQ}, {toy.HIDDEN}).requires_grad_()"
    return "\n".join([
        "import torch",
        "from meshwright.benchmarks.schedules import sleep",
        f"PARAMETERS = {tuple(names)!r}",
        f"RECEIVES = {boundary if stage else ()!r}",
        f"SENDS = {boundary if stage < last else ()!r}",
        "INPUTS = ()",
        "BUFFERS = ()",
        "def constants(rt, buffers):",
        "    return {}",
        "def counts(rt, constants, inputs):",
        "    return ()",
        "def forward(rt, w, constants, inputs, received, denominators):",
        f"    h = sleep({start}, w[{weight!r}], {forward_s[stage]!r})",
        "    return (h.sum(),)" if stage == last else "    return (h,)",
        "",
    ])


def write_plan(folder: Path, forward_s: Sequence[float], order: Schedule, ranks_of: Sequence[int]) -> Path:
    """A plan directory of sleeping stages whose actions are an order."""
    source = toy.write_weights(folder / "weights")
    document = toy.document(source, Mesh(pp=RANKS), "1f1b", "none")
    stage = document.stages[0]
    stages = tuple(stage.model_copy(update={"layers": (f"s{i}",)}) for i in range(len(forward_s)))
    document = document.model_copy(update={
        "stages": stages,
        "schedule": "synthesised",
        "chunks": len(forward_s) // RANKS,
        "stage_ranks": tuple(ranks_of),
        "actions": tuple(" ".join(map(str, actions)) for actions in order),
        "kinds": {"s": document.kinds["layer"].model_copy(update={"segments": tuple(s.layers[0] for s in stages)})},
    })
    programs = {f"stage_{i}.py": stage_text(i, forward_s) for i in range(len(forward_s))}
    save_plan_dir(folder / "plan", document, programs, {"signature.json": toy.signature().to_json().encode(), "config.json": b"{}"})
    return folder / "plan"


def run(plan: str) -> tuple[float, float]:
    """One rank: start and end of a step's actions, on the machine's clock."""
    engine = Engine(plan)
    for _ in range(2):
        record = StepRecord()
        engine.forward_backward(toy.batch(MICRO_BATCHES), record)
    return record.actions[0].start_s, record.actions[-1].end_s


def measured_s(forward_s: Sequence[float], order: Schedule, ranks_of: Sequence[int]) -> float:
    """Seconds of a step in the engine."""
    with tempfile.TemporaryDirectory() as folder:
        plan = write_plan(Path(folder), forward_s, order, ranks_of)
        spans = run_ranks(RANKS, run, str(plan), timeout=300)
    return max(end for _, end in spans) - min(start for start, _ in spans)


def main(unit_s: float) -> None:
    """Prints the table."""
    print(f"p={RANKS} m={MICRO_BATCHES}, step in units of {1000 * unit_s:.0f} ms; room: activations of the fullest rank, in forwards")
    print("| stages | schedule | simulated | measured | room |\n| --- | --- | --- | --- | --- |")
    for name, both in CHAINS.items():
        for chunks, units in enumerate(both, 1):
            rows = {n: s.order(RANKS, chunks, MICRO_BATCHES) for n, s in SCHEDULES.items() if s.chunks == chunks and "2bw" not in n}
            forward, backward, weight = (tuple(x * u for u in units) for x in (1.0, BACKWARD, WEIGHT))
            times = Times(forward, backward, weight, (0.0,) * (len(units) - 1))
            kept = tuple(Needs.plain(round(100 * u)) for u in units)
            for start in ("zb-h1", "zb-h2") if chunks == 1 else ("zb-v",):
                case = Problem(named_order(start, RANKS, chunks, MICRO_BATCHES), times, kept)
                rows[f"synthesised from {start}"] = synthesise(case)
            for schedule, order in rows.items():
                ranks_of = SCHEDULES[schedule if schedule in SCHEDULES else start].stage_ranks(RANKS, chunks)
                found = f"{measured_s([u * unit_s for u in units], order, ranks_of) / unit_s:.1f}" if unit_s else ""
                room = max(taken_bytes(order, kept)) / 100
                print(f"| {name}, {chunks} | {schedule} | {timed(order, times).step_s:.1f} | {found} | {room:.1f} |", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) / 1000 if len(sys.argv) > 1 else 0.02)
