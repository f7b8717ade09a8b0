"""One rank's part of a step, or of steps without an end: the actions of its schedule, interpreted.

A forward keeps, per stage and micro-batch, what its backward needs: the received tensors (leaves that collect a gradient) and the
gradient edges of the outputs. The outputs themselves live only until they have been sent, or until the next stage of the same
rank has taken them. A boundary tensor that gets no gradient is answered with zeros, so that both sides always agree on the messages.

A backward that leaves its weight gradients to a W (runtime.main_gradients) keeps their products' operands until then; autograd's
other saved tensors are freed. What is in flight is counted, and compared with the simulated numbers by the tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.runtime.actions import OF_BATCHES, Action, Actions, Kind, StageRanks
from meshwright.runtime.batch import micro_batches
from meshwright.runtime.context import Context, Weights
from meshwright.runtime.gradients import FlatParameters, TimedSum
from meshwright.runtime.main_gradients import Deferral, Work
from meshwright.runtime.memory import SavedBytes
from meshwright.runtime.program import Program, Tensors
from meshwright.runtime.schedules import needed_receive, read_by
from meshwright.runtime.transfers import Transfers

Key = tuple[int, int]
"""(stage, micro-batch)."""


@dataclass(frozen=True)
class Stage:
    """A stage bound to a rank: its program, parameters and folded constants."""

    program: Program
    context: Context
    weights: Weights
    constants: Tensors

    def denominators(
        self, inputs: Mapping[str, Tensor], num_micro_batches: int, add: Callable[[Tensor], Tensor] | None = None
    ) -> list[Tensor]:
        """Loss targets in a whole batch, a scalar per denominator of the program; 1 for none. Sums of weights stay as they are. `add` sums
        what ranks count, where the inputs are only a part of the batch."""
        totals: list[Tensor] = []
        with torch.no_grad():
            for part in micro_batches(inputs, num_micro_batches):
                counts = self.program.counts(self.context, self.constants, part)
                if not counts:
                    return []
                totals = [a + b for a, b in zip(totals, counts, strict=True)] if totals else list(counts)
        if add is not None:
            totals = [add(total) for total in totals]
        return [total.float() if total.is_floating_point() else total.clamp(min=1).float() for total in totals]


@dataclass(frozen=True)
class Feed:
    """What a stage reads from the batch: its inputs per micro-batch, and the loss's denominators."""

    inputs: Sequence[Mapping[str, Tensor]]
    denominators: Sequence[Tensor]


@dataclass
class Turn:
    """A batch on this rank: the stages with the weights that it runs on, what they read, and its loss.

    flat    those weights, which are told of forwards and backwards
    step    for random numbers
    loss    FP64 sum of this rank's micro-batches (0 on ranks without the last stage)
    """

    stages: Mapping[int, Stage]
    flat: FlatParameters
    feeds: Mapping[int, Feed]
    step: int
    loss: Tensor


@dataclass(frozen=True)
class InFlight:
    """A micro-batch between its forward and its backward."""

    leaves: tuple[Tensor, ...]
    roots: tuple[GradientEdge | None, ...]


@dataclass(frozen=True)
class Timed:
    """An action of this rank by time.perf_counter: it began, had what it waited for, and ended."""

    action: Action
    start_s: float
    ready_s: float
    end_s: float


@dataclass
class StepRecord:
    """When the actions of a step ran, and sums of gradients over dp were under way. On GPUs each action is waited for, so that a recorded
    step is slower."""

    actions: list[Timed] = field(default_factory=list)
    sums: list[TimedSum] = field(default_factory=list)


