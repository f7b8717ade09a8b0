"""What verify holds a plan against, and how it compares."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from meshwright import reference
from meshwright.plans.mesh import Mesh
from meshwright.plans.signature import InputSpec, Signature
from meshwright.reference import (
    Reference,
    Update,
    accumulate,
    compute_reference,
    micro_batches_of_all,
    micro_batches_of_each,
    random_batch,
    whole_batch,
)
from meshwright.verify import Parallel, compare_gradients, compare_norms, compare_weights

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


def model_of(task: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if task == "causal-lm":
        return LlamaForCausalLM(LlamaConfig(**SHAPE))
    if task == "masked-lm":
        return BertForMaskedLM(BertConfig(**SHAPE))
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes))


def plan(task: str = "causal-lm") -> SimpleNamespace:
    return SimpleNamespace(global_batch=8, micro_batch=2, seq=12, task=task, mesh=Mesh(dp=2), num_micro_batches=2)


def signature() -> Signature:
    specs = tuple(InputSpec(name=name, shape=(2, 12), dtype="int64") for name in ("input_ids", "labels"))
    return Signature(inputs=specs, parameters={}, vocab_size=50)


def batch_of(task: str = "causal-lm", seed: int = 0, even: bool = False) -> dict[str, torch.Tensor]:
    return random_batch(signature(), plan(task), seed, even)


def test_even_batches_and_micro_batches() -> None:
    labels = batch_of(even=True)["labels"]
    assert len(set((labels[:, 1:] != -100).sum(1).tolist())) == 1 and (labels == -100).any()
    assert micro_batches_of_each(plan()) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert micro_batches_of_all(plan()) == [[0, 1, 4, 5], [2, 3, 6, 7]]  # dp rank 0 has rows 0 to 3


def test_inputs_have_their_dtypes() -> None:
    specs = tuple(InputSpec(name=dtype, shape=(2, 12), dtype=dtype) for dtype in ("bool", "int32", "float32"))
    batch = random_batch(Signature(inputs=specs, parameters={}, vocab_size=50), plan())
    assert all(str(x.dtype) == f"torch.{name}" for name, x in batch.items()) and batch["int32"].max() > 1


def test_labels_of_classes_are_classes() -> None:
    assert set(batch_of("token-classification")["labels"].unique().tolist()) <= {-100, 0, 1}


def test_random_batch_has_uneven_labels() -> None:
    batch = batch_of()
    targets = (batch["labels"] != -100).sum(1)
    assert batch["input_ids"].shape == (8, 12) and targets.min() >= 1 and targets.max() >= 2 * targets.min()
    assert torch.equal(batch["labels"], batch_of()["labels"])
    assert not torch.equal(batch["labels"], batch_of(seed=1)["labels"])


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "seq2seq-lm"])
def test_chunks_add_up_to_the_whole_batch(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(task)
    whole, parts = model_of(task).eval(), model_of(task).eval()
    loss = accumulate(whole, batch, whole_batch(plan()), plan(task))
    assert loss == pytest.approx(float(whole(**batch).loss), abs=1e-7)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 0)
    assert accumulate(parts, batch, whole_batch(plan()), plan(task)) == pytest.approx(loss, abs=1e-6)
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, atol=1e-6, rtol=1e-4, msg=name)


def reference_and_copy() -> tuple[Reference, Parallel]:
    found = compute_reference(model_of("causal-lm"), signature(), [batch_of()], plan(), Update(), whole_batch(plan()))
    gradients = {name: g.clone() for name, g in found.gradients.items()}
    return found, Parallel(found.loss, found.grad_norm, gradients, {n: w.clone() for n, w in found.weights.items()}, found.losses)


def test_the_worst_is_found() -> None:
    truth, copy = reference_and_copy()
    assert compare_gradients(truth, copy, 1e-5).difference == 0.0
    assert compare_weights(truth, copy, 1e-5).difference == 0.0
    name = "model.layers.0.mlp.up_proj.weight"
    copy.gradients[name].mul_(1.001)
    copy.weights[name][0, 0] += 0.5
    found = compare_gradients(truth, copy, 1e-5)
    assert found.worst == name and found.difference == pytest.approx(1e-3, rel=1e-2) and not found.ok
    found = compare_weights(truth, copy, 1e-5)
    assert found.worst == name and found.difference == pytest.approx(0.5, rel=1e-2) and not found.ok
    assert compare_norms(truth, copy, 1e-5).ok


def test_missing_and_broken_values_differ() -> None:
    truth, copy = reference_and_copy()
    copy.gradients["lm_head.weight"].fill_(float("nan"))
    assert compare_gradients(truth, copy, 1e-5).worst == "lm_head.weight"
    del copy.weights["model.norm.weight"]
    found = compare_weights(truth, copy, 1e-5)
    assert found.worst == "model.norm.weight" and not found.ok
