"""A pipeline schedule as text: one line per rank, time from left to right.

Actions are text such as `2F0` (stage, F forward, B backward or W weight gradient, micro-batch); sends, receives and reductions take
no time here. A forward takes one cell and a backward two, which is about what they cost, or one where a W has its weight gradients,
which takes one; `simulate` starts each as soon as its rank is free and what it needs is there: F of stage s follows F of stage s-1, B of
stage s follows its F and B of stage s+1, W follows its B. Where a rank has several stages, actions are shown with theirs.

    rank 0  F0  F1  .   .   B0      B1
    rank 1  .   F0  B0      F1  B1
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_COMPUTE = re.compile(r"(\d+)([FBW])(\d+)")

Compute = tuple[int, str, int]
"""Stage, kind and micro-batch."""


@dataclass(frozen=True)
class Span:
    """An action in time, in cells."""

    stage: int
    kind: str
    micro_batch: int
    start: int
    cells: int

    @property
    def stop(self) -> int:
        return self.start + self.cells


def simulate(schedule: Sequence[Sequence[str]]) -> tuple[tuple[Span, ...], ...]:
    """Spans per rank; ValueError when the ranks wait for each other for ever."""
    waiting = [[(int(m[1]), m[2], int(m[3])) for text in rank if (m := _COMPUTE.fullmatch(text))] for rank in schedule]
    num_stages = 1 + max((stage for rank in waiting for stage, _, _ in rank), default=0)
    put_off = {(stage, i) for rank in waiting for stage, kind, i in rank if kind == "W"}
    done: dict[Compute, int] = {}
    spans: list[list[Span]] = [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(waiting):
            while actions and all(need in done for need in _needs(actions[0], num_stages)):
                stage, kind, i = action = actions.pop(0)
                free = spans[rank][-1].stop if spans[rank] else 0
                start = max([free, *(done[need] for need in _needs(action, num_stages))])
                cells = 2 if kind == "B" and (stage, i) not in put_off else 1
                spans[rank].append(Span(stage, kind, i, start, cells))
                done[action] = start + cells
                moved = True
    if any(waiting):
        raise ValueError("the schedule's ranks wait for each other for ever")
    return tuple(map(tuple, spans))


def _needs(action: Compute, num_stages: int) -> list[Compute]:
    """What an action comes after."""
    stage, kind, i = action
    if kind == "W":
        return [(stage, "B", i)]
    other = stage - 1 if kind == "F" else stage + 1
    needs: list[Compute] = [(other, kind, i)] if 0 <= other < num_stages else []
    return [*needs, (stage, "F", i)] if kind == "B" else needs


def draw(schedule: Sequence[Sequence[str]], width: int, most: int = 1) -> list[str]:
    """Lines of the timeline, in blocks of `width` columns under each other; none when it takes more than `most` blocks."""
    ranks = simulate(schedule)
    several = any(len({span.stage for span in spans}) > 1 for spans in ranks)
    cell = 1 + max((len(_text(span, several)) for spans in ranks for span in spans), default=1)
    length = max((spans[-1].stop for spans in ranks if spans), default=0)
    name = "rank" if several else "stage"
    label = len(f"{name} {len(ranks) - 1}  ")
    across = (width - label) // cell * cell
    if length * cell > most * across:
        return []
    rows = [_row(spans, cell, several) for spans in ranks]
    lines: list[str] = []
    for start in range(0, max(1, length * cell), max(1, across)):
        lines += [""] if lines else []
        lines += [(f"{name} {rank}".ljust(label) + row[start : start + across]).rstrip() for rank, row in enumerate(rows)]
    return lines


def _text(span: Span, several: bool) -> str:
    return f"{span.stage if several else ''}{span.kind}{span.micro_batch}"


def _row(spans: Sequence[Span], cell: int, several: bool) -> str:
    text = ""
    for span in spans:
        text += ".".ljust(cell) * (span.start - len(text) // cell)
        text += _text(span, several).ljust(cell * span.cells)
    return text.rstrip()
