"""All ranks or none: how ranks agree that something went wrong, and what a failing rank says."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from meshwright.plans.errors import InputError

T = TypeVar("T")
GRACE_S = 10.0
"""How long a rank that lost its peers waits to be ended, so that what the first rank to fail said stays last."""

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""How gloo says that another process is gone."""


def together(action: Callable[[], T]) -> T:
    """`action()` on every rank; when it raises InputError or OSError on one, all raise the first rank's InputError."""
    result: T | None = None
    problem: str | None = None
    try:
        result = action()
    except InputError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    problems: list[str | None] = [problem] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if first := next((p for p in problems if p is not None), None):
        raise InputError(first)
    return result  # type: ignore[return-value]


class FailureReport:
    """Context manager: an exception inside goes on with a note, the last line of its traceback: `error: rank ...`.

    Bad input is left alone: it is raised on every rank. A rank whose peers went away waits for the launcher to end it
    before it says so.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (InputError, KeyboardInterrupt, SystemExit)):
            return
        if _is_lost_peer(error):
            time.sleep(GRACE_S)
        first = (str(error).splitlines() or [""])[0]
        error.add_note(f"error: {self._describe()}: {type(error).__name__}: {first}")


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, (dist.DistError, RuntimeError)) and any(sign in str(error) for sign in LOST_PEER)
