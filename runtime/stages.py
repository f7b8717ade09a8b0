"""The stages of one rank, bound to it: programs, constants, message channels, and the executions that run them.

A rank has one stage, or one per model chunk. They share parameters (a tied one that two of them read is held once), the runtime
context, and the deferral of weight gradients. Stages of one rank hand tensors over; every other pair of neighbours has a channel per
direction, told apart by tags, or on NCCL by process groups, since messages of a group block each other there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.programs import program_name
from meshwright.runtime.actions import Action, Actions, Kind, Schedule, split_backwards
from meshwright.runtime.axes import Axis, ProcessAxis
from meshwright.runtime.batch import micro_batches, rank_rows
from meshwright.runtime.context import Context, Weights
from meshwright.runtime.endless import finished
from meshwright.runtime.execution import Feed, Stage, StepExecution, Turn
from meshwright.runtime.gradients import FlatParameters
from meshwright.runtime.launch import boundary_groups
from meshwright.runtime.main_gradients import Deferral, defer_to
from meshwright.runtime.memory import SavedBytes
from meshwright.runtime.orders import ASYNCHRONOUS
from meshwright.runtime.program import Boundary, Program, load_program
from meshwright.runtime.schedules import finished_sends, plan_schedule
from meshwright.runtime.transfers import Channel, Channels, Transfers


class RankStages:
    """The stages at this rank's pp coordinate. `versions` are its parameters, several times where batches run on several."""

    def __init__(
        self,
        directory: Path,
        texts: Mapping[str, str],
        plan: PlanDocument,
        axes: Mapping[str, Axis],
        context: Context,
        versions: Sequence[FlatParameters],
        timeout_s: float,
    ) -> None:
        self._plan, self._axes, self._context, self._versions = plan, axes, context, versions
        self._deferral = Deferral()
        for leaf in (leaf for flat in versions for bucket in flat.buckets for leaf in bucket.leaves.values()):
            defer_to(leaf, self._deferral)
        weights = Weights(versions[0].tensors)
        own = plan.stages_of(axes["pp"].index)
        self.stages = {stage: _bind(directory, texts, stage, context, weights) for stage in own}
        for flat in versions:
            flat.used_by(program.parameters for program in self.programs.values())
        endless = plan.schedule == ASYNCHRONOUS
        groups = boundary_groups(plan.mesh, plan.ranks_of_stages, axes["pp"], context.device, timeout_s, endless)
        self._channels = _channels(plan.ranks_of_stages, axes["pp"], self.programs, groups)
        kept = (storage for flat in versions for storage in flat.storages)
        self._permanent = [*kept, *(c for s in self.stages.values() for c in s.constants.values())]
        self._watched: set[int] = set()
        self.schedule = cache(self._build_schedule)

    @property
    def programs(self) -> dict[int, Program]:
        """By stage."""
        return {stage: bound.program for stage, bound in self.stages.items()}

    @property
    def constant_bytes(self) -> int:
        """Of folded constants."""
        parts = {c.untyped_storage()._cdata: c.untyped_storage().nbytes() for s in self.stages.values() for c in s.constants.values()}
        return sum(parts.values())

    @property
    def input_names(self) -> tuple[str, ...]:
        """Model inputs that any of the stages reads."""
        return tuple(dict.fromkeys(name for program in self.programs.values() for name in program.inputs))

    def _build_schedule(self, num_micro_batches: int) -> Schedule:
        return plan_schedule(self._plan, num_micro_batches)

    def execution(self, turn: Turn, num_micro_batches: int) -> StepExecution:
        """An execution of one step, all of whose actions are `schedule(num_micro_batches)[pp coordinate]`."""
        schedule = self.schedule(num_micro_batches)
        coordinate = self._axes["pp"].index
        return StepExecution(
            self._context,
            [turn],
            num_micro_batches,
            self._plan.ranks_of_stages,
            split_backwards(schedule[coordinate]),
            self._deferral,
            self.transfers(finished_sends(schedule, coordinate)),
            self.saved_bytes(num_micro_batches),
        )

    def endless_execution(self, turns: list[Turn], num_micro_batches: int, on_batch: Callable[[Action], None]) -> StepExecution:
        """An execution of batches without a flush between them (runtime.endless), by turned actions."""
        coordinate, ranks = self._axes["pp"].index, self._axes["pp"].size
        transfers = self.transfers(finished(ranks, coordinate, num_micro_batches))
        return StepExecution(
            self._context,
            turns,
            num_micro_batches,
            self._plan.ranks_of_stages,
            frozenset(),
            self._deferral,
            transfers,
            on_batch=on_batch,
        )

    def turn(
        self, batch: Mapping[str, Tensor], num_micro_batches: int, step: int, version: int = 0, own_rows: bool = False
    ) -> Turn:
        """A global batch, or this rank's rows of it, on a version of the weights."""
        flat = self._versions[version]
        stages = {stage: replace(bound, weights=Weights(flat.tensors)) for stage, bound in self.stages.items()}
        inputs = {name: batch[name].to(self._context.device) for name in self.input_names}
        feeds = {stage: self._feed(bound, inputs, num_micro_batches, own_rows) for stage, bound in stages.items()}
        return Turn(stages, flat, feeds, step, torch.zeros((), dtype=torch.float64, device=self._context.device))

    def transfers(self, finished: Mapping[Action, Actions]) -> Transfers:
        """Messages of this rank."""
        return Transfers(self._channels, finished, self._context.device)

    def _feed(self, stage: Stage, batch: Mapping[str, Tensor], num_micro_batches: int, own_rows: bool) -> Feed:
        """This rank's micro-batches of the inputs that a stage reads, and loss targets in the whole batch."""
        dp = self._axes["dp"]
        inputs = {name: batch[name] for name in stage.program.inputs}
        if own_rows:
            return Feed(micro_batches(inputs, num_micro_batches), stage.denominators(inputs, num_micro_batches, dp.all_reduce))
        rows = {name: rank_rows(x, dp.size, dp.index) for name, x in inputs.items()}
        return Feed(micro_batches(rows, num_micro_batches), stage.denominators(inputs, num_micro_batches * dp.size))

    def saved_bytes(self, num_micro_batches: int) -> SavedBytes | None:
        """A watch on what autograd saves, in the first step of each size."""
        if self._context.device.type == "cuda" or num_micro_batches in self._watched:
            return None
        self._watched.add(num_micro_batches)
        return SavedBytes(self._permanent)


