"""Python's collections of garbage, made rare where they cost more than they free.

A graph and what is decided on it are many small objects that live on. Each full collection walks them and those of all libraries: a
quarter of the planning time of a deep model.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

NEW_OBJECTS = 35_000
"""At which garbage is collected; by itself Python does at 700."""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """While active, garbage is collected after NEW_OBJECTS. Also a decorator."""
    before = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
