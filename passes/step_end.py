"""What dp costs: bytes that a rank keeps of its parameters under ZeRO, and what a step takes beside its micro-batches.

    Holding        fp32 parameters and gradients, 4 bytes each, and AdamW's two moments, 8, per element; ZeRO 1 shards the moments over
                   dp, 2 the gradients too (whole while several micro-batches add up, as the runtime does), 3 the parameters too
                   (Rajbhandari et al., arXiv 1910.02054, section 5). In 16 bits another 2 for the values that programs read; the
                   FP32 parameters are then masters, which ZeRO 1 shards already, and gradients are in the type of their sums. Sizes
                   are those in FP32
    sums           ZeRO 0: one all-reduce of the gradients; 1 and 2: reduce-scatter and all-gather, the same bytes; 3: for every
                   micro-batch two all-gathers and one reduce-scatter (1.5 times the bytes, section 7)
    overlap        where collectives run beside matmuls, the sums of the last micro-batch hide behind its backward: only what is left counts
    update         the measured rate of the hardware; else UPDATE_PASSES reads or writes of 4 bytes per element: squares for the norm,
                   clipping, AdamW
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.compiler.costs import all_gather_s, all_reduce_s, reduce_scatter_s
from meshwright.compiler.hardware import Link
from meshwright.plans.document import Memory

FP32_BYTES = 4
OPTIMIZER_PER_PARAMETER = 2
"""Bytes of optimizer state per byte of an fp32 parameter: two moments."""
UPDATE_PASSES = 10
"""The gradient's squares read (1), the gradient scaled (2), parameter, gradient and moments read (4), three of them written (3)."""


def gradient_bytes(value_bytes: int, sum_bytes: int) -> int:
    """Of a gradient while micro-batches add up (runtime.flat_bucket.Numbers): that of FP32 values is FP32, else as it is summed."""
    return sum_bytes if value_bytes < FP32_BYTES else FP32_BYTES


@dataclass(frozen=True)
class Holding:
    """What a rank keeps. `copies` of parameters and gradients; `shards`: ranks of dp. `value_bytes` of a number that programs read,
    `sum_bytes` of one that is summed over dp."""

    copies: int = 1
    zero: int = 0
    shards: int = 1
    micro_batches: int = 1
    value_bytes: int = FP32_BYTES
    sum_bytes: int = FP32_BYTES

    def parameters(self, size_bytes: int) -> int:
        """Bytes for parameters of `size_bytes`."""
        has_masters = self.zero >= 3 or self.value_bytes < FP32_BYTES
        masters = (self.sharded(size_bytes) if self.zero else size_bytes) if has_masters else 0
        return self.copies * (masters + (0 if self.zero >= 3 else size_bytes * self.value_bytes // FP32_BYTES))

    def gradients(self, size_bytes: int) -> int:
        """Bytes for their gradients, which 16-bit values have in the type of the sums."""
        whole = self.zero < 2 or (self.zero == 2 and self.micro_batches > 1)
        kept = size_bytes if whole else self.sharded(size_bytes)
        return self.copies * (kept * gradient_bytes(self.value_bytes, self.sum_bytes) // FP32_BYTES)

    def optimizer(self, size_bytes: int) -> int:
        """Bytes for their moments."""
        return OPTIMIZER_PER_PARAMETER * (self.sharded(size_bytes) if self.zero else size_bytes)

    def sharded(self, size_bytes: int) -> int:
        return -(-size_bytes // self.shards)

    def total(self, size_bytes: int) -> int:
        """All of it."""
        return self.parameters(size_bytes) + self.gradients(size_bytes) + self.optimizer(size_bytes)

    def memory(self, size_bytes: int, activation_bytes: int) -> Memory:
        """A stage's memory with `size_bytes` of local parameters."""
        return Memory(
            parameters=self.parameters(size_bytes),
            gradients=self.gradients(size_bytes),
            optimizer=self.optimizer(size_bytes),
            activations=activation_bytes,
        )


def sums_s(holding: Holding, size_bytes: int, forward_s: float, backward_s: float, link: Link) -> float:
    """Seconds of a stage's step that the sums over dp add: gradients of `size_bytes`, micro-batches of these times."""
    if holding.shards == 1:
        return 0.0
    summed = size_bytes * holding.sum_bytes / FP32_BYTES
    scatter = reduce_scatter_s(summed, holding.shards, link)
    gather = all_gather_s(size_bytes * holding.value_bytes / FP32_BYTES, holding.shards, link)
    if holding.zero == 3:
        per_micro_batch = 2 * gather + scatter
        hidden = forward_s + backward_s if link.overlaps else 0.0
        return holding.micro_batches * max(0.0, per_micro_batch - hidden)
    whole = scatter + gather if holding.zero else all_reduce_s(summed, holding.shards, link)
    hidden = backward_s if link.overlaps else 0.0
    return max(0.0, whole - hidden)


def update_s(holding: Holding, size_bytes: int, link: Link) -> float:
    """Seconds of the optimizer's update of `size_bytes` of parameters, on the devices that `link` joins."""
    own = holding.sharded(size_bytes) if holding.zero else size_bytes
    return own / (link.update_bytes_per_s or link.memory_bytes_per_s / UPDATE_PASSES)


def step_end_s(holding: Holding, stages: Sequence[tuple[int, float, float]], link: Link) -> float:
    """The slowest stage's sums and update: (parameter bytes, forward and backward seconds of a micro-batch) of each stage."""
    return max(
        sums_s(holding, size, forward, backward, link) + update_s(holding, size, link)
        for size, forward, backward in stages
    )
