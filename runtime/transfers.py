"""Tensors between pipeline stages: asynchronous point-to-point messages, one per tensor.

A rank talks to the ranks of the neighbouring stages that have its other coordinates. Receives are posted early and
waited for by the compute that needs them. What was sent stays in memory until a later receive proves that it has
arrived (schedules.finished_sends), so no send is ever polled or waited for while there is work to do. Each boundary between
stages has a channel per direction, since one pair of ranks may have several; channels differ in their tag (gloo) or group (NCCL).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.actions import Action, Actions, Kind
from meshwright.runtime.program import Boundary

Message = tuple[Tensor, dist.Work | None]


@dataclass(frozen=True)
class Channel:
    """Messages of one stage and kind of action: to or from a global rank."""

    rank: int
    group: dist.ProcessGroup
    tensors: tuple[Boundary, ...]
    tag: int


Channels = Mapping[tuple[int, Kind], Channel]
"""By stage and kind: SEND_F, RECV_F, SEND_B, RECV_B."""


class Transfers:
    """Messages under way on one rank. `finished`: by receive, the sends that it proves to be done, if they were made."""

    def __init__(self, channels: Channels, finished: Mapping[Action, Actions], device: torch.device) -> None:
        self._channels = channels
        self._finished = finished
        self._device = device
        self._arriving: dict[Action, list[Message]] = {}
        self._leaving: dict[Action, list[Message]] = {}

    def post(self, receive: Action) -> None:
        """Starts to receive."""
        channel = self._channels[receive.stage, receive.kind]
        buffers = [torch.empty(t.shape, dtype=t.dtype, device=self._device) for t in channel.tensors]
        self._arriving[receive] = [(b, dist.irecv(b, channel.rank, channel.group, channel.tag)) for b in buffers]

    def wait(self, receive: Action) -> list[Tensor]:
        """The tensors of a receive, once they are here."""
        messages = self._arriving.pop(receive)
        _wait(messages)
        for send in self._finished[receive]:
            _wait(self._leaving.pop(send, ()))
        return [tensor for tensor, _ in messages]

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Starts to send; nobody may write to the tensors afterwards."""
        channel = self._channels[action.stage, action.kind]
        for expected, tensor in zip(channel.tensors, tensors, strict=True):
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                raise RuntimeError(
                    f"{action} sends {expected.name} as {tensor.dtype}{list(tensor.shape)}, "
                    f"the program says {expected.dtype}{list(expected.shape)}"
                )
        leaving = [tensor.contiguous() for tensor in tensors]
        self._leaving[action] = [(t, dist.isend(t, channel.rank, channel.group, channel.tag)) for t in leaving]

    def drain(self) -> None:
        """Waits for all that was sent."""
        for messages in self._leaving.values():
            _wait(messages)
        self._leaving.clear()


def _wait(messages: Sequence[Message]) -> None:
    for _, work in messages:
        if work is not None:
            work.wait()
