"""One rank's part of a step: the actions of its schedule, interpreted.

A forward keeps, per micro-batch, what its backward needs: the received tensors (leaves that collect a gradient) and the
gradient edges of the outputs. The outputs themselves live only until they have been sent. A boundary tensor that gets
no gradient is answered with zeros, so that both sides always agree on the messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.runtime.actions import Action, Actions, Kind
from meshwright.runtime.context import Context, Weights
from meshwright.runtime.memory import SavedBytes
from meshwright.runtime.program import Program, Tensors
from meshwright.runtime.schedules import needed_receive
from meshwright.runtime.transfers import Transfers


@dataclass(frozen=True)
class Stage:
    """A stage bound to a rank: its program, parameters and folded constants. `num_stages` are in the pipeline."""

    program: Program
    context: Context
    weights: Weights
    constants: Tensors
    num_stages: int


@dataclass(frozen=True)
class InFlight:
    """A micro-batch between its forward and its backward."""

    leaves: tuple[Tensor, ...]
    roots: tuple[GradientEdge | None, ...]


class StepExecution:
    """Runs the actions of one step. `loss` is the FP64 sum of this rank's micro-batches (0 but on the last stage)."""

    def __init__(
        self,
        stage: Stage,
        transfers: Transfers,
        inputs: Sequence[Mapping[str, Tensor]],
        denominators: Sequence[Tensor],
        saved: SavedBytes | None,
    ) -> None:
        self._stage = stage
        self._transfers = transfers
        self._inputs = inputs
        self._denominators = denominators
        self._saved = saved
        stage.context.on_keep = None if saved is None else saved.keep
        self._in_flight: dict[int, InFlight] = {}
        self._outputs: dict[int, list[Tensor]] = {}
        self._input_gradients: dict[int, list[Tensor]] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=stage.context.device)
        self.action: Action | None = None

    def run(self, actions: Actions) -> None:
        """All actions but REDUCE, which is the caller's."""
        for action in actions:
            self.action = action
            match action.kind:
                case Kind.F:
                    self._forward(action)
                case Kind.B:
                    self._backward(action)
                case Kind.RECV_F | Kind.RECV_B:
                    self._transfers.post(action)
                case Kind.SEND_F:
                    self._transfers.send(action, self._outputs.pop(action.micro_batch))
                case Kind.SEND_B:
                    self._transfers.send(action, self._input_gradients.pop(action.micro_batch))
                case Kind.REDUCE:
                    self._transfers.drain()

    @property
    def peak_saved_bytes(self) -> int:
        """Largest amount that autograd kept, if it was watched."""
        return 0 if self._saved is None else self._saved.peak

    def _received(self, action: Action) -> list[Tensor]:
        receive = needed_receive(action, tuple(range(self._stage.num_stages)))
        return [] if receive is None else self._transfers.wait(receive)

    def _forward(self, action: Action) -> None:
        i, program = action.micro_batch, self._stage.program
        received = self._received(action)
        for tensor, boundary in zip(received, program.receives, strict=True):
            tensor.requires_grad_(boundary.requires_grad)
        self._stage.context.micro_batch = i
        with self._watch(i):
            outputs = program.forward(
                self._stage.context,
                self._stage.weights,
                self._stage.constants,
                self._inputs[i] if self._inputs else {},
                received,
                self._denominators,
            )
        if action.stage + 1 == self._stage.num_stages:
            self.loss += outputs[0].detach()
            roots = outputs
        else:
            self._outputs[i] = [output.detach() for output in outputs]
            roots = tuple(o for o, b in zip(outputs, program.sends, strict=True) if b.requires_grad)
        self._in_flight[i] = InFlight(
            tuple(t for t in received if t.requires_grad),
            tuple(get_gradient_edge(root) if root.requires_grad else None for root in roots),
        )

    def _backward(self, action: Action) -> None:
        i = action.micro_batch
        gradients = self._received(action)
        flight = self._in_flight.pop(i)
        if action.stage + 1 == self._stage.num_stages:
            gradients = [torch.ones((), device=self._stage.context.device) for _ in flight.roots]
        pairs = [(root, g) for root, g in zip(flight.roots, gradients, strict=True) if root is not None]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        if self._saved is not None:
            self._saved.release(i)
        if action.stage > 0:
            self._input_gradients[i] = [torch.zeros_like(t) if t.grad is None else t.grad for t in flight.leaves]

    def _watch(self, micro_batch: int) -> AbstractContextManager[object]:
        return nullcontext() if self._saved is None else self._saved.of(micro_batch)
