"""The single-process model and what it computes: the truth that `verify` holds a plan against.

    random_batch      a global batch that the model accepts, with -100 labels spread unevenly over its rows
    Reference         loss, gradients, gradient norm, and the weights after one clipped AdamW step, of that batch

The loss is the mean over the global batch's non-ignored targets, as the model itself defines it: the batch goes through in
chunks of rows, chunk c weighted n_c / n by its number of targets. Dropout is off, batch norms use the batch (evaluation_mode).

Sums over a great many numbers are made in FP64, or the single process would be the less exact of the two: torch's FP32
cross-entropy on CPUs adds up the exponentials of a vocabulary one after the other (SmolLM2-135M, 49,152 words: the loss is off
by 2e-6 relative, some gradients of norm weights by 7e-4), and so does its norm of a large gradient (4e-5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from meshwright.data import IGNORED
from meshwright.plans.document import PlanDocument
from meshwright.plans.signature import Signature

CHUNK_ELEMENTS = 1 << 28
CLASSES = 2
AUTOCAST_SCALE = 2.0**10
"""Keeps small gradients in the range of fp16."""
CLIP_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_ adds it to the norm."""


class ExactCrossEntropy(TorchFunctionMode):
    """Makes torch's cross-entropy work in FP64 inside."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not cross_entropy or not args or args[0].dtype != torch.float32:
            return func(*args, **(kwargs or {}))
        return func(args[0].double(), *args[1:], **(kwargs or {})).float()


@dataclass(frozen=True)
class Update:
    """The optimizer step that verify makes."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0

    def settings(self) -> dict[str, object]:
        """As the engine takes it."""
        return {"name": "adamw", **asdict(self)}


@dataclass(frozen=True)
class Reference:
    """By the model's own parameter names, tied ones once. `weights` are those after the updates; all else is of the first batch, but for
    `losses`, of all batches."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    losses: tuple[float, ...] = ()

    @property
    def mean_gradient(self) -> float:
        """Root mean square of the gradient's elements over the whole model."""
        return self.grad_norm / sqrt(max(1, sum(g.numel() for g in self.gradients.values())))


def random_batch(signature: Signature, document: PlanDocument, seed: int = 0, even: bool = False) -> dict[str, torch.Tensor]:
    """A global batch from a seed: random ids; labels are -100 for up to three quarters of a row, and a tenth elsewhere.

    `even`: every row has the same number of targets.
    """
    random = torch.Generator().manual_seed(seed)
    batch = {}
    for spec in signature.inputs:
        shape = (document.global_batch, *spec.shape[1:])
        if spec.name.endswith("attention_mask"):
            batch[spec.name] = torch.ones(shape, dtype=getattr(torch, spec.dtype))
        elif spec.name == "token_type_ids":
            batch[spec.name] = torch.zeros(shape, dtype=torch.int64)
        elif getattr(torch, spec.dtype).is_floating_point:
            batch[spec.name] = torch.randn(shape, generator=random, dtype=getattr(torch, spec.dtype))
        else:
            dtype = getattr(torch, spec.dtype)
            few = dtype == torch.bool or len(shape) == 1 or (spec.name.endswith("labels") and not document.task.endswith("-lm"))
            limit = CLASSES if few else signature.vocab_size or CLASSES
            batch[spec.name] = torch.randint(0, limit, shape, generator=random).to(dtype)
    if "labels" in batch and batch["labels"].ndim == 2:
        batch["labels"] = with_ignored(batch["labels"], random, even)
    return batch


