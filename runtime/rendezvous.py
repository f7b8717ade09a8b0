"""A store of this start of the job alone, under torchrun.

When torchrun restarts workers (--max-restarts) it gives them the store of the workers before, with their addresses still in it;
who reads those connects to processes that are dead. So ranks first agree on a session, and use the store under its name:

    rank r    writes hello/r, a fresh name of its own, and waits for a welcome that answers it; then acknowledges the session
    rank 0    answers each hello, and again when it changes, until all have acknowledged

Names are random, so nothing that is left from before is taken for an answer. A restart count would not do: torchrun's agents on
several machines count for themselves.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

POLL_S = 0.01


def session_store(timeout: timedelta) -> tuple[Store, int, int]:
    """(store, rank, number of ranks) from torchrun's variables. Every rank calls it."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or size == 1:
        return store, rank, size
    session = _lead(store, size, timeout) if rank == 0 else _follow(store, rank, timeout)
    return PrefixStore(f"session-{session}", store), rank, size


def _lead(store: Store, size: int, timeout: timedelta) -> str:
    session = uuid4().hex
    answered: dict[int, bytes] = {}
    missing = set(range(1, size))
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            if store.check([f"hello/{rank}"]) and (hello := store.get(f"hello/{rank}")) != answered.get(rank):
                store.set(f"welcome/{rank}", f"{hello.decode()} {session}")
                answered[rank] = hello
            if store.check([f"ack/{rank}"]) and store.get(f"ack/{rank}").decode() == session:
                missing.discard(rank)
        _pause(end, f"rank {min(missing, default=0)}")
    return session


def _follow(store: Store, rank: int, timeout: timedelta) -> str:
    name = uuid4().hex
    store.set(f"hello/{rank}", name)
    end = time.monotonic() + timeout.total_seconds()
    while True:
        if store.check([f"welcome/{rank}"]):
            answer: str = store.get(f"welcome/{rank}").decode()
            answered, session = answer.split()
            if answered == name:
                store.set(f"ack/{rank}", session)
                return session
        _pause(end, "rank 0")


def _pause(end: float, whom: str) -> None:
    if time.monotonic() > end:
        raise TimeoutError(f"{whom} did not join in time")
    time.sleep(POLL_S)
