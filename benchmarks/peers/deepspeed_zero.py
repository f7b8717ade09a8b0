"""DeepSpeed's ZeRO on two ranks, with torch's AdamW.

    ... peers.deepspeed_zero DIRECTORY STAGE
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch import Tensor

from meshwright.benchmarks.common import CLIP, ROWS, adamw, load_model, measure, next_token_loss, start

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")

import deepspeed

RANKS = 2
BUCKET = 5_000_000

directory, rank = start(RANKS)
model = load_model(directory)
engine, optimizer, _, _ = deepspeed.initialize(
    model=model,
    optimizer=adamw(model.parameters()),
    config={
        "train_micro_batch_size_per_gpu": ROWS // RANKS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": int(sys.argv[2]),
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    },
)


def step(ids: Tensor) -> tuple[float, float]:
    """This rank's half of a batch."""
    own = ids.chunk(RANKS)[rank]
    loss = next_token_loss(engine(input_ids=own).logits, own)
    engine.backward(loss)
    engine.step()
    mean = loss.detach() / RANKS
    dist.all_reduce(mean)
    return float(mean), float(engine.get_global_grad_norm())


measure(step)
