"""What one rank of a sweep's plan computes. Alone in its file: ranks import no planner."""

from __future__ import annotations

from typing import Any

from meshwright.runtime.engine import Engine
from meshwright.tests.parity import OPTIMIZER


def run_engine(plan_dir: str, data: list[dict[str, Any]]) -> dict[str, object]:
    """Losses, norms and first gradients (on rank 0) of a few steps; the fields of a parity.Trace."""
    engine = Engine(plan_dir, optimizer=OPTIMIZER, dropout=False)
    engine.forward_backward(data[0])
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    metrics = [engine.train_step(batch) for batch in data]
    return {"losses": [m.loss for m in metrics], "norms": [m.grad_norm for m in metrics], "gradients": gradients}
