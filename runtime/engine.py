"""The engine: runs a plan on this rank, under torchrun.

    engine = Engine("plan/", optimizer={"name": "adamw", "lr": 1e-3, "clip": 1.0})
    metrics = engine.train_step({"input_ids": ids, "labels": ids})        # the global batch, on every rank

A step: zero the gradients; count the loss targets of the global batch (every rank has all of it, so nothing is sent);
run the schedule's actions (runtime.execution); sum the gradients over ranks (runtime.gradients); add up loss and
squared gradient norm over all ranks in FP64, in one all-reduce; clip; update.

Every method is called on every rank, with the same arguments. InputError is raised on all ranks; any other failure is
told by the traceback's last line, `error: rank R ...`, and ends this rank, upon which torchrun ends the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.plans.mesh import RANK_AXES
from meshwright.plans.save import load_checked, load_programs
from meshwright.runtime.actions import Schedule
from meshwright.runtime.agreement import FailureReport, together
from meshwright.runtime.batch import check_batch, flat_inputs
from meshwright.runtime.checkpoint import PARAMETERS, Progress, State, load_checkpoint, save_checkpoint
from meshwright.runtime.context import Context
from meshwright.runtime.execution import StepExecution, StepRecord
from meshwright.runtime.gathering import gather
from meshwright.runtime.gradients import FlatParameters, clip_scale
from meshwright.runtime.launch import choose_device, join_processes, place, tied_groups
from meshwright.runtime.optimizer import Optimizer, read_options
from meshwright.runtime.stages import RankStages
from meshwright.runtime.weight_copy import locate_weights
from meshwright.runtime.weights import Reader, whole

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Metrics:
    """Of one step, the same on every rank. `loss` is the mean over the global batch's targets, `grad_norm` is before
    clipping, `tokens` are the entries of the global batch's first input, `step` counts updates."""

    loss: float
    grad_norm: float
    tokens: int
    step: int