def _bind(directory: Path, texts: Mapping[str, str], index: int, context: Context, weights: Weights) -> Stage:
    """A stage's program with its constants."""
    name = program_name(index)
    program = load_program(texts[name], index, directory / "programs" / name)
    buffers: dict[str, Tensor] = {}
    if program.buffers:
        path = directory / "model" / "buffers.safetensors"
        if not path.is_file():
            raise InputError(f"{path}: is missing; compile again with --from")
        buffers = load_file(path, str(context.device))
    with torch.no_grad():
        constants = program.constants(context, {name: buffers[name] for name in program.buffers})
    return Stage(program, context, weights, constants)


def _channels(
    ranks: tuple[int, ...],
    axis: Axis,
    programs: Mapping[int, Program],
    groups: Mapping[tuple[int, Kind], dist.ProcessGroup],
) -> Channels:
    """Messages to and from neighbouring stages on other ranks. Boundary b is between stages b and b + 1."""
    found: dict[tuple[int, Kind], Channel] = {}
    if not isinstance(axis, ProcessAxis):
        return found
    for stage, program in programs.items():
        for neighbour, tensors in ((stage - 1, program.receives), (stage + 1, program.sends)):
            if not 0 <= neighbour < len(ranks) or ranks[neighbour] == ranks[stage]:
                continue
            boundary, peer = min(stage, neighbour), axis.ranks[ranks[neighbour]]
            forward, backward = (Kind.RECV_F, Kind.SEND_B) if neighbour < stage else (Kind.SEND_F, Kind.RECV_B)
            found[stage, forward] = Channel(peer, groups[boundary, Kind.F], tensors, 2 * boundary)
            found[stage, backward] = Channel(peer, groups[boundary, Kind.B], differentiable(tensors), 2 * boundary + 1)
    return found


def differentiable(boundaries: tuple[Boundary, ...]) -> tuple[Boundary, ...]:
    """Those that gradients come back for."""
    return tuple(b for b in boundaries if b.requires_grad)
