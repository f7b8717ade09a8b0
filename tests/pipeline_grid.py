"""Every schedule on every mesh: parity with a single process, and activations in flight as simulated. By hand, since it takes minutes:

    python -m meshwright.tests.pipeline_grid FILE [--mesh pp=4] [--model t5-5]     a Markdown table; exit status 1 when a case fails

FILE has the findings, a line of JSON per mesh and model; those that it has already are not made again.

A case is a mesh, a schedule, a model and a number of micro-batches of one row. The truth is the model itself in one process, in FP64,
on the whole batch. Each plan is one engine: for every number of micro-batches loss, gradients and gradient norm, with the gates of
tests/parity.py (gradients and norm may be twice as far off as the single process' own in FP32, where rounding turns a ReLU); then the
losses of STEPS AdamW steps with 4 micro-batches, 2e-5 apart at most. pipedream-2bw is compared with a single process that makes the same
delayed updates. FP64, since AdamW divides by the gradient: what rounding makes of an element whose gradient is almost zero may be as large
as any update, and a ReLU may turn it into a jump.

`edge` models have stages that hold nothing but the embedding or the head.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from meshwright.passes.simulate import in_flight
from meshwright.plan import Plan, compile
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.runtime.actions import Schedule
from meshwright.runtime.endless import order as endless_order
from meshwright.runtime.engine import Engine
from meshwright.runtime.orders import ASYNCHRONOUS, SCHEDULES
from meshwright.runtime.schedules import plan_order
from meshwright.tests.parity import NOTHING, OPTIMIZER, Tiny, batches, build, relative
from meshwright.tests.ranks import run_ranks

MESHES = ("pp=2", "pp=4", "pp=2,tp=2", "pp=2,dp=2")
MICRO_BATCHES = (1, 3, 4, 7, 8)
SYNTHESISED, ORDERED = "synthesised", 7
"""An order of its own is made for 7 micro-batches; for others zb-h1 or zb-v stands in."""
STEPS, STEP_MICRO_BATCHES = 4, 4
SEQ = 16
PATIENCE_S = 1800.0
GATES = {"loss": 2e-6, "gradients": 1e-5, "norm": 5e-6, "steps": 2e-5}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 2}
MODELS: Mapping[str, tuple[str, int, Mapping[str, object]]] = {
    "llama-5": ("llama", 5, {**SMALL, "tie_word_embeddings": False}),
    "llama-5-tied": ("llama", 5, {**SMALL, "tie_word_embeddings": True}),
    "llama-8": ("llama", 8, {**SMALL, "tie_word_embeddings": False}),
    "llama-8-tied": ("llama", 8, {**SMALL, "tie_word_embeddings": True}),
    "t5-5": ("t5", 5, SMALL_T5),
    "t5-8": ("t5", 8, SMALL_T5),
    "edge": ("llama", 5, {**SMALL, "tie_word_embeddings": False}),
    "edge-tied": ("llama", 5, {**SMALL, "tie_word_embeddings": True}),
}
EDGES = [["embedding"], ["model.layers.{0..2}"], ["model.layers.{3,4}"], ["head"]]
Data = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Truth:
    """Of a batch, from the single process in FP64. `single` and `single_norm`: how far its gradients and norm in FP32 are from these."""

    loss: float
    norm: float
    gradients: Mapping[str, torch.Tensor]
    single: float
    single_norm: float


@dataclass(frozen=True)
class Job:
    """A plan and what it is held against: by rows of a batch, and by losses of steps."""

    schedule: str
    directory: str
    truths: str
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Found:
    """Differences of a job by micro-batches, those of STEPS steps, and the activations in flight (measured, simulated) that differ."""

    schedule: str
    cases: Mapping[int, Mapping[str, float]]
    steps: float
    in_flight: tuple[tuple[int, int, int], ...]

    @property
    def num_bad(self) -> int:
        bad = sum(any(case[what] > limit(what, case) for what in ("loss", "gradients", "norm")) for case in self.cases.values())
        return bad + (self.steps > GATES["steps"]) + len(self.in_flight)


OWN = {"gradients": "single", "norm": "single_norm"}


def limit(what: str, case: Mapping[str, float]) -> float:
    """The gate; for gradients and norm twice the FP32 single process's own distance from FP64, where that is more."""
    return max(GATES[what], 2 * case[OWN[what]]) if what in OWN else GATES[what]


def load(tiny: Tiny) -> torch.nn.Module:
    """The single process."""
    return tiny.load().double()


