"""Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740, section 3.2).

The backward pass starts from `scale` instead of 1, so that small gradients are not rounded to zero in 16 bits; gradients are divided by
it before anything looks at them. When one of them is not finite, on any rank, no rank updates: the scale is multiplied by `backoff`, and
the step counts as skipped. After `interval` steps in a row that were good it is multiplied by `growth`. A scale below 1 is not tried:
then the gradients overflow by themselves.

All ranks see the same sums, so each keeps the scale for itself and all agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from meshwright.plans.errors import InputError

LEAST = 1.0


@dataclass(frozen=True)
class ScaleOptions:
    """`optimizer.loss_scale`: torch's GradScaler has the same defaults."""

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


DEFAULT = ScaleOptions()


def read_scale_options(given: object) -> ScaleOptions:
    """Options from {"initial": 65536, "growth": 2, "backoff": 0.5, "interval": 2000}, or any part; InputError says what is wrong."""
    names = [field.name for field in fields(ScaleOptions)]
    if not isinstance(given, Mapping):
        raise InputError(f"optimizer.loss_scale: found {given!r}, expected some of {', '.join(names)} by name")
    for key, value in given.items():
        if key not in names:
            raise InputError(f"optimizer.loss_scale.{key}: unknown option; the options are {', '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InputError(f"optimizer.loss_scale.{key}: found {value!r}, expected a number")
    options = ScaleOptions(**given)
    limits = {
        "initial": (options.initial >= LEAST, f"{LEAST:g} or more"),
        "growth": (options.growth >= 1, "1 or more"),
        "backoff": (0 < options.backoff < 1, "a number between 0 and 1"),
        "interval": (options.interval >= 1 and float(options.interval).is_integer(), "a whole number of 1 or more"),
    }
    for name, (good, expected) in limits.items():
        if not good:
            raise InputError(f"optimizer.loss_scale.{name}: found {getattr(options, name)!r}, expected {expected}")
    return options


@dataclass
class LossScale:
    """The scale now, and good steps since it last changed."""

    options: ScaleOptions
    scale: float
    good_steps: int = 0

    @classmethod
    def start(cls, options: ScaleOptions) -> LossScale:
        """Of a new run."""
        return cls(options, options.initial)

    def good(self) -> None:
        """A step was made."""
        self.good_steps += 1
        if self.good_steps == self.options.interval:
            self.scale, self.good_steps = self.scale * self.options.growth, 0

    def overflowed(self) -> bool:
        """A step was not finite; whether a smaller scale may help."""
        self.scale, self.good_steps = self.scale * self.options.backoff, 0
        if self.scale < LEAST:
            self.scale = LEAST
            return False
        return True
