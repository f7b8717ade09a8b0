"""A pipeline schedule as text: one line per rank, time from left to right.

Actions are text such as `2F0` (stage, F forward or B backward, micro-batch); sends, receives and reductions take no
time here. A forward takes one cell and a backward two, which is about what they cost; `simulate` starts each as soon as
its rank is free and what it needs is there: F of stage s follows F of stage s-1, B of stage s follows B of stage s+1.

    rank 0  F0  F1  .   .   B0      B1
    rank 1  .   F0  B0      F1  B1
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

CELLS = {"F": 1, "B": 2}
_COMPUTE = re.compile(r"(\d+)([FB])(\d+)")


@dataclass(frozen=True)
class Span:
    """An action in time, in cells."""

    stage: int
    kind: str
    micro_batch: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + CELLS[self.kind]


def simulate(schedule: Sequence[Sequence[str]]) -> tuple[tuple[Span, ...], ...]:
    """Spans per rank; ValueError when the ranks wait for each other for ever."""
    waiting = [[m.groups() for text in rank if (m := _COMPUTE.fullmatch(text))] for rank in schedule]
    num_stages = 1 + max((int(stage) for rank in waiting for stage, _, _ in rank), default=0)
    done: dict[tuple[int, str, int], int] = {}
    spans: list[list[Span]] = [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(waiting):
            while actions:
                stage, kind, micro_batch = int(actions[0][0]), actions[0][1], int(actions[0][2])
                needs = [(stage, "F", micro_batch)] if kind == "B" else []
                if 0 <= (other := stage - 1 if kind == "F" else stage + 1) < num_stages:
                    needs.append((other, kind, micro_batch))
                if any(need not in done for need in needs):
                    break
                free = spans[rank][-1].stop if spans[rank] else 0
                span = Span(stage, kind, micro_batch, max([free, *(done[need] for need in needs)]))
                spans[rank].append(span)
                done[stage, kind, micro_batch] = span.stop
                actions.pop(0)
                moved = True
    if any(waiting):
        raise ValueError("the schedule's ranks wait for each other for ever")
    return tuple(map(tuple, spans))


def draw(schedule: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lines of the timeline; none when it does not fit in `width` columns."""
    ranks = simulate(schedule)
    cell = 2 + max((len(str(span.micro_batch)) for spans in ranks for span in spans), default=1)
    length = max((spans[-1].stop for spans in ranks if spans), default=0)
    label = len(f"stage {len(ranks) - 1}  ")
    if label + length * cell > width:
        return []
    return [f"stage {rank}".ljust(label) + _row(spans, cell) for rank, spans in enumerate(ranks)]


def _row(spans: Sequence[Span], cell: int) -> str:
    text = ""
    for span in spans:
        text += ".".ljust(cell) * (span.start - len(text) // cell)
        text += f"{span.kind}{span.micro_batch}".ljust(cell * CELLS[span.kind])
    return text.rstrip()
