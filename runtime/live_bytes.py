"""Bytes of tensors that are alive: what is allocated while a watch is on, less what was freed, and the most there was.

A storage counts from the first op that returns it until its last reference goes, once however many views it has. What was there before
the watch began does not count. It works on fake tensors as on real ones, so a prediction and a measurement are the same count.
(What an op allocates and frees inside itself is not seen.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """`with LiveBytes() as live:` counts what is allocated inside. `known` storages do not count."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        inputs = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in inputs:
                self.add(x)
        return result

    def add(self, x: Tensor) -> None:
        """A tensor is there from now on."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._alive:
            return
        self._alive[key] = storage.nbytes(), weakref.ref(storage, partial(self._freed, key))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def reset_peak(self) -> None:
        """The peak is counted anew from here."""
        self.peak = self.now

    def _freed(self, key: int, _: object) -> None:
        size, _ref = self._alive.pop(key)
        self.now -= size