class Engine:
    """A rank of a plan. `optimizer` may be left out when nothing is trained; `device` defaults to this rank's GPU, else
    the CPU. A rank that waits longer than `timeout_s` for another gives up. Without `dropout` nothing is random.
    `learning_rate` may be set at any time. `peak_in_flight`: the most (stage, micro-batch) pairs that activations were kept for."""

    def __init__(
        self,
        plan_dir: str | Path,
        optimizer: Mapping[str, object] | None = None,
        device: str | torch.device | None = None,
        timeout_s: float = TIMEOUT_S,
        dropout: bool = True,
    ) -> None:
        directory = Path(plan_dir)
        self.plan, self.signature = load_checked(directory)
        options = None if optimizer is None else read_options(optimizer)
        texts = load_programs(directory, self.plan)
        self.device = choose_device(device)
        self._axes = join_processes(self.plan.mesh, self.device, timeout_s)
        self.rank = dist.get_rank()
        self.step = 0
        self._placement = place(directory, texts, self.plan, self.signature, self.rank)
        self._tied = tied_groups(self._placement, self._axes, timeout_s)
        self._parameters = FlatParameters(self._placement, self.device)
        self._source = locate_weights(directory, self.plan, self.signature)
        together(self._read_weights)
        context = Context(self._axes, self.device, self.plan.seed, self.plan.recompute, dropout)
        self._stages = RankStages(directory, texts, self.plan, self._axes, context, self._parameters.tensors, timeout_s)
        values, gradients = self._parameters.values, self._parameters.gradients
        self._optimizer = None if options is None else Optimizer(options, values, gradients)
        self.learning_rate = 0.0 if options is None else options.lr
        self._peak_activation_bytes = 0
        self.peak_in_flight = 0

    def train_step(self, batch: Mapping[str, object]) -> Metrics:
        """Loss and gradients of a global batch, then one update."""
        if self._optimizer is None:
            raise InputError('train_step needs an optimizer, as in Engine(plan_dir, {"name": "adamw", "lr": 1e-3})')
        metrics = self.forward_backward(batch)
        with self._reported("update"):
            scale = clip_scale(self._optimizer.options.clip, metrics.grad_norm)
            if scale != 1.0:
                self._parameters.gradients.mul_(scale)
            self._optimizer.step(self.learning_rate)
        self.step += 1
        return Metrics(metrics.loss, metrics.grad_norm, metrics.tokens, self.step)

    def forward_backward(self, batch: Mapping[str, object], record: StepRecord | None = None) -> Metrics:
        """Loss and gradients of a global batch. `record` is filled with the times of this rank's actions."""
        inputs = flat_inputs(batch)
        num_micro_batches = check_batch(inputs, self.plan, self.signature)
        execution = self._stages.execution(inputs, num_micro_batches, self.step, record)
        with self._reported("forward and backward", execution):
            self._parameters.gradients.zero_()
            execution.run(self._stages.schedule(num_micro_batches)[self._placement.at["pp"]])
        self._peak_activation_bytes = max(self._peak_activation_bytes, execution.peak_saved_bytes)
        self.peak_in_flight = max(self.peak_in_flight, execution.peak_in_flight)
        with self._reported("gradient sums"):
            self._parameters.reduce(self._axes, self._tied)
            loss, square = self._sum_over_ranks(execution.loss)
        tokens = inputs[self.signature.inputs[0].name].numel()
        return Metrics(loss, math.sqrt(square), tokens, self.step)

    def gradients(self) -> dict[str, Tensor]:
        """Whole FP32 gradients by the model's parameter names on rank 0, {} elsewhere; after train_step, as clipped."""
        with self._reported("gathering gradients"):
            return gather(self._placement, self._parameters.views(self._parameters.gradients), trainable_only=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Whole parameters by the model's names on rank 0, {} elsewhere; tied ones under all names, unused ones too."""
        with self._reported("gathering parameters"):
            found = gather(self._placement, self._parameters.tensors)
        if self.rank == 0:
            with Reader() as reader:
                for name, spec in self.signature.unused.items():
                    found[name] = torch.empty(spec.shape)
                    reader.read(found[name], name, self._source.pieces[name], whole(spec.shape))
            found.update({alias: found[name] for alias, name in self.signature.tied.items() if name in found})
        return found

    def save(self, directory: str | Path) -> None:
        """Writes parameters, optimizer state and step to a checkpoint directory that all ranks see."""
        with self._reported("saving"):
            save_checkpoint(Path(directory), self._placement, self._state(), Progress(self.step, self._optimizer_name))

    def load(self, directory: str | Path) -> None:
        """Goes on from a checkpoint, of any plan of the same model."""
        with self._reported("loading"):
            progress = load_checkpoint(Path(directory), self._placement, self._state(), self._optimizer_name)
        self.step = progress.step
        if self._optimizer is not None:
            self._optimizer.set_num_steps(progress.step)

    def memory(self) -> dict[str, dict[str, int]]:
        """{"now": bytes, "peak": bytes} on this rank, each by parameters, gradients, optimizer and activations."""
        lasting = {
            "parameters": self._parameters.num_bytes,
            "gradients": self._parameters.gradients.nbytes,
            "optimizer": self._optimizer.num_bytes if self._optimizer else 0,
        }
        now, peak = 0, self._peak_activation_bytes
        if self.device.type == "cuda":
            now = max(0, torch.cuda.memory_allocated(self.device) - sum(lasting.values()))
            peak = max(0, torch.cuda.max_memory_allocated(self.device) - sum(lasting.values()))
        return {"now": {**lasting, "activations": now}, "peak": {**lasting, "activations": peak}}

    @property
    def schedule(self) -> Schedule:
        """Actions of all pipeline ranks for the plan's global batch."""
        return self._stages.schedule(self.plan.num_micro_batches)

    @property
    def _optimizer_name(self) -> str | None:
        return self._optimizer.options.name if self._optimizer else None

    def _state(self) -> State:
        states = self._optimizer.states if self._optimizer else {}
        return {PARAMETERS: self._parameters.tensors, **{kind: self._parameters.views(s) for kind, s in states.items()}}

    def _read_weights(self) -> None:
        with Reader() as reader:
            for parameter in self._placement.held:
                target = self._parameters.tensors[parameter.name].detach()
                reader.read(
                    target, parameter.name, self._source.pieces[parameter.name], self._placement.ranges(parameter)
                )

    def _sum_over_ranks(self, loss: Tensor) -> tuple[float, float]:
        """Global loss and squared gradient norm: bitwise the same on every rank."""
        square = self._parameters.square_sum(self._placement.owned)
        both = torch.stack([loss if self._axes["tp"].index == 0 else torch.zeros_like(loss), square])
        if self.plan.mesh.world_size > 1:
            dist.all_reduce(both)
        total_loss, total_square = both.tolist()
        return total_loss, total_square

    def _reported(self, doing: str, execution: StepExecution | None = None) -> FailureReport:
        at = ",".join(f"{axis}={self._placement.at[axis]}" for axis in RANK_AXES)

        def describe() -> str:
            action = f", action {execution.action}" if execution and execution.action else ""
            return f"rank {self.rank} ({at}), step {self.step}, {doing}{action}"

        return FailureReport(describe)
