"""Captured transformers models replayed by the reference interpreter, on other data than was traced.

The loss and every gradient equal those of the eager model.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from meshwright.compiler.capture import Captured, capture
from meshwright.compiler.graph import Level
from meshwright.compiler.interpret import count_targets, run_graph

B, S, V = 2, 16, 131
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": V, "max_position_embeddings": 64}
GQA = {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**GQA))


def llama_tied() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**GQA, tie_word_embeddings=True, attention_bias=True))


def gpt2() -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=V, n_positions=64, **off))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**SMALL, **NO_DROPOUT, num_hidden_layers=2))


def classifier() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**SMALL, **NO_DROPOUT, num_hidden_layers=2, num_labels=3))


def t5() -> nn.Module:
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=V, dropout_rate=0.0)
    return T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**GQA, num_local_experts=4))


def mixtral_balanced() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**GQA, num_local_experts=4, output_router_logits=True))


def phi3() -> nn.Module:
    return Phi3ForCausalLM(Phi3Config(**GQA))


def bloom() -> nn.Module:
    return BloomForCausalLM(
        BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=V, hidden_dropout=0.0, attention_dropout=0.0)
    )


def gemma3() -> nn.Module:
    config = Gemma3TextConfig(**{**GQA, "num_hidden_layers": 4}, head_dim=8, sliding_window=8, sliding_window_pattern=2)
    return Gemma3ForCausalLM(config)


Case = tuple[Callable[[], nn.Module], list[tuple[str, str]]]


def layers(container: str, kinds: list[str]) -> list[tuple[str, str]]:
    return [(f"{container}.{i}", kind) for i, kind in enumerate(kinds)]


def between(*runs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [("embedding", "embedding"), *[item for run in runs for item in run], ("head", "head")]


CASES: dict[str, Case] = {
    "llama": (llama, between(layers("model.layers", ["layer"] * 3))),
    "llama-tied": (llama_tied, between(layers("model.layers", ["layer"] * 3))),
    "gpt2": (gpt2, between(layers("transformer.h", ["layer"] * 2))),
    "bert": (bert, between(layers("bert.encoder.layer", ["layer"] * 2))),
    "classifier": (classifier, between(layers("bert.encoder.layer", ["layer"] * 2))),
    "t5": (
        t5,
        between(
            layers("encoder.block", ["encoder.block", "encoder.block.b", "encoder.block.b"]),
            [("bridge", "bridge")],
            layers("decoder.block", ["decoder.block", "decoder.block.b", "decoder.block.b"]),
        ),
    ),
    "mixtral": (mixtral, between(layers("model.layers", ["layer"] * 3))),
    "mixtral-balanced": (mixtral_balanced, between(layers("model.layers", ["layer"] * 3))),
    "phi3": (phi3, between(layers("model.layers", ["layer"] * 3))),
    "bloom": (bloom, between(layers("transformer.h", ["layer"] * 2))),
    "gemma3": (gemma3, []),
}


def data(module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """One micro-batch, some of its labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, V, (B, S), generator=generator)
    if isinstance(module, BertForSequenceClassification):
        return {"input_ids": ids, "labels": torch.randint(0, 3, (B,), generator=generator)}
    labels = torch.randint(1, V, (B, S), generator=generator)
    labels[0, 3:9] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(module: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {path: torch.zeros_like(p) if g is None else g for (path, p), g in zip(named.items(), found, strict=True)}


def replay(captured: Captured, module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    counts = count_targets(captured.graph, captured.buffers, inputs)
    denominators = [count.float() for count in counts]
    return run_graph(captured.graph, dict(module.named_parameters()), captured.buffers, inputs, denominators)


@pytest.mark.parametrize("name", CASES)
def test_replay_equals_eager(name: str) -> None:
    build, segments = CASES[name]
    torch.manual_seed(0)
    module = build()
    captured = capture(module, seq=S, micro_batch=B)
    inputs = data(module, seed=1)
    expected = module(**inputs).loss
    found = replay(captured, module, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients(module, found), gradients(module, expected), rtol=1e-4, atol=1e-6)
    if segments:
        assert [(s.name, s.kind) for s in captured.graph.segments] == segments


def test_global_mean_over_micro_batches() -> None:
    torch.manual_seed(0)
    module = llama()
    captured = capture(module, seq=S, micro_batch=B)
    batches = [data(module, seed) for seed in (1, 2)]
    batches[1]["labels"][:, 4:] = -100
    counts = [count_targets(captured.graph, captured.buffers, batch)[0] for batch in batches]
    total = [sum(counts, torch.zeros(())).float()]
    parameters = dict(module.named_parameters())
    found = sum(run_graph(captured.graph, parameters, captured.buffers, batch, total) for batch in batches)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    torch.testing.assert_close(found, module(**whole).loss)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "phi3", "mixtral"])
def test_constant_masks_are_gone(name: str) -> None:
    graph = capture(CASES[name][0](), seq=S, micro_batch=B).graph
    attention = [op for op in graph.ops if "scaled_dot_product_attention" in op.target]
    assert attention and all(op.args[3] is None and op.args[5] is (name != "bert") for op in attention)


def test_sliding_window_mask_is_one_small_constant() -> None:
    graph = capture(gemma3(), seq=S, micro_batch=B).graph
    masks = [op.args[3] for op in graph.ops if "scaled_dot_product_attention" in op.target]
    assert [mask is None for mask in masks] == [False, True, False, True]
    assert masks[0] == masks[2] and graph.values[masks[0].name].shape == (1, 1, S, S)


def test_segments_of_a_kind_match_op_by_op() -> None:
    graph = capture(t5(), seq=S, micro_batch=B).graph
    covered = [i for segment in graph.segments for i in segment.ops]
    assert covered == [i for i, op in enumerate(graph.ops) if op.level is Level.COMPUTE]
    one, two = (s for s in graph.segments if s.kind == "decoder.block.b")
    pairs = [(graph.ops[i], graph.ops[j]) for i, j in zip(one.ops, two.ops, strict=True)]
    assert all(a.target == b.target and [r.shape for r in a.results] == [r.shape for r in b.results] for a, b in pairs)
    assert all(a.module.removeprefix(one.prefix) == b.module.removeprefix(two.prefix) for a, b in pairs)


def test_signature() -> None:
    captured = capture(llama_tied(), seq=S, micro_batch=B)
    signature = captured.signature
    assert signature["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert signature["inputs"] == [
        {"name": "input_ids", "shape": [B, S], "dtype": "int64"},
        {"name": "labels", "shape": [B, S], "dtype": "int64"},
    ]
    assert signature["vocab_size"] == V and signature["unused"] == {}
    embedding = next(p for p in captured.graph.parameters if p.path == "model.embed_tokens.weight")
    assert embedding.aliases == ("lm_head.weight",) and len(captured.graph.consumers[embedding.value.name]) == 2
    assert list(captured.buffers) == ["model.rotary_emb.inv_freq"]


def test_router_loss_is_averaged_over_micro_batches_and_says_so() -> None:
    graph = capture(mixtral_balanced(), seq=S, micro_batch=B).graph
    assert len(graph.denominators) == len(graph.counts) == 2
    assert len(graph.notes) == 1 and "averaged over micro-batches" in graph.notes[0]