def with_ignored(labels: torch.Tensor, random: torch.Generator, even: bool) -> torch.Tensor:
    """Labels with -100 for a share of every row, uneven unless asked; the last of a row stays a target."""
    rows, length = labels.shape
    if even:
        order = torch.rand(rows, max(0, length - 2), generator=random).argsort(1)
        ignored = torch.nn.functional.pad(order < length // 4, (1, 1))[:, -length:]
    else:
        start = (torch.arange(rows) * 7 % 4) * length // 4
        ignored = torch.arange(length)[None, :] < start[:, None]
        ignored |= torch.rand(rows, length, generator=random) < 0.1
    ignored[:, -1] = False
    return labels.masked_fill(ignored, IGNORED)


Chunks = list[list[int]]
"""Rows of a global batch that go through the model together."""


def whole_batch(document: PlanDocument) -> Chunks:
    """All rows at once."""
    return [list(range(document.global_batch))]


def micro_batches_of_all(document: PlanDocument) -> Chunks:
    """A micro-batch of every dp rank together: what statistics over the dp ranks see."""
    own = micro_batches_of_each(document)
    count = document.num_micro_batches
    return [[row for d in range(document.mesh.dp) for row in own[d * count + m]] for m in range(count)]


def micro_batches_of_each(document: PlanDocument) -> Chunks:
    """Each dp rank's micro-batches."""
    size = document.micro_batch
    return [list(range(at, at + size)) for at in range(0, document.global_batch, size)]


def compute_reference(
    model: torch.nn.Module,
    signature: Signature,
    batches: Sequence[Mapping[str, torch.Tensor]],
    document: PlanDocument,
    update: Update,
    chunks: Chunks,
) -> Reference:
    """Runs the model forward and backward over each batch in chunks of rows, all with the first weights; then updates it once for each.
    So of two batches the second update is one step delayed, as those of pipedream-2bw are: W(2) = W(1) - lr g(W(0)). Changes the model."""
    prepare(model, signature)
    losses, gradients = [], []
    for batch in batches:
        model.zero_grad(set_to_none=True)
        with ExactCrossEntropy():
            losses.append(accumulate(model, batch, chunks, document))
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    norms = [sqrt(sum(float(g.double().square().sum()) for g in found.values())) for found in gradients]
    parameters = {name: p for name, p in model.named_parameters() if name in gradients[0]}
    optimizer = torch.optim.AdamW(parameters.values(), update.lr, update.betas, weight_decay=update.weight_decay)
    for found, norm in zip(gradients, norms, strict=True):
        for name, parameter in parameters.items():
            parameter.grad = found[name] * min(1.0, update.clip / (norm + CLIP_EPSILON))
        optimizer.step()
    weights = {name: p.detach() for name, p in parameters.items()}
    return Reference(losses[0], norms[0], gradients[0], weights, tuple(losses))


def autocast_reference(
    model: torch.nn.Module,
    signature: Signature,
    batch: Mapping[str, torch.Tensor],
    document: PlanDocument,
    chunks: Chunks,
    dtype: torch.dtype,
) -> Reference:
    """The same in torch's own mixed precision, without an update: what 16-bit numbers alone make of the gradients. Changes the model."""
    prepare(model, signature)
    with ExactCrossEntropy(), torch.autocast("cpu", dtype):
        loss = accumulate(model, batch, chunks, document, AUTOCAST_SCALE)
    gradients = {name: p.grad / AUTOCAST_SCALE for name, p in model.named_parameters() if p.grad is not None}
    norm = sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    return Reference(loss, norm, gradients, {})


def prepare(model: torch.nn.Module, signature: Signature) -> None:
    """Nothing random; what is frozen is what the plan says, since transformers' loading forgets what the model itself has frozen."""
    evaluation_mode(model)
    for name, parameter in model.named_parameters():
        if name in signature.parameters:
            parameter.requires_grad_(signature.parameters[name].trainable)


def evaluation_mode(model: torch.nn.Module) -> torch.nn.Module:
    """The model without what is random in training: in evaluation mode, but for batch norms, which go on using the batch's statistics."""
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train()
    return model


def accumulate(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], chunks: Chunks, document: PlanDocument, scale: float = 1.0
) -> float:
    """Gradients of `scale` times the mean loss, added up over chunks of rows; gives the loss. The whole batch goes in parts when it is
    large."""
    if len(chunks) == 1 and too_large(batch, model):
        chunks = micro_batches_of_each(document)
    parts = [{name: value[rows] for name, value in batch.items()} for rows in chunks]
    counts = [num_targets(part, document.task) for part in parts]
    total = 0.0
    for part, count in zip(parts, counts, strict=True):
        if count == 0:
            continue
        loss = loss_of(model(**part)) * (count / sum(counts))
        (loss * scale).backward()
        total += float(loss.detach())
    return total


def too_large(batch: Mapping[str, torch.Tensor], model: torch.nn.Module) -> bool:
    """Whether the largest tensor of a forward over all rows would be more than moderate."""
    widest = max((p.shape[0] for p in model.parameters() if p.ndim > 1), default=1)
    return max(value.numel() for value in batch.values()) * widest > CHUNK_ELEMENTS


def num_targets(chunk: Mapping[str, torch.Tensor], task: str) -> int:
    """Targets that the loss is the mean over; a causal model predicts a row's labels from the second on."""
    if "labels" not in chunk:
        return len(next(iter(chunk.values())))
    labels = chunk["labels"]
    if task == "causal-lm" and labels.ndim == 2:
        labels = labels[:, 1:]
    return int((labels != IGNORED).sum())


def loss_of(output: object) -> torch.Tensor:
    """The loss in what a model returns: a scalar, a tuple that starts with it, or an object with `loss`."""
    found = output[0] if isinstance(output, tuple) else getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"the model returned {type(output).__name__} without a loss")
    return found
