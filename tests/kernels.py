"""The kernels of runtime.kernels against the torch path. Run as a process of its own, since Triton decides when it is imported whether it
interprets:

    TRITON_INTERPRET=1 python -m meshwright.tests.kernels
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.runtime.kernels import adamw, cross_entropy, rms_norm
from meshwright.runtime.loss import cross_entropy_sum


def check_kernels() -> None:
    """Each kernel equals the torch path. Vocabulary slices of two ranks are put together by hand."""
    generator = torch.Generator().manual_seed(0)
    for dtype, close in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        logits = (torch.randn(7, 5002, generator=generator) * 4).to(dtype).requires_grad_()
        labels = torch.tensor([0, 5001, 2500, 2501, -100, 17, 4096])
        for smoothing in (0.0, 0.1):
            logits.grad = None
            loss = cross_entropy_sum(logits, labels, label_smoothing=smoothing)
            loss.backward()
            halves = [part.detach() for part in logits.chunk(2, 1)]
            rows = [cross_entropy.row_sums(part, labels, r * 2501) for r, part in enumerate(halves)]
            peak = torch.maximum(rows[0][0], rows[1][0])
            exp, target, total = (sum(parts) for parts in zip(*((e * (p - peak).exp(), t, s) for p, e, t, s in rows), strict=True))
            log_z, counted = exp.log() + peak, labels != -100
            found = (log_z - (1 - smoothing) * target - smoothing / 5002 * total)[counted].sum()
            assert abs(float(found) - float(loss.detach())) <= 2e-6 * float(loss.detach())
            grads = [cross_entropy.gradient(p, labels, r * 2501, log_z, counted.float(), smoothing, 5002) for r, p in enumerate(halves)]
            assert logits.grad is not None and torch.allclose(torch.cat(grads, 1), logits.grad, atol=close, rtol=close)

        x = torch.randn(5, 3, 48, generator=generator).to(dtype).requires_grad_()
        weight = torch.randn(48, generator=generator).to(dtype).requires_grad_()
        upstream = torch.randn(5, 3, 48, generator=generator).to(dtype)
        both = []
        for function in (rms_norm.rms_norm, lambda x, w, eps: nn.functional.rms_norm(x, (48,), w, eps)):
            x.grad = weight.grad = None
            y = function(x, weight, 1e-5)
            y.backward(upstream)
            both.append((y.detach(), x.grad, weight.grad))
        for ours, torchs in zip(*both, strict=True):
            assert ours is not None and torchs is not None and torch.allclose(ours, torchs, atol=4 * close, rtol=4 * close), dtype

    start = torch.randn(3000, generator=generator)
    parameter = start.clone().requires_grad_()
    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, **settings)
    values, first, second = start.clone(), torch.zeros(3000), torch.zeros(3000)
    for step in range(1, 5):
        parameter.grad = torch.randn(3000, generator=generator)
        optimizer.step()
        adamw.adamw(values, parameter.grad, first, second, step, 1e-2, **settings)
    assert torch.allclose(values, parameter.detach(), atol=1e-7, rtol=1e-6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_kernels()
