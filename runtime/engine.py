"""The engine: runs a plan on this rank, under torchrun.

    engine = Engine("plan/", optimizer={"name": "adamw", "lr": 1e-3, "clip": 1.0})
    metrics = engine.train_step({"input_ids": ids, "labels": ids})        # the global batch, on every rank

A step: zero the gradients; count the loss targets of the global batch (nothing is sent where every rank has all of it);
run the schedule's actions (runtime.execution); sum the gradients over ranks (runtime.gradients); add up loss and
squared gradient norm over all ranks in FP64, in one all-reduce; clip; update. In fp16 the backward starts from a loss scale, and a step
whose sums are not finite is skipped by all ranks (runtime.loss_scale).

Every method is called on every rank, with the same arguments. InputError is raised on all ranks; any other failure is
told by the traceback's last line, `error: rank R ...`, and ends this rank, upon which torchrun ends the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.plans.mesh import RANK_AXES
from meshwright.plans.precision import DTYPES
from meshwright.plans.save import load_checked, load_programs
from meshwright.runtime.actions import Action, Schedule, split_backwards
from meshwright.runtime.agreement import FailureReport, together
from meshwright.runtime.batch import check_batch, flat_inputs
from meshwright.runtime.buckets import Arrangement
from meshwright.runtime.checkpoint import Saver, load_checkpoint
from meshwright.runtime.checkpoint_files import Facts
from meshwright.runtime.context import Context
from meshwright.runtime.execution import StepRecord
from meshwright.runtime.flat_bucket import Numbers
from meshwright.runtime.gathering import gather
from meshwright.runtime.gradients import FlatParameters, clip_scale
from meshwright.runtime.launch import choose_device, join_processes, place, tied_groups
from meshwright.runtime.loss_scale import LossScale, ScaleOptions
from meshwright.runtime.metrics import LateMetrics, Metrics, NonFiniteError, Totals
from meshwright.runtime.optimizer import Optimizer, OptimizerOptions, read_options
from meshwright.runtime.orders import ASYNCHRONOUS
from meshwright.runtime.shards import PARAMETERS, State
from meshwright.runtime.stages import RankStages
from meshwright.runtime.stale import StaleSteps
from meshwright.runtime.weight_copy import locate_weights
from meshwright.runtime.weights import Reader, whole

TIMEOUT_S = 60.0


class Doing(Protocol):
    """What knows the action that a rank is at."""

    @property
    def action(self) -> Action | None: ...


class Engine:
    """A rank of a plan. `optimizer` may be left out when nothing is trained; `device` defaults to this rank's GPU, else
    the CPU. A rank that waits longer than `timeout_s` for another gives up. Without `dropout` nothing is random.
    `learning_rate` may be set at any time; `data` says where the data goes on, and is saved and loaded. `peak_in_flight`: the most
    (stage, micro-batch) pairs that activations were kept for.

    Under pipedream-2bw train_step returns while the batch is still under way; forward_backward, gradients, state_dict, save and load end it
    first. A non-finite batch is reported by the call that ends it."""

    def __init__(
        self,
        plan_dir: str | Path,
        optimizer: Mapping[str, object] | None = None,
        device: str | torch.device | None = None,
        timeout_s: float = TIMEOUT_S,
        dropout: bool = True,
    ) -> None:
        self._directory = directory = Path(plan_dir)
        self.plan, self.signature = load_checked(directory)
        options = None if optimizer is None else read_options(optimizer)
        texts = load_programs(directory, self.plan)
        self.device = choose_device(device)
        self._axes = join_processes(self.plan.mesh, self.device, timeout_s)
        self.rank = dist.get_rank()
        self.step = 0
        self.data: dict[str, int] = {}
        self._placement = place(directory, texts, self.plan, self.signature, self.rank)
        asynchronous = self.plan.schedule == ASYNCHRONOUS
        self._tied = tied_groups(self._placement, self._axes, timeout_s, own=asynchronous)
        layers = frozenset(name for names in self.plan.stage_segments for name in names)
        self._arrangement = Arrangement(self._placement, layers, self.plan.zero)
        self._totals = Totals(self._arrangement, timeout_s if asynchronous else None)
        numbers = Numbers(dtype_of(self.plan.precision), dtype_of(self.plan.reduce_dtype))
        self._versions = [FlatParameters(self._arrangement, self._axes, self.device, None, numbers)]
        if asynchronous:
            self._versions += [FlatParameters(self._arrangement, self._axes, self.device, self._versions[0].frozen, numbers)]
        self._parameters = self._graded = self._versions[0]
        self._source = locate_weights(directory, self.plan, self.signature)
        together(self._read_weights)
        self._parameters.spread()
        self._context = context = Context(self._axes, self.device, self.plan.seed, dropout)
        context.segments = self._parameters.residency if self._parameters.is_sharded else None
        self._stages = RankStages(directory, texts, self.plan, self._axes, context, self._versions, timeout_s)
        self._take_versions()
        self._optimizers = [] if options is None else self._build_optimizers(options)
        self._optimizer = self._optimizers[0] if self._optimizers else None
        self._stale = self._build_stale() if asynchronous else None
        self.learning_rate = 0.0 if options is None else options.lr
        scale = ScaleOptions() if options is None else options.loss_scale
        self._scale = LossScale.start(scale) if self.plan.precision == "fp16" else None
        self._num_skipped = 0
        self._saver = Saver(self._arrangement)
        self._peak_activation_bytes = 0
        self._peak_transient_bytes = 0
        self._num_updates, self._update_norm, self._rates = 0, 0.0, [0.0] * len(self._versions)
        self._problem = ""
        self.peak_in_flight = 0

    def own_rows(self, rows: int) -> range:
        """Of a global batch of so many rows, those that this rank computes with."""
        dp, at = self.plan.mesh.dp, self._placement.at["dp"]
        return range(at * rows // dp, (at + 1) * rows // dp)

    def train_step(self, batch: Mapping[str, object], own_rows: bool = False) -> Metrics:
        """Loss and gradients of a global batch, then one update; NonFiniteError, and no update, when they are not finite. `own_rows`: the
        batch has the rows of `own_rows(G)` alone, on every rank."""
        if self._optimizer is None:
            raise InputError('train_step needs an optimizer, as in Engine(plan_dir, {"name": "adamw", "lr": 1e-3})')
        if self._stale is not None:
            return self._stale_step(self._stale, batch, own_rows)
        metrics = self.forward_backward(batch, own_rows=own_rows)
        if not metrics.is_finite:
            return self._skip(metrics)
        with self._reported("update"):
            scale = clip_scale(self._optimizer.options.clip, metrics.grad_norm)
            if scale != 1.0:
                self._parameters.scale_gradients(scale)
            self._optimizer.step(self.learning_rate)
            self._parameters.updated()
        if self._scale is not None:
            self._scale.good()
        self.step += 1
        return replace(metrics, step=self.step)

    def _skip(self, metrics: Metrics) -> Metrics:
        """A step that is not finite: with a smaller loss scale the next may be."""
        if not self.lower_loss_scale():
            raise NonFiniteError(self._describe_non_finite(self.step, metrics.loss, metrics.grad_norm))
        self.step += 1
        self._num_skipped += 1
        return replace(metrics, step=self.step, skipped=True)

    def lower_loss_scale(self) -> bool:
        """After an overflow, on all ranks alike: whether a smaller scale may help. False but in fp16."""
        return self._scale is not None and self._scale.overflowed()

    def forward_backward(self, batch: Mapping[str, object], record: StepRecord | None = None, own_rows: bool = False) -> Metrics:
        """Loss and gradients of a global batch. `record` is filled with the times of this rank's actions; `own_rows` as in train_step."""
        inputs = flat_inputs(batch)
        num_micro_batches = check_batch(inputs, self.plan, self.signature, own_rows)
        self._flush()
        version = 0 if self._stale is None else self._stale.version
        flat = self._graded = self._versions[version]
        turn = self._stages.turn(inputs, num_micro_batches, self.step, version, own_rows)
        execution = self._stages.execution(turn, num_micro_batches)
        actions = self._stages.schedule(num_micro_batches)[self._placement.at["pp"]]
        scale = self._context.loss_scale = self.loss_scale
        with self._reported("forward and backward", execution):
            flat.begin(num_micro_batches, not split_backwards(actions), None if record is None else record.sums)
            execution.run(actions, record)
        self._peak_activation_bytes = max(self._peak_activation_bytes, execution.peak_saved_bytes)
        self._peak_transient_bytes = max(self._peak_transient_bytes, execution.peak_transient_bytes - flat.staged.peak)
        self.peak_in_flight = max(self.peak_in_flight, execution.peak_in_flight)
        with self._reported("gradient sums"):
            flat.finish(self._tied)
            if scale != 1.0:
                flat.scale_gradients(1 / scale)
            loss, square = self._totals.start(flat, turn.loss)()
        return Metrics(loss, math.sqrt(square), self._num_tokens(inputs, own_rows), self.step, scale)

    def _stale_step(self, stale: StaleSteps, batch: Mapping[str, object], own_rows: bool) -> Metrics:
        """A batch without a flush after it; the update is that of the batch before."""
        inputs = flat_inputs(batch)
        num_micro_batches = check_batch(inputs, self.plan, self.signature, own_rows)
        self._rates[stale.version], self._update_norm = self.learning_rate, 0.0
        with self._reported("forward and backward", stale):
            turn = stale.step(inputs, num_micro_batches, self.step, own_rows)
            loss = self._totals.start_loss(turn.loss)
        self.peak_in_flight = max(self.peak_in_flight, stale.peak_in_flight)
        self._peak_activation_bytes = max(self._peak_activation_bytes, stale.peak_saved_bytes)
        self.step += 1
        self._raise_problem()
        return LateMetrics(loss, self._update_norm, self._num_tokens(inputs, own_rows), self.step)

    def _stale_update(self, version: int, step: int, loss: float, square: float) -> None:
        """W(t+1) = W(t) - lr g_t on a version, from the other; with gradients that are not finite W(t+1) = W(t)."""
        flat, norm = self._versions[version], math.sqrt(square)
        flat.take_values(self._parameters)
        self._parameters = self._graded = flat
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._problem = self._describe_non_finite(step, loss, norm)
            self.step -= 1
            return
        optimizer = self._optimizers[version]
        scale = clip_scale(optimizer.options.clip, norm)
        if scale != 1.0:
            flat.scale_gradients(scale)
        optimizer.set_num_steps(self._num_updates)
        optimizer.step(self._rates[version])
        flat.updated()
        self._num_updates, self._update_norm = self._num_updates + 1, norm

    def _flush(self) -> None:
        """Ends the batch that is under way."""
        if self._stale is not None:
            with self._reported("forward and backward", self._stale):
                self._stale.flush()
            self._raise_problem()

    def _raise_problem(self) -> None:
        problem, self._problem = self._problem, ""
        if problem:
            raise NonFiniteError(problem)

    def _num_tokens(self, inputs: Mapping[str, Tensor], own_rows: bool) -> int:
        return inputs[self.signature.inputs[0].name].numel() * (self.plan.mesh.dp if own_rows else 1)

    def gradients(self) -> dict[str, Tensor]:
        """Whole FP32 gradients by the model's parameter names on rank 0, {} elsewhere; after train_step, as clipped."""
        self._flush()
        with self._reported("gathering gradients"):
            return gather(self._arrangement, self._graded.gradient_parts(), trainable_only=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Whole parameters by the model's names on rank 0, {} elsewhere; tied ones under all names, unused ones too."""
        self._flush()
        with self._reported("gathering parameters"):
            found = gather(self._arrangement, self._state()[PARAMETERS])
        if self.rank == 0:
            found.update(self._unused())
            found.update({alias: found[name] for alias, name in self.signature.tied.items() if name in found})
        return found

    def save(self, directory: str | Path, keep: int = 1, wait: bool = True) -> None:
        """Writes parameters, optimizer state, step and `data` to a new folder in a directory that all ranks see, then removes all
        but the newest `keep` checkpoints there. Without `wait` it is written while training goes on, from a copy in the CPU's memory;
        the next save, load and wait_saved wait for it."""
        self._flush()
        with self._reported("saving"):
            unused = self._unused() if self.rank == 0 else {}
            self._saver.start(Path(directory), self._state(), unused, self._facts(), keep, wait)

    def wait_saved(self) -> None:
        """Waits for a save in the background; InputError when it failed."""
        with self._reported("saving"):
            self._saver.wait()

    def load(self, directory: str | Path) -> None:
        """Goes on from the newest checkpoint in a directory, or from the folder of one, of any plan of the same model."""
        self._flush()
        with self._reported("loading"):
            self._saver.wait()
            parts = {**self._state(), PARAMETERS: self._parameter_parts()}
            facts = load_checkpoint(Path(directory), self._arrangement, parts, self._optimizer_name)
            self._parameters.spread()
            for state in self._optimizer.states.values() if self._optimizer else ():
                self._parameters.spread(state)
        self._take_versions()
        self.step, self.data = facts.step, dict(facts.data)
        self._num_skipped = facts.skipped
        self._num_updates = facts.step - facts.skipped
        if self._scale is not None and facts.loss_scale:
            self._scale.scale, self._scale.good_steps = facts.loss_scale, facts.good_steps
        self._context.plan_seed = facts.seed
        if self._optimizer is not None:
            self._optimizer.set_num_steps(self._num_updates)

    def memory(self) -> dict[str, dict[str, int]]:
        """{"now": bytes, "peak": bytes} on this rank, each by parameters, gradients, optimizer, activations, buffers and transient."""
        now, peak = (_summed([flat.memory()[when] for flat in self._versions]) for when in ("now", "peak"))
        optimizer = self._optimizer.num_bytes if self._optimizer else 0
        active, most = 0, self._peak_activation_bytes
        if self.device.type == "cuda":
            active = max(0, torch.cuda.memory_allocated(self.device) - sum(now.values()) - optimizer)
            most = max(0, torch.cuda.max_memory_allocated(self.device) - sum(peak.values()) - optimizer)
        return {
            "now": {**now, "optimizer": optimizer, "activations": active, "buffers": self._stages.constant_bytes, "transient": 0},
            "peak": {
                **peak,
                "optimizer": optimizer,
                "activations": most,
                "buffers": self._stages.constant_bytes,
                "transient": self._peak_transient_bytes,
            },
        }

    @property
    def schedule(self) -> Schedule:
        """Actions of all pipeline ranks for the plan's global batch."""
        return self._stages.schedule(self.plan.num_micro_batches)

    @property
    def loss_scale(self) -> float:
        """What the next backward starts from: 1 but in fp16."""
        return self._scale.scale if self._scale else 1.0

    @property
    def _optimizer_name(self) -> str | None:
        return self._optimizer.options.name if self._optimizer else None

    def _unused(self) -> dict[str, Tensor]:
        """Parameters that the loss does not depend on, as they came."""
        found = {}
        with Reader() as reader:
            for name, spec in self.signature.unused.items():
                found[name] = torch.empty(spec.shape)
                reader.read(found[name], self._source.places[name], whole(spec.shape))
        return found

    def _facts(self) -> Facts:
        config = self._directory / "model" / "config.json"
        model = self.plan.model
        return Facts(
            step=self.step,
            optimizer=self._optimizer_name,
            seed=self._context.plan_seed,
            data=self.data,
            source=model.source,
            kind=model.kind,
            config=config.read_text(encoding="utf-8") if config.is_file() else "",
            tied=self.signature.tied,
            skipped=self._num_skipped,
            loss_scale=self._scale.scale if self._scale else 0.0,
            good_steps=self._scale.good_steps if self._scale else 0,
        )

    def _state(self) -> State:
        """What is saved, in FP32."""
        states = self._optimizer.states if self._optimizer else {}
        parameters = {name: part.float() for name, part in self._parameter_parts().items()}
        return {PARAMETERS: parameters, **{kind: self._parameters.parts(s) for kind, s in states.items()}}

    def _parameter_parts(self) -> dict[str, Tensor]:
        """This rank's share of every parameter it holds, one-dimensional; all of what is frozen."""
        frozen = {name: tensor.view(-1) for name, tensor in self._parameters.frozen.items()}
        return {**self._parameters.parts(), **frozen}

    def _build_optimizers(self, options: OptimizerOptions) -> list[Optimizer]:
        """One for each version, with the same states."""
        options.check_groups([name for name, p in self._placement.parameters.items() if p.trainable])
        found: list[Optimizer] = []
        for flat in self._versions:
            states = found[0].states if found else None
            found.append(Optimizer(options, flat.chunks(options.group_of), flat.num_own, self.device, states))
        return found

    def _build_stale(self) -> StaleSteps:
        return StaleSteps(self._stages, self._axes["pp"], self._tied, self._totals.start, self._stale_update)

    def _take_versions(self) -> None:
        """All versions are as the newest."""
        for flat in self._versions:
            if flat is not self._parameters:
                flat.take_values(self._parameters)

    def _read_weights(self) -> None:
        with Reader() as reader:
            for name, part in self._parameter_parts().items():
                parameter = self._placement.parameters[name]
                start = self._arrangement.portion(parameter, self.rank)[0] if parameter.trainable else 0
                reader.read_portion(part, self._source.places[name], self._placement.ranges(parameter), start)

    def _describe_non_finite(self, step: int, loss: float, norm: float) -> str:
        return f"step {step}: loss {loss}, gradient norm {norm}{self._totals.non_finite(self._graded)}; nothing was updated"

    def _reported(self, doing: str, execution: Doing | None = None) -> FailureReport:
        at = ",".join(f"{axis}={self._placement.at[axis]}" for axis in RANK_AXES)

        def describe() -> str:
            action = f", action {execution.action}" if execution and execution.action else ""
            return f"rank {self.rank} ({at}), step {self.step}, {doing}{action}"

        return FailureReport(describe)


def dtype_of(precision: str) -> torch.dtype:
    """torch's type of a plan's `precision` or `reduce_dtype`."""
    return cast(torch.dtype, getattr(torch, DTYPES[precision]))


def _summed(parts: list[dict[str, int]]) -> dict[str, int]:
    """Sums by key."""
    return {name: sum(part[name] for part in parts) for name in parts[0]}
