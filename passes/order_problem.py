"""What a schedule is synthesised for: stages with their times, room on every rank, an order to start from. Numbers in, numbers out.

    Problem        see passes.synthesise, which has the mathematics
    taken_bytes    what an order takes of each rank, without messages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.passes.simulate import Times, timed
from meshwright.passes.stage_memory import Doing, Needs, rank_rows
from meshwright.runtime.actions import Action, Kind, Schedule, StageRanks, stage_ranks


@dataclass(frozen=True)
class Problem:
    """What is to be ordered.

    start        an order that fits, such as a named schedule's
    needs        a_s, d_s and what a micro-batch takes during its actions, by stage
    room_bytes   R_r: by rank; None: as much as `start` takes on its fullest rank
    """

    start: Schedule
    times: Times
    needs: tuple[Needs, ...]
    room_bytes: tuple[int, ...] | None = None

    @cached_property
    def ranks(self) -> StageRanks:
        return stage_ranks(self.start)

    @cached_property
    def micro_batches(self) -> int:
        return 1 + max(a.micro_batch for actions in self.start for a in actions)

    @cached_property
    def room(self) -> tuple[int, ...]:
        """Room by rank: what is given, and at least what the start takes there."""
        used = taken_bytes(self.start, self.needs)
        given = self.room_bytes or (max(used),) * len(used)
        return tuple(map(max, given, used))

    @cached_property
    def splits(self) -> frozenset[int]:
        """Stages whose weight gradients take time of their own."""
        return frozenset(s for s, w in enumerate(self.times.backward_weight_s) if w > 0)

    def kinds(self, stage: int) -> tuple[Kind, ...]:
        return (Kind.F, Kind.B, Kind.W) if stage in self.splits else (Kind.F, Kind.B)

    def stages_on(self, rank: int) -> list[int]:
        return [stage for stage, at in enumerate(self.ranks) if at == rank]

    def extra(self, action: Action) -> int:
        """What a micro-batch takes for the moment of an action, beside what is kept of it."""
        needs, split = self.needs[action.stage], action.stage in self.splits
        if action.kind is Kind.W:
            return needs.during[Doing.WEIGHT] - needs.put_off
        return needs.during[Doing.FORWARD if action.kind is Kind.F else Doing.SPLIT if split else Doing.BACKWARD] - needs.kept

    def step_s(self, order: Schedule) -> float:
        return timed(order, self.times).step_s


def taken_bytes(order: Schedule, needs: Sequence[Needs]) -> tuple[int, ...]:
    """The most that micro-batches take on every rank."""
    found = []
    for actions in order:
        rows = rank_rows(actions, {stage: needs[stage] for stage in {a.stage for a in actions}}, {}).values()
        found.append(sum(row.activations + row.transient for row in rows))
    return tuple(found)
