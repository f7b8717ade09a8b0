"""`torchrun ... -m meshwright.run PLAN_DIR verify|train|bench`: what every rank runs.

What a rank says when it fails, and how it ends:

    a difference     exit 1. verify found one; rank 0 prints it.
    NaN, infinity    exit 1. All ranks find it in a step; rank 0 says where.
    bad input        exit 2. All ranks meet it alike, so rank 0 says it: one line, `error: ...`. Another rank says it
                     (`error: rank 3: ...`) only when it is still running GRACE_S later: then it was alone.
    a lost peer      exit 1. Another rank died first and torchrun is about to end this one; it says so only if that does
                     not happen within GRACE_S, so that the cause is not buried under its consequences.
    anything else    exit 1. Traceback, then `error: rank 3: ...` as the last line.

A rank that fails ends at once, without waiting for its peers (torchrun then ends these). torchrun closes with a report of its
own; the cause is put where that report takes its root cause from (TORCHELASTIC_ERROR_FILE), so that it stands last there too.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Annotated, NoReturn

import torch
import torch.distributed as dist
import typer
from typer.exceptions import TyperException
from typer.main import get_command

from meshwright import bench, train, verify
from meshwright.plans.errors import InputError
from meshwright.runtime.metrics import NonFiniteError

GRACE_S = 20.0
DEBUG = "--debug"
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
SINGLE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="Runs a plan on every rank, under torchrun.")


@app.callback()
def plan(
    ctx: typer.Context,
    plan_dir: Annotated[Path, typer.Argument(help="the directory that compile wrote")],
    debug: Annotated[bool, typer.Option(DEBUG, help="show the traceback of an error")] = False,
) -> None:
    """The plan that the command runs."""
    ctx.obj = plan_dir


app.command("verify")(verify.command)
app.command("train")(train.command)
app.command("bench")(bench.command)


def main() -> None:
    """Runs the command line and ends the process."""
    if "RANK" not in os.environ:
        os.environ.update(SINGLE_PROCESS)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if rank() != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    arguments = [a for a in sys.argv[1:] if a != DEBUG]
    with EndsProcess():
        status = get_command(app).main(arguments, prog_name="meshwright.run", standalone_mode=False) or 0
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    leave(int(status))


class EndsProcess:
    """Context manager: an exception that nobody caught inside ends the process."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if problem is not None:
            end_with(problem)


def end_with(problem: BaseException) -> NoReturn:
    """Says what went wrong, on the rank that should, and ends the process."""
    details = "".join(traceback.format_exception(problem))
    if isinstance(problem, KeyboardInterrupt):
        leave(130)
    if isinstance(problem, (InputError, TyperException)):
        fail_together(problem, details if DEBUG in sys.argv else "")
        leave(2)
    if isinstance(problem, NonFiniteError):
        if rank() != 0:
            time.sleep(GRACE_S)
        say(f"error: {problem}", details if DEBUG in sys.argv else "")
        leave(1)
    if isinstance(problem, verify.DiffersError):
        print(problem)
        put_into_report(str(problem))
        leave(1)
    if is_lost_peer(problem):
        time.sleep(GRACE_S)
    say(f"error: rank {rank()}: {one_line(problem)}", details)
    leave(1)


def fail_together(problem: InputError | TyperException, details: str) -> None:
    """Says what is wrong with the input, on one rank."""
    if rank() != 0:
        time.sleep(GRACE_S)
    where = "" if rank() == 0 else f"rank {rank()}: "
    message = f"{problem.format_message()} (see --help)" if isinstance(problem, TyperException) else str(problem)
    say(f"error: {where}{message}", details)


def is_lost_peer(problem: BaseException) -> bool:
    """Whether another rank's end is what this rank met."""
    return isinstance(problem, dist.DistError) or any(sign in str(problem) for sign in LOST_PEER)


def one_line(problem: BaseException) -> str:
    """Kind and first line of an exception."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__


def say(message: str, details: str) -> None:
    """The message as the last line on stderr, and as the root cause in torchrun's report."""
    sys.stdout.flush()
    print(f"{details}{message}", file=sys.stderr, flush=True)
    put_into_report(message)


def put_into_report(message: str) -> None:
    """Gives torchrun the root cause of this rank's end."""
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        facts = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(report).write_text(json.dumps({"message": {"message": message, "extraInfo": facts}}))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def leave(status: int) -> NoReturn:
    """Ends the process now: a rank that failed must not wait for peers in an exit handler."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
