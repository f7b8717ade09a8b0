"""The multi-rank helper itself."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from meshwright.tests.ranks import run_ranks


def sum_over_ranks(scale: int) -> float:
    dist.init_process_group("gloo")
    x = torch.full((2,), float(scale * (dist.get_rank() + 1)))
    dist.all_reduce(x)
    return float(x[0])


def fail_on_rank_1() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def sleep_long() -> None:
    time.sleep(60)


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(2, sum_over_ranks, 10) == [30.0, 30.0]
    assert run_ranks(1, read_env, "EXTRA", env={"EXTRA": "yes"}) == ["yes"]


def read_env(name: str) -> str:
    return os.environ[name]


def test_a_failing_rank_ends_all_and_shows_its_log() -> None:
    with pytest.raises(AssertionError, match="rank one is unwell"):
        run_ranks(2, fail_on_rank_1, timeout=30)


def test_timeout() -> None:
    with pytest.raises(AssertionError, match="took more than 1 s"):
        run_ranks(2, sleep_long, timeout=1)
