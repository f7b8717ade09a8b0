"""A rank that is killed: the job goes on by itself, exactly (tests/kill_ranks.py does it fifty times)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from threading import Thread

import pytest
import torch.distributed as dist

from meshwright.plans.mesh import Mesh
from meshwright.runtime import rendezvous
from meshwright.tests.kill_ranks import kill_and_compare
from meshwright.tests.ranks import free_port


def test_a_killed_job_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    assert len(kill_and_compare(tmp_path, Mesh(dp=2), zero=1, kills=2, seed=1)) >= 1


def test_what_dead_ranks_left_in_the_store_is_not_taken_for_an_answer() -> None:
    server = dist.TCPStore("127.0.0.1", free_port(), None, True)
    store = dist.TCPStore("127.0.0.1", server.port, None, False)
    for key, value in {"hello/1": "dead", "welcome/1": "dead old", "welcome/2": "gone old", "ack/1": "old", "ack/2": "old"}.items():
        store.set(key, value)
    found: dict[int, str] = {}
    patience = timedelta(seconds=20)

    def join(rank: int) -> None:
        mine = dist.TCPStore("127.0.0.1", server.port, None, False)
        found[rank] = rendezvous._lead(mine, 3, patience) if rank == 0 else rendezvous._follow(mine, rank, patience)

    threads = [Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found.values())) == 1 and len(found) == 3 and "old" not in found.values()
    with pytest.raises(TimeoutError, match="rank 1 did not join in time"):
        rendezvous._lead(dist.PrefixStore("other", store), 3, timedelta(seconds=0.1))
