"""Bytes of what stages send each other, on every rank over its list of actions. Numbers in, numbers out.

    a receive        from its posting, one compute action ahead, to the action that takes it (what that keeps counts there)
    what is sent     from the action that makes it until a later receive proves that it has arrived (runtime.schedules.finished_sends)
    a hand-over      between stages of one rank: from the action that makes it to the one that takes it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.runtime.actions import COMPUTE, Action, Kind, Schedule, StageRanks, stage_ranks
from meshwright.runtime.schedules import finished_sends, insert_transfers, needed_receive, read_by


@dataclass(frozen=True)
class Boundary:
    """What crosses behind a stage for a micro-batch: bytes of activations, and of the gradients that come back for them."""

    forward_bytes: int
    backward_bytes: int


Crossing = tuple[int, bool]
"""The stage before a boundary, and whether it is crossed forward."""


@dataclass
class Change:
    """Messages that are free when an action begins, and one that is there from its end."""

    free: list[Crossing] = field(default_factory=list)
    made: list[Crossing] = field(default_factory=list)


Sizes = Mapping[Action, tuple[int, int]]
"""By action of a rank: bytes of messages that are free when it begins, and that are there from its end."""


@dataclass(frozen=True)
class Messages:
    """Of an order of compute."""

    order: Schedule

    @cached_property
    def schedule(self) -> Schedule:
        """The order with its transfers."""
        return insert_transfers(self.order)

    @cached_property
    def ranks(self) -> StageRanks:
        return stage_ranks(self.order)

    @cached_property
    def changes(self) -> tuple[Mapping[Action, Change], ...]:
        """By rank."""
        return tuple(map(self._changes, range(len(self.order))))

    def _changes(self, rank: int) -> dict[Action, Change]:
        found: dict[Action, Change] = {action: Change() for action in self.schedule[rank]}
        finished = finished_sends(self.schedule, rank)
        for action in (a for a in self.schedule[rank] if a.kind in COMPUTE):
            forward = action.kind is Kind.F
            receive, reader = needed_receive(action, self.ranks), read_by(action, len(self.ranks))
            if receive is not None:
                found[receive].made.append((action.stage - 1 if forward else action.stage, forward))
                sent = [sent_behind(send.stage, send.kind is Kind.SEND_F) for send in finished[receive]]
                found[action].free += [*found[receive].made, *sent]
            if reader is not None:
                found[action].made.append(sent_behind(action.stage, forward))
                if self.ranks[reader.stage] == rank:
                    found[reader].free += found[action].made
        return found

    def sizes(self, rank: int, boundaries: Sequence[Boundary]) -> Sizes:
        """In bytes. `boundaries`: behind each stage."""

        def size(crossings: Sequence[Crossing]) -> int:
            return sum(boundaries[b].forward_bytes if forward else boundaries[b].backward_bytes for b, forward in crossings)

        return {action: (size(change.free), size(change.made)) for action, change in self.changes[rank].items()}

    def most(self, rank: int) -> int:
        """The largest number of them that a rank has at a time."""
        now = most = 0
        for change in self.changes[rank].values():
            now += len(change.made) - len(change.free)
            most = max(most, now)
        return most


def sent_behind(stage: int, forward: bool) -> Crossing:
    """What a stage makes crosses to the next one, or in the backward to the one before."""
    return (stage if forward else stage - 1), forward
