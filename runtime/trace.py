"""What ranks did when, measured: from the records of a step to busy times, the bubble, and a Chrome trace.

    span        (action text, start, ready, end): seconds since an instant that all ranks share; before `ready` the action waited for a
                message
    busy        end - ready of forwards, backwards and weight gradients
    bubble      idle share of all ranks' time from the first action's start to the last one's end

The trace opens in Perfetto or chrome://tracing: one process per rank, with a row for compute, one for waiting, one for messages and one
for the sums of gradients over dp, from their start to when they were waited for: those of a last backward lie beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.runtime.actions import COMPUTE, Action, Kind
from meshwright.runtime.execution import StepRecord
from meshwright.runtime.gradients import TimedSum

ROWS = ("compute", "waiting", "messages", "gradient sums")
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Span:
    """An action of a rank in time."""

    action: Action
    start_s: float
    ready_s: float
    end_s: float

    @property
    def busy_s(self) -> float:
        return self.end_s - self.ready_s if self.action.kind in COMPUTE else 0.0


@dataclass(frozen=True)
class RankTrace:
    """A rank's step: its actions, and the sums of its gradients."""

    spans: tuple[Span, ...]
    sums: tuple[TimedSum, ...] = ()


def rank_trace(record: StepRecord, origin_s: float) -> RankTrace:
    """A record, seen from an instant that all ranks share."""
    sums = (replace(s, start_s=s.start_s - origin_s, end_s=s.end_s - origin_s) for s in record.sums)
    return RankTrace(spans(record, origin_s), tuple(sums))


def spans(record: StepRecord, origin_s: float) -> tuple[Span, ...]:
    """A record's actions, seen from an instant that all ranks share."""
    return tuple(Span(t.action, t.start_s - origin_s, t.ready_s - origin_s, t.end_s - origin_s) for t in record.actions)


def bubble(ranks: Sequence[Sequence[Span]]) -> float:
    """Idle share of all ranks' time."""
    whole = [span for rank in ranks for span in rank if span.action.kind in COMPUTE]
    length = max(s.end_s for s in whole) - min(s.start_s for s in whole)
    return 1 - sum(s.busy_s for s in whole) / (length * len(ranks)) if length > 0 else 0.0


def mean_seconds(ranks: Sequence[Sequence[Span]]) -> Mapping[tuple[int, str], float]:
    """Mean busy seconds by stage and kind of compute."""
    found: dict[tuple[int, str], list[float]] = {}
    for span in (s for rank in ranks for s in rank if s.action.kind in COMPUTE):
        found.setdefault((span.action.stage, span.action.kind.value), []).append(span.busy_s)
    return {key: sum(values) / len(values) for key, values in sorted(found.items())}


def write_trace(path: Path, ranks: Sequence[RankTrace]) -> None:
    """Every rank's step as a Chrome trace."""
    events: list[dict[str, object]] = []
    for rank, found in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events += [{"ph": "M", "name": "thread_name", "pid": rank, "tid": i, "args": {"name": n}} for i, n in enumerate(ROWS)]
        for span in found.spans:
            events += _events(rank, span)
        events += [_sum_event(rank, each) for each in found.sums]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")


def _events(rank: int, span: Span) -> list[dict[str, object]]:
    if span.action.kind is Kind.REDUCE:
        return []
    if span.action.kind not in COMPUTE:
        return [_event(rank, "messages", span.action, span.start_s, span.end_s)]
    waited = [_event(rank, "waiting", span.action, span.start_s, span.ready_s)] if span.ready_s > span.start_s else []
    return [*waited, _event(rank, "compute", span.action, span.ready_s, span.end_s)]


def _sum_event(rank: int, found: TimedSum) -> dict[str, object]:
    return {
        "ph": "X",
        "name": f"sum of {found.name} ...",
        "cat": "sum",
        "pid": rank,
        "tid": ROWS.index("gradient sums"),
        "ts": found.start_s * MICROSECONDS,
        "dur": (found.end_s - found.start_s) * MICROSECONDS,
        "args": {"bytes": found.num_bytes},
    }


def _event(rank: int, row: str, action: Action, start_s: float, end_s: float) -> dict[str, object]:
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind.value,
        "pid": rank,
        "tid": ROWS.index(row),
        "ts": start_s * MICROSECONDS,
        "dur": (end_s - start_s) * MICROSECONDS,
        "args": {"stage": action.stage, "micro_batch": action.micro_batch},
    }
