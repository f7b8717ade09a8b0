"""PipeDream-2BW's actions: batches that follow each other without a flush (Narayanan et al., arXiv 2006.09503, section 3.1).

W(t) are the weights after t updates. Batch t runs on W(t-1), forward and backward, with W(-1) = W(0), and

    W(t+1) = W(t) - lr g_t         g_t the gradients of batch t at W(t-1), or what an optimizer and clipping make of them

so that every gradient is one update old. Two versions are enough: the last backwards of batch t read W(t-1) while the first forwards of
batch t+1 read W(t).

    m         micro-batches per batch; those of batch t are numbered from t m
    lead      min(p - 1 - s, m): forwards by which the stage of rank s is ahead of its backwards (1F1B, but within a batch)
    call      what a rank does for a batch: m pairs of a forward and the backward `lead` micro-batches before it. The last `lead`
              backwards are left to the next call, or to `last` when there is none
    REDUCE    right after a batch's last backward on a rank
    NORM      after min(p - 1, m) pairs of the next call, on every rank: rank 0 has just ended the batch's backwards
    UPDATE    at the end of the next call, since the batch after that is the first to read W(t+1). With B = 2 F nobody waits there for
              NORM on a rank that is behind if m >= 4/3 (p - 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.runtime.actions import COMPUTE, OF_BATCHES, Action, Actions, Kind, Schedule
from meshwright.runtime.schedules import finished_sends, with_transfers

VERSIONS = 2
SETTLED = 6
"""Batches of which the middle ones are like those of any long run."""


def lead(ranks: int, rank: int, micro_batches: int) -> int:
    """See the module."""
    return min(ranks - 1 - rank, micro_batches)


def call(ranks: int, rank: int, micro_batches: int, batch: int, pending: bool) -> Actions:
    """A rank's actions for a batch; `pending`: the batch before is not over."""
    return with_transfers(tuple(_call(ranks, rank, micro_batches, batch, pending)), tuple(range(ranks)))


def last(ranks: int, rank: int, micro_batches: int, batch: int) -> Actions:
    """What is left of a batch that none follows."""
    end, ahead = (batch + 1) * micro_batches, lead(ranks, rank, micro_batches)
    actions = [Action(rank, Kind.B, i) for i in range(end - ahead, end)]
    actions += [Action(rank, Kind.REDUCE, batch)] if ahead else []
    actions += [Action(rank, Kind.NORM, batch), Action(rank, Kind.UPDATE, batch)]
    return with_transfers(tuple(actions), tuple(range(ranks)))


def _call(ranks: int, rank: int, micro_batches: int, batch: int, pending: bool) -> Iterator[Action]:
    start, before = batch * micro_batches, batch - 1
    ahead, meeting = lead(ranks, rank, micro_batches), min(ranks - 1, micro_batches)
    if pending and not meeting:
        yield Action(rank, Kind.NORM, before)
    for pair in range(1, micro_batches + 1):
        yield Action(rank, Kind.F, start + pair - 1)
        if pending or pair > ahead:
            yield Action(rank, Kind.B, start + pair - 1 - ahead)
        if pending and pair == ahead:
            yield Action(rank, Kind.REDUCE, before)
        if pending and pair == meeting:
            yield Action(rank, Kind.NORM, before)
    if not ahead:
        yield Action(rank, Kind.REDUCE, batch)
    if pending:
        yield Action(rank, Kind.UPDATE, before)


def unrolled(ranks: int, micro_batches: int, batches: int) -> Schedule:
    """All actions of a run."""
    return tuple(
        (
            *(a for batch in range(batches) for a in call(ranks, rank, micro_batches, batch, batch > 0)),
            *last(ranks, rank, micro_batches, batches - 1),
        )
        for rank in range(ranks)
    )


def order(ranks: int, micro_batches: int, batches: int) -> Schedule:
    """The compute of a run alone."""
    return tuple(tuple(a for a in actions if a.kind in COMPUTE) for actions in unrolled(ranks, micro_batches, batches))


def turned(action: Action, micro_batches: int) -> Action:
    """The action with its batch counted modulo VERSIONS."""
    cycle = VERSIONS * (1 if action.kind in OF_BATCHES else micro_batches)
    return replace(action, micro_batch=action.micro_batch % cycle)


def finished(ranks: int, rank: int, micro_batches: int) -> dict[Action, Actions]:
    """schedules.finished_sends of a long run, by turned actions: some sends are not there yet in its first batch."""
    found = finished_sends(unrolled(ranks, micro_batches, SETTLED), rank)
    middle = range((SETTLED // 2 - 1) * micro_batches, (SETTLED // 2 - 1 + VERSIONS) * micro_batches)
    return {
        turned(receive, micro_batches): tuple(turned(s, micro_batches) for s in sends)
        for receive, sends in found.items()
        if receive.micro_batch in middle
    }
