"""Actions: what a rank does, one line of its schedule each.

An action prints as stage, kind and micro-batch, and parses back: `2F0` is the forward of micro-batch 0 on stage 2.

    F        forward of a stage on a micro-batch          B        its backward; without its weight gradients if a W follows
    W        weight gradients that the backward put off
    SEND_F   outputs of the stage to the next stage       RECV_F   inputs of the stage from the previous stage
    SEND_B   gradients of the inputs to the previous      RECV_B   gradients of the outputs from the next stage
    REDUCE   sums of the stage's parameter gradients over ranks, after its last backward; has no micro-batch (`2REDUCE`)

Where batches follow each other without a flush (runtime.endless) micro-batches are numbered on through them, and these have the
number of a batch:

    REDUCE   starts the batch's sums                      NORM     starts the sum of its loss and squared gradients over all ranks
    UPDATE   waits for that, and makes the next version of the weights
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does."""

    F = "F"
    B = "B"
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    NORM = "NORM"
    UPDATE = "UPDATE"


OF_BATCHES = frozenset({Kind.REDUCE, Kind.NORM, Kind.UPDATE})
"""What is done once for a batch."""

_TEXT = re.compile(rf"(\d+)({'|'.join(kind.value for kind in Kind)})(\d*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One action; `micro_batch` is -1 for the REDUCE of a schedule of one batch."""

    stage: int
    kind: Kind
    micro_batch: int = -1

    def __post_init__(self) -> None:
        if self.stage < 0 or (self.micro_batch < 0 and self.kind is not Kind.REDUCE):
            raise ValueError(f"no such action: {self.kind.value} of stage {self.stage}, micro-batch {self.micro_batch}")

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch if self.micro_batch >= 0 else ''}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Action from its text; ValueError says what one looks like."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or (match[3] == "" and match[2] != "REDUCE"):
            raise ValueError(f"action {text!r} is not STAGE KIND MICRO_BATCH, as in 2F0, 1SEND_B3 or 0REDUCE")
        return cls(int(match[1]), Kind(match[2]), int(match[3]) if match[3] else -1)


Actions = tuple[Action, ...]
"""Of one rank, in order."""

Schedule = tuple[Actions, ...]
"""Of all pipeline ranks, by pp coordinate."""


StageRanks = tuple[int, ...]
"""By stage, the pp coordinate of the ranks that hold it."""

COMPUTE = frozenset({Kind.F, Kind.B, Kind.W})
"""What keeps a rank busy."""


def stage_ranks(schedule: Schedule) -> StageRanks:
    """Where each stage of a schedule runs; ValueError when one runs nowhere or on two ranks."""
    found: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for stage in {a.stage for a in actions}:
            if found.setdefault(stage, rank) != rank:
                raise ValueError(f"stage {stage} is on ranks {found[stage]} and {rank}; a stage runs on one rank")
    if missing := set(range(max(found, default=0) + 1)) - found.keys():
        raise ValueError(f"stage {min(missing)} is on no rank")
    return tuple(found[stage] for stage in range(len(found)))


def split_backwards(actions: Actions) -> frozenset[tuple[int, int]]:
    """(stage, micro-batch) of the backwards that leave their weight gradients to a W."""
    return frozenset((a.stage, a.micro_batch) for a in actions if a.kind is Kind.W)


def show(schedule: Schedule) -> str:
    """One line per rank."""
    return "\n".join(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(schedule))


def parse(text: str) -> Schedule:
    """Schedule from the lines that `show` prints."""
    lines = (line.partition(":")[2] for line in text.splitlines() if line.strip())
    return tuple(tuple(map(Action.parse, line.split())) for line in lines)
