"""Schedules in time: the published formulas, uneven stages, transfers, activations in flight."""

from __future__ import annotations

import pytest

from meshwright.passes.simulate import Timeline, simulate
from meshwright.plans.errors import InputError
from meshwright.runtime.actions import Kind

GRID = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 5, 8, 16, 33)]


def run(schedule: str, ranks: int, micro_batches: int, seconds: tuple[float, float, float] = (1, 1, 1), **more: object) -> Timeline:
    f, b, w = seconds
    return simulate(
        schedule,
        stages=ranks,
        micro_batches=micro_batches,
        forward_s=f,
        backward_input_s=b,
        backward_weight_s=w,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_flushing_schedules(schedule: str, ranks: int, micro_batches: int) -> None:
    """(p-1)/(m+p-1), whatever F, B and W take (Narayanan et al., arXiv 2104.04473, section 2.2.1)."""
    for seconds in ((1, 1, 1), (1, 1.5, 0.5)):
        found = run(schedule, ranks, micro_batches, seconds)
        assert found.step_s == pytest.approx(3 * (micro_batches + ranks - 1))
        assert found.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
        assert found.idle_s == pytest.approx([3 * (ranks - 1)] * ranks)
    kept = [micro_batches if schedule == "gpipe" else min(micro_batches, ranks - s) for s in range(ranks)]
    assert list(found.in_flight) == kept


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_interleaved(chunks: int, ranks: int, micro_batches: int) -> None:
    """A v-th of 1F1B's bubble when micro-batches are a multiple of the ranks (same section); else no longer than the next multiple."""
    found = run("interleaved", ranks, micro_batches, chunks=chunks)
    whole = -(-micro_batches // ranks) * ranks
    assert found.step_s <= 3 * whole + 3 * (ranks - 1) / chunks + 1e-9
    if micro_batches == whole:
        assert found.bubble == pytest.approx((ranks - 1) / (chunks * micro_batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "micro_batches"), GRID)
def test_zero_bubble(ranks: int, micro_batches: int) -> None:
    """(p-1)(F+B-W) for ZB-H1, on the rank that ends last; ZB-H2 (p-1)(F+B-2W), from a rank's first action to its last (Qi et al.,
    arXiv 2401.10241, table 1)."""
    for seconds in ((1, 1, 1), (1, 1.2, 0.8)) if micro_batches >= 2 * ranks else ():
        f, b, w = seconds
        found = run("zb-h1", ranks, micro_batches, seconds)
        assert found.idle_s[0] == pytest.approx((ranks - 1) * (f + b - w))
        assert max(found.in_flight) == ranks
        found = run("zb-h2", ranks, micro_batches, seconds)
        spans = found.timeline[0]
        busy = sum(s.end_s - s.start_s for s in spans)
        assert spans[-1].end_s - spans[0].start_s - busy == pytest.approx((ranks - 1) * (f + b - 2 * w))
        assert max(found.in_flight) == 2 * ranks - 1
    assert run("zb-h1", ranks, micro_batches).step_s <= run("1f1b", ranks, micro_batches).step_s


@pytest.mark.parametrize(("ranks", "micro_batches"), [(p, m) for p, m in GRID if m >= 2 * p - 1])
def test_v(ranks: int, micro_batches: int) -> None:
    """All that is left is the last rank's wait for its first forward: p-1 chunks."""
    found = run("zb-v", ranks, micro_batches)
    assert found.idle_s == pytest.approx([(ranks - 1) / 2] * ranks)
    assert max(found.in_flight) <= 2 * ranks, "no more than 1F1B's first rank: chunks are half a rank's share"


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "percent"), [(2, 4, (20.0, 11.1, 7.7, 4.0)), (4, 8, (27.3, 15.8, 11.1, 5.9)), (8, 32, (17.9, 9.9, 6.8, 3.5))]
)
def test_the_table_of_the_issue(ranks: int, micro_batches: int, percent: tuple[float, ...]) -> None:
    found = [100 * run(name, ranks, micro_batches).bubble for name in ("1f1b", "interleaved", "zb-h1", "zb-v")]
    assert found == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 3)])
def test_without_a_flush_nothing_is_idle(ranks: int, micro_batches: int) -> None:
    found = run("pipedream-2bw", ranks, micro_batches)
    assert found.step_s == pytest.approx(3 * micro_batches)
    assert found.bubble == pytest.approx(0)


def test_uneven_stages_and_transfers() -> None:
    found = simulate("1f1b", stages=2, micro_batches=2, forward_s=[1.0, 3.0], backward_input_s=[2.0, 4.0], transfer_s=0.5)
    # stage 1: F0 1.5-4.5, B0 4.5-8.5, F1 8.5-11.5, B1 11.5-15.5; stage 0: B0 9-11, B1 16-18
    assert found.step_s == pytest.approx(18)
    assert found.idle_s == pytest.approx([18 - 6, 18 - 14])
    assert found.bubble == pytest.approx((12 + 4) / 36)
    assert [(str(s.action), s.start_s, s.end_s) for s in found.timeline[1]] == [
        ("1F0", 1.5, 4.5), ("1B0", 4.5, 8.5), ("1F1", 8.5, 11.5), ("1B1", 11.5, 15.5),
    ]  # fmt: skip


def test_chunks_divide_a_ranks_time_or_have_their_own() -> None:
    even = run("interleaved", 2, 4)
    own = simulate("interleaved", stages=2, micro_batches=4, forward_s=[0.5] * 4, backward_input_s=[1.0] * 4)
    assert even.step_s == own.step_s == pytest.approx(12 + 1.5)
    handed = simulate("zb-v", stages=1, micro_batches=2, forward_s=1.0, backward_input_s=1.0, transfer_s=9.0)
    assert handed.step_s == pytest.approx(4), "chunks of one rank send nothing"


def test_weight_gradients_follow_their_backward() -> None:
    for name in ("zb-h1", "zb-h2", "zb-v"):
        for spans in run(name, 3, 5).timeline:
            end = {(s.action.stage, s.action.micro_batch): s.end_s for s in spans if s.action.kind is Kind.B}
            assert all(s.start_s >= end[s.action.stage, s.action.micro_batch] for s in spans if s.action.kind is Kind.W)


def test_numbers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="found 'pipedream', expected gpipe or 1f1b or interleaved"):
        simulate("pipedream", stages=2, micro_batches=2, forward_s=1.0, backward_input_s=1.0)
    with pytest.raises(InputError, match="forward_s: found 3 numbers, expected one, or 2"):
        simulate("1f1b", stages=2, micro_batches=2, forward_s=[1.0] * 3, backward_input_s=1.0)
    with pytest.raises(InputError, match="1 or more"):
        simulate("1f1b", stages=0, micro_batches=2, forward_s=1.0, backward_input_s=1.0)
    for name, chunks, message in (("1f1b", 2, "1f1b has 1$"), ("zb-v", 3, "zb-v has 2$"), ("interleaved", 1, "has 2 or more")):
        with pytest.raises(InputError, match=f"chunks: found {chunks}, .*{message}"):
            run(name, 2, 2, chunks=chunks)
