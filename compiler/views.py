"""Ops that look at memory another way, by short name."""

from __future__ import annotations

VIEWS = frozenset({
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "permute", "transpose", "t", "numpy_T", "expand",
    "expand_as", "slice", "select", "split", "split_with_sizes", "chunk", "narrow", "unbind", "detach", "alias", "view_as",
    "reshape_as", "_unsafe_view", "movedim", "swapaxes", "swapdims", "diagonal", "unfold",
})  # fmt: skip
"""Short names of ops that look at memory another way. (`reshape` may copy; in the models' attention it does not.)"""

CUTS = frozenset({"expand", "expand_as", "slice", "select", "split", "split_with_sizes", "chunk", "narrow", "unbind"})
"""Views whose gradient is a tensor of its own."""
