"""Triton kernels, each equal to a torch path that is used everywhere else: on CPUs, and on GPUs without Triton.

    cross_entropy   rows of logits to maximum, sum of exponentials, target and sum in one read; the gradient in one read and write
    rms_norm        forward and backward
    adamw           one pass over flat parameters, gradients and moments

All compute in FP32 whatever they read. Tests run them on CPUs in Triton's interpreter (TRITON_INTERPRET=1, set before Triton is
imported) and compare with the torch path.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def runs_on(x: Tensor) -> bool:
    """Whether kernels are used for a tensor."""
    return HAS_TRITON and x.is_cuda


ENABLED = HAS_TRITON and torch.cuda.is_available()
"""Whether this process may use kernels at all: importing Triton takes a second, which CPU ranks need not spend."""
