"""torch's DTensor tensor parallelism on two ranks: a plan for Llama written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from meshwright.benchmarks.common import CLIP, adamw, load_model, measure, next_token_loss, start

RANKS = 2
COLUMN, ROW = "column", "row"
LAYER = {
    "self_attn.q_proj": COLUMN,
    "self_attn.k_proj": COLUMN,
    "self_attn.v_proj": COLUMN,
    "self_attn.o_proj": ROW,
    "mlp.gate_proj": COLUMN,
    "mlp.up_proj": COLUMN,
    "mlp.down_proj": ROW,
}

directory, _ = start(RANKS)
mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
model = load_model(directory)
styles: dict[str, ParallelStyle] = {
    f"model.layers.{i}.{name}": ColwiseParallel() if style == COLUMN else RowwiseParallel()
    for i in range(len(model.model.layers))
    for name, style in LAYER.items()
}
styles["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
styles["lm_head"] = ColwiseParallel(output_layouts=Replicate())
parallelize_module(model, mesh, styles)

sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
replicated = [p for p in model.parameters() if not isinstance(p, DTensor)]
optimizer = adamw(model.parameters(), foreach=False)


def norm_of(parameters: Sequence[Tensor]) -> Tensor:
    """Gradient norm of parameters of one kind: torch cannot mix them."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def step(ids: Tensor) -> tuple[float, float]:
    """A whole batch on both ranks."""
    loss = next_token_loss(model(input_ids=ids).logits, ids)
    loss.backward()
    norm = torch.hypot(norm_of(sharded), norm_of(replicated))
    for parameters in (sharded, replicated):
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, norm, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), float(norm)


measure(step)
