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
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.plans.mesh import RANK_AXES
from meshwright.plans.programs import program_name
from meshwright.plans.save import load_checked, load_programs
from meshwright.runtime.actions import Kind, Schedule
from meshwright.runtime.agreement import FailureReport, together
from meshwright.runtime.axes import ProcessAxis
from meshwright.runtime.batch import check_batch, flat_inputs, micro_batches, rank_rows
from meshwright.runtime.checkpoint import PARAMETERS, Progress, State, load_checkpoint, save_checkpoint
from meshwright.runtime.context import Context, Weights
from meshwright.runtime.execution import Stage, StepExecution
from meshwright.runtime.gathering import gather
from meshwright.runtime.gradients import FlatParameters, clip_scale
from meshwright.runtime.launch import backward_group, choose_device, join_processes, place, tied_groups
from meshwright.runtime.memory import SavedBytes
from meshwright.runtime.optimizer import Optimizer, read_options
from meshwright.runtime.program import Boundary, load_program
from meshwright.runtime.schedules import build, finished_sends
from meshwright.runtime.transfers import Channel, Transfers
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
    `learning_rate` may be set at any time."""

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
        self._stage_index = self._placement.at["pp"]
        name = program_name(self._stage_index)
        self._program = load_program(texts[name], self._stage_index, directory / "programs" / name)
        self._tied = tied_groups(self._placement, self._axes, timeout_s)
        self._backward_group = backward_group(self.plan.mesh, self._axes["pp"], self.device, timeout_s)
        self._parameters = FlatParameters(self._placement, self.device)
        self._source = locate_weights(directory, self.plan, self.signature)
        together(self._read_weights)
        self._stage = self._bind(directory, dropout)
        values, gradients = self._parameters.values, self._parameters.gradients
        self._optimizer = None if options is None else Optimizer(options, values, gradients)
        self.learning_rate = 0.0 if options is None else options.lr
        self._peak_activation_bytes = 0
        self._watched: set[int] = set()
        self._schedule = cache(self._build_schedule)

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

    def forward_backward(self, batch: Mapping[str, object]) -> Metrics:
        """Loss and gradients of a global batch."""
        inputs = flat_inputs(batch)
        num_micro_batches = check_batch(inputs, self.plan, self.signature)
        execution = self._execution(inputs, num_micro_batches)
        with self._reported("forward and backward", execution):
            self._parameters.gradients.zero_()
            execution.run(self._schedule(num_micro_batches)[self._stage_index])
        self._peak_activation_bytes = max(self._peak_activation_bytes, execution.peak_saved_bytes)
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
        return self._schedule(self.plan.num_micro_batches)

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

    def _bind(self, directory: Path, dropout: bool) -> Stage:
        context = Context(self._axes, self.device, self.plan.seed, self.plan.recompute, dropout)
        buffers: dict[str, Tensor] = {}
        if self._program.buffers:
            path = directory / "model" / "buffers.safetensors"
            if not path.is_file():
                raise InputError(f"{path}: is missing; compile again with --from")
            buffers = load_file(path, str(self.device))
        with torch.no_grad():
            constants = self._program.constants(context, {name: buffers[name] for name in self._program.buffers})
        return Stage(self._program, context, Weights(self._parameters.tensors), constants, self.plan.mesh.pp)

    def _build_schedule(self, num_micro_batches: int) -> Schedule:
        return build(self.plan.schedule, self.plan.mesh.pp, num_micro_batches)

    def _execution(self, batch: Mapping[str, Tensor], num_micro_batches: int) -> StepExecution:
        self._stage.context.step = self.step
        inputs = {name: batch[name].to(self.device) for name in self._program.inputs}
        dp = self._axes["dp"]
        rows = {name: rank_rows(x, dp.size, dp.index) for name, x in inputs.items()}
        schedule = self._schedule(num_micro_batches)
        transfers = Transfers(self._channels(), finished_sends(schedule, self._stage_index), self.device)
        denominators = self._denominators(inputs, num_micro_batches * dp.size)
        saved = self._saved_bytes(num_micro_batches)
        return StepExecution(self._stage, transfers, micro_batches(rows, num_micro_batches), denominators, saved)

    def _saved_bytes(self, num_micro_batches: int) -> SavedBytes | None:
        """A watch on what autograd saves, in the first step of each size."""
        if self.device.type == "cuda" or num_micro_batches in self._watched:
            return None
        self._watched.add(num_micro_batches)
        return SavedBytes([*self._parameters.tensors.values(), *self._stage.constants.values()])

    def _denominators(self, inputs: Mapping[str, Tensor], num_micro_batches: int) -> list[Tensor]:
        """Loss targets in the global batch, a scalar per denominator of the stage's program; 1 where there are none."""
        totals: list[Tensor] = []
        with torch.no_grad():
            for part in micro_batches(inputs, num_micro_batches):
                counts = self._program.counts(self._stage.context, self._stage.constants, part)
                if not counts:
                    return []
                totals = [a + b for a, b in zip(totals, counts, strict=True)] if totals else list(counts)
        return [total.clamp(min=1).to(torch.float32) for total in totals]

    def _channels(self) -> dict[Kind, Channel]:
        """Messages to and from the neighbouring stages."""
        axis = self._axes["pp"]
        if not isinstance(axis, ProcessAxis):
            return {}
        backward = self._backward_group
        assert backward is not None
        found: dict[Kind, Channel] = {}
        if axis.index > 0:
            rank = axis.ranks[axis.index - 1]
            found[Kind.RECV_F] = Channel(rank, axis.group, self._program.receives)
            found[Kind.SEND_B] = Channel(rank, backward, _differentiable(self._program.receives))
        if axis.index + 1 < axis.size:
            rank = axis.ranks[axis.index + 1]
            found[Kind.SEND_F] = Channel(rank, axis.group, self._program.sends)
            found[Kind.RECV_B] = Channel(rank, backward, _differentiable(self._program.sends))
        return found

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


def _differentiable(boundaries: tuple[Boundary, ...]) -> tuple[Boundary, ...]:
    return tuple(b for b in boundaries if b.requires_grad)