def truth(tiny: Tiny, batch: dict[str, torch.Tensor]) -> Truth:
    """Loss and gradients."""
    loss, gradients = graded(load(tiny), batch)
    single, norm = graded(tiny.load(), batch)[1], norm_of(gradients)
    return Truth(loss, norm, gradients, furthest(single, gradients), abs(norm_of(single) - norm) / norm)


def norm_of(gradients: Mapping[str, torch.Tensor]) -> float:
    """Of all gradients together."""
    return float(torch.stack([g.double().norm() for g in gradients.values()]).norm())


def graded(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a model."""
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def losses(tiny: Tiny, data: Data, delayed: bool) -> tuple[float, ...]:
    """Of AdamW steps; `delayed`: W(t+1) = W(t) - lr g(W(t-1))."""
    model, found = load(tiny), []
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    before = [p.detach().clone() for p in parameters]
    for batch in data:
        now = [p.detach().clone() for p in parameters]
        put(parameters, before if delayed else now)
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        put(parameters, now)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append(float(loss.detach()))
        before = now
    return tuple(found)


def put(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Writes weights."""
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def run(jobs: list[dict[str, Any]], micro_batches: Sequence[int]) -> list[dict[str, Any]]:
    """One rank: all jobs. Rank 0 compares gradients. What is passed is plain, since ranks import this file under another name."""
    return [asdict(run_job(Job(**job), micro_batches)) for job in jobs]


def run_job(job: Job, micro_batches: Sequence[int]) -> Found:
    engine = Engine(job.directory, OPTIMIZER, timeout_s=PATIENCE_S)
    mesh, seq = engine.plan.mesh, engine.plan.seq
    truths = {rows: Truth(**fields) for rows, fields in torch.load(job.truths).items()}
    coordinate = mesh.coordinates(engine.rank)["pp"]
    kept: list[tuple[int, int, int]] = []

    def compare_in_flight(count: int, order: Schedule) -> None:
        simulated = in_flight(order)[coordinate]
        if engine.peak_in_flight != simulated:
            kept.append((count, engine.peak_in_flight, simulated))
        engine.peak_in_flight = 0

    cases = {}
    for count in micro_batches:
        rows = count * mesh.dp
        metrics = engine.forward_backward(batches(rows, seq, 1)[0])
        compare_in_flight(count, plan_order(engine.plan, count))
        expected, gradients = truths[rows], engine.gradients()
        cases[count] = {
            "loss": abs(metrics.loss - expected.loss),
            "norm": abs(metrics.grad_norm - expected.norm) / expected.norm,
            "gradients": furthest(gradients, expected.gradients) if engine.rank == 0 else 0.0,
            "single": expected.single,
            "single_norm": expected.single_norm,
        }
    steps = [engine.train_step(batch).loss for batch in batches(STEP_MICRO_BATCHES * mesh.dp, seq, STEPS)]
    engine.gradients()  # ends the batch under way
    asynchronous = engine.plan.schedule == ASYNCHRONOUS
    order = endless_order(mesh.pp, STEP_MICRO_BATCHES, STEPS) if asynchronous else plan_order(engine.plan, STEP_MICRO_BATCHES)
    compare_in_flight(STEP_MICRO_BATCHES, order)
    apart = max(abs(here - there) for here, there in zip(steps, job.losses, strict=True))
    return Found(job.schedule, cases, apart, tuple(kept))


def furthest(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Largest relative difference of a parameter's gradient; infinite when one is missing."""
    nothing = NOTHING * max(float(g.norm()) for g in expected.values())
    if found.keys() != expected.keys():
        return float("inf")
    return max(relative(found[name], gradient, nothing) for name, gradient in expected.items())


@cache
def model_of(name: str) -> Tiny:
    kind, layers, changes = MODELS[name]
    return replace(build(kind, layers, **changes), seq=SEQ)


def plans(name: str, mesh: str, schedules: Sequence[str]) -> Iterator[tuple[str, Plan | str]]:
    """A plan for each schedule, or why there is none. Schedules of as many chunks share what is compiled."""
    compiled: dict[tuple[int, bool], Plan] = {}
    for schedule in schedules:
        named = SCHEDULES.get(schedule)
        key = (named.chunks if named else 1, schedule in ("zb-v", SYNTHESISED))
        edges = {"stages": [{"layers": layers} for layers in EDGES], "chunks": key[0]}
        stages = edges if name.startswith("edge") else {}
        if stages and Mesh.parse(mesh).pp * key[0] != len(EDGES):
            continue
        try:
            if key not in compiled or schedule == SYNTHESISED:
                rows = (ORDERED if schedule == SYNTHESISED else STEP_MICRO_BATCHES) * Mesh.parse(mesh).dp
                model = model_of(name)
                compiled[key] = compile(model.directory, mesh=mesh, seq=SEQ, global_batch=rows, schedule=schedule, **stages)
        except InputError as error:
            yield schedule, str(error)
            continue
        plan = compiled[key]
        yield schedule, plan if schedule == SYNTHESISED else replace(plan, document=plan.document.model_copy(update={"schedule": schedule}))


def run_group(
    name: str, mesh: str, schedules: Sequence[str], micro_batches: Sequence[int] = MICRO_BATCHES
) -> tuple[list[list[Found]], list[str]]:
    """A model on a mesh: what each rank found for each schedule, and the schedules that the model cannot have. One launch."""
    dp, model = Mesh.parse(mesh).dp, model_of(name)
    refused, jobs = [], []
    with tempfile.TemporaryDirectory(prefix="grid-") as folder:
        truths = Path(folder) / "truths.pt"
        torch.save({n * dp: vars(truth(model, batches(n * dp, SEQ, 1)[0])) for n in micro_batches}, truths)
        data = batches(STEP_MICRO_BATCHES * dp, SEQ, STEPS)
        expected = {delayed: losses(model, data, delayed) for delayed in (False, True)}
        for schedule, plan in plans(name, mesh, schedules):
            if isinstance(plan, str):
                refused.append(f"{name} {mesh} {schedule}: {plan}")
                continue
            plan.save(Path(folder) / schedule)
            jobs.append(Job(schedule, str(Path(folder) / schedule), str(truths), expected[schedule == ASYNCHRONOUS]))
        if not jobs:
            return [], refused
        ranks = run_ranks(Mesh.parse(mesh).world_size, run, list(map(asdict, jobs)), micro_batches, timeout=3000)
    return [[Found(**fields) for fields in rank] for rank in ranks], refused


def main() -> int:
    """Runs what is missing of the grid, and prints all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--mesh", choices=MESHES, action="append")
    parser.add_argument("--model", choices=tuple(MODELS), action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = read(options.file)
    for name in options.model or MODELS:
        for mesh in options.mesh or MESHES:
            if (mesh, name) in known:
                continue
            ranks, refused = run_group(name, mesh, (*SCHEDULES, SYNTHESISED))
            print(*refused, sep="\n", file=sys.stderr)
            known[mesh, name] = [found for rank in ranks for found in rank]
            with options.file.open("a") as file:
                file.write(json.dumps([mesh, name, [asdict(found) for found in known[mesh, name]]]) + "\n")
    print(table(known))
    return 1 if any(found.num_bad for group in known.values() for found in group) else 0


def read(file: Path) -> dict[tuple[str, str], list[Found]]:
    """Findings by mesh and model."""
    known: dict[tuple[str, str], list[Found]] = {}
    for mesh, name, group in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
        known[mesh, name] = [
            Found(f["schedule"], {int(n): case for n, case in f["cases"].items()}, f["steps"], tuple(map(tuple, f["in_flight"])))
            for f in group
        ]
    return known


def table(known: Mapping[tuple[str, str], list[Found]]) -> str:
    """The largest differences by mesh and schedule."""
    lines = ["| mesh | schedule | models | loss | gradients | norm | 4 steps | in flight | beyond its gate |", "|" + " --- |" * 9]
    for mesh, schedule in product(MESHES, (*SCHEDULES, SYNTHESISED)):
        groups = {name: [f for f in found if f.schedule == schedule] for (at, name), found in known.items() if at == mesh}
        found = [f for group in groups.values() for f in group]
        if found:
            lines.append(f"| {mesh} | {schedule} | {' '.join(name for name, group in groups.items() if group)} | {worst(found)} |")
    return "\n".join(lines)


def worst(found: Sequence[Found]) -> str:
    """The cells of a line."""
    largest = [max(case[what] for f in found for case in f.cases.values()) for what in ("loss", "gradients", "norm")]
    numbers = " | ".join(f"{value:.0e}" for value in (*largest, max(f.steps for f in found)))
    return f"{numbers} | {sum(len(f.in_flight) for f in found) or 'equal'} | {sum(f.num_bad for f in found) or 'none'}"


if __name__ == "__main__":
    sys.exit(main())
