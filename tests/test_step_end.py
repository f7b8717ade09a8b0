"""ZeRO's bytes and the sums over dp, against the published formulas."""

from __future__ import annotations

import pytest

from meshwright.compiler.costs import all_gather_s, all_reduce_s, reduce_scatter_s
from meshwright.compiler.hardware import Link
from meshwright.passes.step_end import Holding, step_end_s, sums_s, update_s

LINK = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9, memory_bytes_per_s=1e10, overlaps=False)


@pytest.mark.parametrize(("zero", "per_parameter"), [(0, 16.0), (1, 8 + 8 / 8), (2, 4 + 12 / 8), (3, 16 / 8)])
def test_bytes_per_parameter_are_those_of_the_paper(zero: int, per_parameter: float) -> None:
    """16 bytes a parameter in fp32: 4 + 4 + 8 (arXiv 1910.02054, figure 1, with fp32 weights), on 8 ranks and one micro-batch."""
    assert Holding(zero=zero, shards=8).total(4 * 800) == pytest.approx(per_parameter * 800)


def test_gradients_stay_whole_under_zero_2_with_several_micro_batches() -> None:
    assert Holding(zero=2, shards=8, micro_batches=4).gradients(800) == 800
    assert Holding(zero=3, shards=8, micro_batches=4).gradients(800) == 100


def test_sums_move_two_or_three_times_the_bytes() -> None:
    size = 10**9
    by_zero = [sums_s(Holding(zero=zero, shards=4), size, 1.0, 2.0, LINK) for zero in (0, 1, 2, 3)]
    assert by_zero[0] == pytest.approx(all_reduce_s(size, 4, LINK))
    assert by_zero[1] == by_zero[2] == pytest.approx(reduce_scatter_s(size, 4, LINK) + all_gather_s(size, 4, LINK))
    assert by_zero[3] == pytest.approx(1.5 * by_zero[1])
    assert sums_s(Holding(zero=3, shards=4, micro_batches=5), size, 1.0, 2.0, LINK) == pytest.approx(5 * by_zero[3])
    assert sums_s(Holding(shards=1), size, 1.0, 2.0, LINK) == 0.0


def test_sums_hide_behind_the_last_backward_where_links_overlap() -> None:
    beside = Link(latency_s=0.0, bandwidth_bytes_per_s=1e9, memory_bytes_per_s=1e10)
    whole = all_reduce_s(10**9, 4, beside)
    assert sums_s(Holding(shards=4), 10**9, 0.1, 0.5, beside) == pytest.approx(whole - 0.5)
    assert sums_s(Holding(shards=4), 10**9, 0.1, 2 * whole, beside) == 0.0


def test_the_slowest_stage_ends_the_step() -> None:
    ends = [(10**8, 1.0, 1.0), (10**9, 1.0, 1.0)]
    assert step_end_s(Holding(), ends, LINK) == pytest.approx(update_s(Holding(), 10**9, LINK))
    assert update_s(Holding(zero=1, shards=4), 10**9, LINK) == pytest.approx(update_s(Holding(), 10**9, LINK) / 4)
