"""Runs a test function on several ranks of one machine: `run_ranks(4, check_engine, plan_dir, timeout=120)`.

Every rank is a process forked from a server that has imported torch and the commands once, so that starting four ranks costs
milliseconds. A rank sees what torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and one thread. The
function must stand at the top level of its file; its arguments and result are pickled. It makes its own process group
(the Engine does). Results come back in rank order; a rank that fails ends all of them, and the end of every rank's
output is in the AssertionError.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed

T = TypeVar("T")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["meshwright.tests.ranks", "meshwright.run"])
TAIL_CHARS = 3000


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    ranks: int, function: Callable[..., T], *args: object, timeout: float = 120, env: Mapping[str, str] | None = None
) -> list[T]:
    """`function(*args)` on every rank at once; the results in rank order. `env` adds environment variables.

    Raises AssertionError when a rank fails or dies, or when all of it takes longer than `timeout` seconds.
    """
    port = free_port()
    path = inspect.getsourcefile(function)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        workers = [
            CONTEXT.Process(
                target=_rank_main,
                args=(Path(folder), path, function.__qualname__, pickle.dumps(args), rank, ranks, port, dict(env or {})),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        problem = _wait(workers, timeout)
        for worker in workers:
            worker.kill()
            worker.join()
        if problem:
            tails = [f"--- rank {rank}\n{_tail(Path(folder) / f'{rank}.log')}" for rank in range(ranks)]
            raise AssertionError("\n".join([problem, *tails]))
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


def _wait(workers: list[ForkServerProcess], timeout: float) -> str:
    """Until all ranks have ended well (an empty string), or the first thing that goes wrong."""
    end = time.monotonic() + timeout
    while any(worker.exitcode is None for worker in workers):
        for rank, worker in enumerate(workers):
            if worker.exitcode:
                time.sleep(0.5)
                return f"rank {rank} of {len(workers)} ended with exit status {worker.exitcode}"
        if time.monotonic() > end:
            for worker in workers:
                if worker.pid is not None and worker.exitcode is None:
                    os.kill(worker.pid, signal.SIGUSR1)
            time.sleep(0.5)
            return f"{len(workers)} ranks took more than {timeout:g} s"
        time.sleep(0.02)
    bad = [f"rank {rank}: {worker.exitcode}" for rank, worker in enumerate(workers) if worker.exitcode]
    return f"exit statuses {', '.join(bad)}" if bad else ""


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-TAIL_CHARS:] if path.exists() else "(no output)"


def _rank_main(
    folder: Path, path: str, name: str, args: bytes, rank: int, ranks: int, port: int, env: dict[str, str]
) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env,
    }  # fmt: skip
    torch.set_num_threads(1)
    try:
        spec = importlib.util.spec_from_file_location(f"rank_{Path(path).stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        result = getattr(module, name)(*pickle.loads(args))
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        status = 0
    except BaseException:  # noqa: BLE001 - a test's failure, whatever it was, goes into the rank's log
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