class StepExecution:
    """Runs actions of one batch, or of several.

    context             the rank's
    turns               the batches under way: micro-batch i is number i mod `num_micro_batches` of turns[i // num_micro_batches]
    stage_ranks         pp coordinate of every stage; those of a turn's stages are this rank's
    split               the backwards whose weight gradients are a W
    on_batch            does what is done once for a batch (REDUCE, NORM, UPDATE); None when the caller does
    """

    def __init__(
        self,
        context: Context,
        turns: list[Turn],
        num_micro_batches: int,
        stage_ranks: StageRanks,
        split: frozenset[Key],
        deferral: Deferral,
        transfers: Transfers,
        saved: SavedBytes | None = None,
        on_batch: Callable[[Action], None] | None = None,
    ) -> None:
        self.turns, self._num_micro_batches, self._stage_ranks, self._split = turns, num_micro_batches, stage_ranks, split
        self._deferral, self._transfers, self._on_batch = deferral, transfers, on_batch
        self._context = context
        self._record: StepRecord | None = None
        self.watch(saved)
        self._in_flight: dict[Key, InFlight] = {}
        self._weight_work: dict[Key, list[Work]] = {}
        self._made: dict[Action, list[Tensor]] = {}
        self._ready_s = 0.0
        self.action: Action | None = None
        self.peak_in_flight = 0

    def watch(self, saved: SavedBytes | None) -> None:
        """What autograd keeps is counted there from now on, or no longer."""
        self._saved = saved
        self._context.on_keep = None if saved is None else saved.keep
        if saved is not None:
            saved.know(x for turn in self.turns for feed in turn.feeds.values() for part in feed.inputs for x in part.values())

    def run(self, actions: Actions, record: StepRecord | None = None, to_the_end: bool = True) -> None:
        """All actions. `to_the_end`: nothing follows, so what was sent is waited for."""
        self._record = record
        watching: AbstractContextManager[object] = nullcontext() if self._saved is None else self._saved.live
        with watching:
            for action in actions:
                self.action = action
                if record is None:
                    self._do(action)
                else:
                    self._do_timed(action, record)
        if to_the_end:
            self._transfers.drain()

    def _do_timed(self, action: Action, record: StepRecord) -> None:
        start = self._ready_s = time.perf_counter()
        self._do(action)
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        record.actions.append(Timed(action, start, self._ready_s, time.perf_counter()))

    def _do(self, action: Action) -> None:
        match action.kind:
            case Kind.F:
                self._forward(action)
            case Kind.B:
                self._backward(action)
            case Kind.W:
                self._weight(action)
            case Kind.RECV_F | Kind.RECV_B:
                self._transfers.post(action)
            case Kind.SEND_F | Kind.SEND_B:
                kind = Kind.F if action.kind is Kind.SEND_F else Kind.B
                self._transfers.send(action, self._made.pop(Action(action.stage, kind, action.micro_batch)))
            case _ if self._on_batch is not None:
                assert action.kind in OF_BATCHES
                self._on_batch(action)

    @property
    def peak_saved_bytes(self) -> int:
        """Largest amount that autograd kept, if it was watched."""
        return 0 if self._saved is None else self._saved.peak

    @property
    def peak_transient_bytes(self) -> int:
        """The most that was alive beside it, if it was watched."""
        return 0 if self._saved is None else self._saved.transient

    def _turn(self, action: Action) -> tuple[Turn, int]:
        """The batch of an action, and its micro-batch there."""
        turn, micro_batch = divmod(action.micro_batch, self._num_micro_batches)
        return self.turns[turn], micro_batch

    @property
    def _num_stages(self) -> int:
        return len(self._stage_ranks)

    def _received(self, action: Action) -> list[Tensor]:
        """What another stage made for an action: sent, or handed over."""
        receive = needed_receive(action, self._stage_ranks)
        found = self._made.pop(action, []) if receive is None else self._transfers.wait(receive)
        if self._record is not None:
            self._ready_s = time.perf_counter()
        return found

    def _keep(self, action: Action, tensors: list[Tensor]) -> None:
        """Keeps what an action made: under its own name to be sent, under its reader's to be handed over."""
        reader = read_by(action, self._num_stages)
        if reader is not None:
            here = self._stage_ranks[reader.stage] == self._stage_ranks[action.stage]
            self._made[reader if here else action] = tensors

    def _forward(self, action: Action) -> None:
        turn, micro_batch = self._turn(action)
        key, stage, feed = (action.stage, action.micro_batch), turn.stages[action.stage], turn.feeds[action.stage]
        received = self._received(action)
        for tensor, boundary in zip(received, stage.program.receives, strict=True):
            tensor.requires_grad_(boundary.requires_grad)
        self._context.step, self._context.micro_batch = turn.step, micro_batch
        turn.flat.residency.before_forward(action.stage)
        with self._watch(key):
            outputs = stage.program.forward(
                self._context,
                stage.weights,
                stage.constants,
                feed.inputs[micro_batch] if feed.inputs else {},
                received,
                feed.denominators,
            )
        turn.flat.residency.after_forward()
        if action.stage + 1 == self._num_stages:
            turn.loss += outputs[0].detach()
            roots = outputs
        else:
            self._keep(action, [output.detach() for output in outputs])
            roots = tuple(o for o, b in zip(outputs, stage.program.sends, strict=True) if b.requires_grad)
        self._in_flight[key] = InFlight(
            tuple(t for t in received if t.requires_grad),
            tuple(get_gradient_edge(root) if root.requires_grad else None for root in roots),
        )
        self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight) + len(self._weight_work))

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        gradients = self._received(action)
        flight = self._in_flight.pop(key)
        if action.stage + 1 == self._num_stages:
            gradients = [torch.full((), self._context.loss_scale, device=self._context.device) for _ in flight.roots]
        pairs = [(root, g) for root, g in zip(flight.roots, gradients, strict=True) if root is not None]
        flat = self._turn(action)[0].flat
        flat.before_backward(action.stage)
        none: list[Work] = []
        collecting: AbstractContextManager[list[Work]] = self._deferral.collecting() if key in self._split else nullcontext(none)
        with collecting as work:
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        flat.after_backward()
        if key in self._split:
            self._weight_work[key] = work
            self._put_off(key, work)
        else:
            self._release(key)
        self._keep(action, [torch.zeros_like(t) if t.grad is None else t.grad for t in flight.leaves])

    def _weight(self, action: Action) -> None:
        """Each product's operands are freed with it."""
        work = self._weight_work.pop((action.stage, action.micro_batch))
        work.reverse()
        with torch.no_grad():
            while work:
                work.pop().run()
        self._release((action.stage, action.micro_batch))

    def _put_off(self, key: Key, work: Sequence[Work]) -> None:
        if self._saved is not None:
            self._saved.put_off(key, (x for each in work for x in each.operands))

    def _release(self, key: Key) -> None:
        if self._saved is not None:
            self._saved.release(key)

    def _watch(self, key: Key) -> AbstractContextManager[object]:
        return nullcontext() if self._saved is None else self._saved.of(key)
