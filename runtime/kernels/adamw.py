"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on flat tensors, in one pass: reads parameter, gradient and both moments, writes all but
the gradient. FP32, but for the gradient, which may be 16-bit. Equal to torch.optim.AdamW, to rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(p, g, m, v, size, lr, beta1, beta2, eps, decay, correction1, root2, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(p + at, mask=inside, other=0.0)
    grad = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(m + at, mask=inside, other=0.0)
    second = tl.load(v + at, mask=inside, other=0.0)
    value *= 1.0 - lr * decay
    first += (grad - first) * (1.0 - beta1)
    second = second * beta2 + grad * grad * (1.0 - beta2)
    value -= (lr / correction1) * first / (tl.sqrt(second) / root2 + eps)
    tl.store(p + at, value, mask=inside)
    tl.store(m + at, first, mask=inside)
    tl.store(v + at, second, mask=inside)


def adamw(
    values: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update number `step` (from 1), in place. Tensors are FP32, gradients perhaps 16-bit, of one dim and contiguous."""
    size = values.numel()
    if not size:
        return
    correction1, root2 = 1 - betas[0] ** step, (1 - betas[1] ** step) ** 0.5
    grid = (triton.cdiv(size, BLOCK),)
    _adamw[grid](values, gradients, first, second, size, lr, *betas, eps, weight_decay, correction1, root2, BLOCK=BLOCK)
