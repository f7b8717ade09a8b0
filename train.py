"""The `train` command: data, learning-rate schedule, progress, metrics and checkpoints around `Engine.train_step`.

Steps are counted from 0 over the whole run: `--steps N` ends after step N-1, and a run resumed from a checkpoint of k steps
does steps k to N-1, on the batches and learning rates that an uninterrupted run would have had; with another global batch it
goes on behind the last sequence that was seen.

    checkpoints     in a directory, a folder for each; `--keep` of them stay. They are written while training goes on, from a copy of
                    the state in the CPU's memory (not so with --sync-save). A run that torchrun restarts (--max-restarts) goes on from
                    the newest in `--save`, as does `--resume auto`. A damaged one is named, and the one before it taken

    learning rate   rises linearly over the first `warmup` steps to `lr`; then `constant`, or `cosine`: falls along half a
                    cosine to `min_lr` at step N (Loshchilov and Hutter, arXiv 1608.03983)
    metrics         one JSON object per step: step, loss, grad_norm (before clipping), lr, tokens_per_s, seconds; in fp16 also loss_scale
                    (left out when it is 1) and skipped, for a step that overflowed: what is not finite in it is null. Under
                    pipedream-2bw a step is reported after the next one, so that nobody waits for its loss
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.data import Batches
from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.save import load_checked
from meshwright.plans.signature import Signature
from meshwright.runtime.checkpoint_files import complete
from meshwright.runtime.engine import Engine
from meshwright.runtime.loss_scale import DEFAULT
from meshwright.runtime.metrics import Metrics, NonFiniteError
from meshwright.runtime.orders import ASYNCHRONOUS
from meshwright.tokens import TokenSource, open_tokens, prepare

PATIENCE_S = 600.0
"""How long a rank waits for a slow one; a dead one is noticed at once, by its closed connections and by torchrun."""
LONGEST_PREPARATION = timedelta(hours=24)
AUTO = Path("auto")
Shape = Literal["cosine", "constant"]


@dataclass(frozen=True)
class LearningRate:
    """Learning rate by step; see the module's text."""

    peak: float
    warmup: int
    steps: int
    shape: Shape
    floor: float

    def at(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.shape == "constant":
            return self.peak
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class StepRecord:
    """One line of the metrics file."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    seconds: float
    loss_scale: float = 1.0
    skipped: bool = False

    def fields(self) -> dict[str, object]:
        """As the metrics file has it."""
        found = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in asdict(self).items()}
        scaled = self.skipped or self.loss_scale != 1.0
        return {key: value for key, value in found.items() if scaled or key not in ("loss_scale", "skipped")}

    def __str__(self) -> str:
        if self.skipped:
            return f"step {self.step}  skipped: gradients overflow with loss scale {self.loss_scale:g}"
        return (
            f"step {self.step}  loss {self.loss:.4f}  grad norm {self.grad_norm:.3f}  lr {self.lr:.2e}  "
            f"{self.tokens_per_s:,.0f} tokens/s"
        )


@dataclass(frozen=True)
class Done:
    """A step that was run; of one without a flush the loss may not be known yet, and is waited for when it is reported."""

    step: int
    metrics: Metrics
    lr: float
    tokens: int
    seconds: float

    def record(self) -> StepRecord:
        """Its line."""
        return StepRecord(
            self.step,
            self.metrics.loss,
            self.metrics.grad_norm,
            self.lr,
            self.tokens / self.seconds,
            self.seconds,
            self.metrics.loss_scale,
            self.metrics.skipped,
        )


def command(
    ctx: typer.Context,
    data: Annotated[Path, typer.Option(help="text file, directory of them, .jsonl with `text`, or .npy of token ids")],
    steps: Annotated[int, typer.Option(min=1, help="steps of the whole run")],
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 3e-4,
    optimizer: Annotated[Literal["adamw", "sgd"], typer.Option()] = "adamw",
    weight_decay: Annotated[float, typer.Option(min=0.0)] = 0.0,
    betas: Annotated[tuple[float, float], typer.Option(help="AdamW's two")] = (0.9, 0.95),
    clip: Annotated[float, typer.Option(min=0.0, help="largest gradient norm; 0 for no limit")] = 1.0,
    warmup: Annotated[int, typer.Option(min=0, help="steps of linear warm-up")] = 0,
    min_lr: Annotated[float | None, typer.Option(help="where cosine ends; a tenth of --lr when not given")] = None,
    schedule: Annotated[Shape, typer.Option(help="of the learning rate")] = "cosine",
    save: Annotated[Path | None, typer.Option(help="directory for checkpoints")] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="also save after every N steps")] = None,
    keep: Annotated[int, typer.Option(min=1, help="checkpoints that stay in --save: the newest")] = 2,
    async_save: Annotated[bool, typer.Option("--async-save/--sync-save", help="write checkpoints while training goes on, or not")] = True,
    resume: Annotated[Path | None, typer.Option(help="directory of checkpoints to go on from; auto: --save, if there is one")] = None,
    group: Annotated[list[str] | None, typer.Option(help="PATTERN:weight_decay=0,lr_scale=0.1 for parameters by name")] = None,
    metrics: Annotated[Path | None, typer.Option(help="file for one JSON object per step")] = None,
    log_every: Annotated[int, typer.Option(min=1, help="steps between printed lines")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="order of the data; the plan's seed when not given")] = None,
    mask_token: Annotated[int | None, typer.Option(help="masked-lm on token ids: the mask token's id")] = None,
    loss_scale: Annotated[float, typer.Option(help="fp16: what the loss is multiplied by at first")] = DEFAULT.initial,
    scale_growth: Annotated[float, typer.Option(help="fp16: by how much it grows")] = DEFAULT.growth,
    scale_backoff: Annotated[float, typer.Option(help="fp16: by how much it shrinks after an overflow")] = DEFAULT.backoff,
    scale_interval: Annotated[int, typer.Option(help="fp16: good steps in a row after which it grows")] = DEFAULT.interval,
) -> None:
    """Trains the model on text."""
    if lr <= 0:
        raise InputError(f"--lr {lr}: a learning rate is above 0")
    if save_every and save is None:
        raise InputError("--save-every needs --save DIR, where the checkpoints go")
    start = where_to_resume(resume, save)
    plan_dir: Path = ctx.obj
    document, signature = load_checked(plan_dir)
    source = TokenSource(data, document.model.source, document.model.kind, signature.vocab_size)
    rates = LearningRate(lr, warmup, steps, schedule, lr / 10 if min_lr is None else min_lr)
    settings: dict[str, object] = {"name": optimizer, "lr": rates.at(0), "weight_decay": weight_decay, "clip": clip or None}
    if optimizer == "adamw":
        settings["betas"] = betas
    settings["groups"] = [read_group(text) for text in group or ()]
    scaling = {"initial": loss_scale, "growth": scale_growth, "backoff": scale_backoff, "interval": scale_interval}
    settings["loss_scale"] = scaling
    engine = Engine(plan_dir, optimizer=settings, timeout_s=PATIENCE_S)
    if start is not None:
        load_newest(engine, start)
    data_seed = engine.data.get("seed", document.seed) if seed is None else seed
    batches = load_batches(source, document, signature, data_seed, mask_token)
    if "sequences" in engine.data:
        batches = replace(batches, offset=engine.data["sequences"] - engine.step * document.global_batch)
    late = 1 if document.schedule == ASYNCHRONOUS else 0
    unreported: list[Done] = []
    with reporting(steps, engine.step, metrics, log_every, append=start is not None) as report, ending_saves(engine):
        for done in run_steps(engine, batches, rates, range(engine.step, steps)):
            unreported.append(done)
            if len(unreported) > late:
                report(unreported.pop(0).record())
            engine.data = {"seed": data_seed, "sequences": batches.position(done.step + 1)}
            if save is not None and save_every and (done.step + 1) % save_every == 0 and done.step + 1 < steps:
                engine.save(save, keep, wait=not async_save)
        for done in unreported:
            report(done.record())
    if save is not None:
        engine.save(save, keep)
        print(f"saved {save} after step {engine.step}")


def read_group(text: str) -> dict[str, object]:
    """A parameter group from PATTERN:KEY=NUMBER,..."""
    pattern, _, settings = text.rpartition(":")
    found: dict[str, object] = {"match": pattern}
    for setting in settings.split(","):
        key, _, value = setting.partition("=")
        try:
            found[key] = float(value)
        except ValueError:
            raise InputError(f"--group {text}: expected PATTERN:weight_decay=NUMBER,lr_scale=NUMBER") from None
    return found


def where_to_resume(resume: Path | None, save: Path | None) -> Path | None:
    """The directory of checkpoints to go on from, None for a fresh start."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if (restarted or resume == AUTO) and save is not None and complete(save):
        return save
    if resume == AUTO:
        if save is None:
            raise InputError("--resume auto needs --save DIR, where the checkpoints are")
        return None
    if resume is not None and not resume.is_dir():
        raise InputError(f"--resume {resume}: no such checkpoint directory")
    return resume


def load_newest(engine: Engine, directory: Path) -> None:
    """Loads the newest checkpoint that is sound; says which are not. InputError when none is."""
    first: InputError | None = None
    for folder in reversed(complete(directory) or [directory]):
        try:
            engine.load(folder)
        except InputError as error:
            first = first or error
            if dist.get_rank() == 0:
                print(f"warning: {error}", file=sys.stderr, flush=True)
            continue
        print(f"going on from {folder}, step {engine.step}")
        return
    assert first is not None
    raise first


@contextmanager
def ending_saves(engine: Engine) -> Iterator[None]:
    """When all ranks stop alike, what was being saved still is."""
    try:
        yield
    except NonFiniteError:
        engine.wait_saved()
        raise


def load_batches(
    source: TokenSource, document: PlanDocument, signature: Signature, seed: int, mask_token: int | None
) -> Batches:
    """Global batches; the first process of each machine tokenises, before the others open what it wrote."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        prepare(source)
    dist.barrier(dist.new_group(backend="gloo", timeout=LONGEST_PREPARATION))
    inputs = {spec.name: tuple(spec.shape) for spec in signature.inputs}
    tokens = open_tokens(source)
    return Batches(tokens, document.task, inputs, document.global_batch, seed, signature.vocab_size, mask_token)


def run_steps(engine: Engine, batches: Batches, rates: LearningRate, steps: range) -> Iterator[Done]:
    """Trains step by step."""
    for step in steps:
        batch = batches.batch(step, engine.own_rows(batches.global_batch))
        start = time.perf_counter()
        engine.learning_rate = rates.at(step)
        metrics = engine.train_step(batch, own_rows=True)
        yield Done(step, metrics, rates.at(step), metrics.tokens, time.perf_counter() - start)


@contextmanager
def reporting(
    steps: int, done: int, metrics: Path | None, log_every: int, append: bool
) -> Iterator[Callable[[StepRecord], None]]:
    """A function that reports a record: a live line on a terminal, else lines; and the metrics file. Rank 0 only."""
    if dist.get_rank() != 0:
        yield lambda record: None
        return
    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
    with ExitStack() as stack:
        lines = stack.enter_context(metrics.open("a" if append else "w", encoding="utf-8")) if metrics else None
        progress = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal))
        task = progress.add_task("train", total=steps, completed=done)

        def report(record: StepRecord) -> None:
            if lines is not None:
                lines.write(json.dumps(record.fields()) + "\n")
                lines.flush()
            progress.update(task, completed=record.step + 1, description=str(record))
            last = record.step + 1 == steps
            if record.step % log_every == 0 or last:
                progress.console.print(str(record))

        yield report
