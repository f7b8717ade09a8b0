"""megatron-core's GPTModel (local layers, no Transformer Engine) on two CPU ranks: `megatron_core MODEL tp` or `... pp`.

megatron-core calls torch.cuda wherever it runs; what it calls is replaced here before it is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.benchmarks.common import ROWS, SEQ, adamw, load_model, measure, squares, start, update_together

RANKS = 2
CPU = torch.device("cpu")


class Nothing:
    """Stands for streams and events."""

    def __init__(self, *args: object, **options: object) -> None:
        """Takes anything."""

    def __call__(self, *args: object, **options: object) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Nothing:
        return self


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with CPU tensors for whoever asks for CUDA's."""

    def call(*args: object, **options: object) -> object:
        return function(*args, **{k: CPU if k == "device" and "cuda" in str(v) else v for k, v in options.items()})

    return call


def replace_cuda() -> None:
    """Makes torch.cuda do nothing, on the CPU."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = cuda.empty_cache = lambda *args, **options: None
    cuda.current_stream = cuda.default_stream = cuda.Stream = cuda.Event = Nothing
    cuda.stream = lambda *args, **options: contextlib.nullcontext()
    cuda.get_rng_state = lambda *args, **options: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.memory_allocated = lambda *args: 0
    for name in ("zeros", "ones", "empty", "tensor", "full", "arange", "zeros_like", "empty_like", "rand", "randn"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = module.cuda = lambda self, *args, **options: self


os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
replace_cuda()

import megatron.core.tensor_parallel.random as megatron_random  # noqa: E402 - after replace_cuda
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

megatron_random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
megatron_random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)

directory, rank = start(RANKS)
tp, pp, num_micro_batches = {"tp": (RANKS, 1, 1), "pp": (1, RANKS, 4)}[sys.argv[2]]
parallel_state.initialize_model_parallel(tp, pp)
tensor_parallel.model_parallel_cuda_manual_seed(123)
reference = load_model(directory)
llama: Any = reference.config
tp_rank = parallel_state.get_tensor_model_parallel_rank()


def build() -> Any:
    """This rank's part of the model."""
    config = TransformerConfig(
        num_layers=llama.num_hidden_layers,
        hidden_size=llama.hidden_size,
        ffn_hidden_size=llama.intermediate_size,
        num_attention_heads=llama.num_attention_heads,
        num_query_groups=llama.num_key_value_heads,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        layernorm_epsilon=llama.rms_norm_eps,
        batch_p2p_comm=True,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=llama.vocab_size,
        max_sequence_length=SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def columns(weight: Tensor) -> Tensor:
    """This rank's outputs of a linear."""
    own: Tensor = weight.chunk(tp, 0)[tp_rank]
    return own


@torch.no_grad()
def copy_layer(layer: Any, weights: dict[str, Tensor]) -> None:
    """Weights of one layer: q, k and v by groups of heads in one, gate and up in one."""
    groups, width, hidden = llama.num_key_value_heads, llama.head_dim, llama.hidden_size
    qkv = [weights[f"self_attn.{x}_proj.weight"].view(groups, -1, width, hidden).flatten(1, 2) for x in "qkv"]
    layer.self_attention.linear_qkv.weight.copy_(columns(torch.cat(qkv, 1).reshape(-1, hidden)))
    layer.self_attention.linear_proj.weight.copy_(weights["self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank])
    gate_up = [columns(weights[f"mlp.{x}_proj.weight"]) for x in ("gate", "up")]
    layer.mlp.linear_fc1.weight.copy_(torch.cat(gate_up))
    layer.mlp.linear_fc2.weight.copy_(weights["mlp.down_proj.weight"].chunk(tp, 1)[tp_rank])
    layer.input_layernorm.weight.copy_(weights["input_layernorm.weight"])
    layer.pre_mlp_layernorm.weight.copy_(weights["post_attention_layernorm.weight"])


@torch.no_grad()
def copy_weights(model: Any) -> None:
    """The saved model's weights into megatron-core's."""
    weights = reference.state_dict()
    for layer in model.decoder.layers:
        prefix = f"model.layers.{layer.layer_number - 1}."
        copy_layer(layer, {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)})
    if model.pre_process:
        model.embedding.word_embeddings.weight.copy_(columns(weights["model.embed_tokens.weight"]))
    if model.post_process:
        model.decoder.final_layernorm.weight.copy_(weights["model.norm.weight"])
        model.output_layer.weight.copy_(columns(weights["lm_head.weight"]))


model = build()
copy_weights(model)
parameters = list(model.parameters())
optimizer = adamw(parameters)
mask = torch.triu(torch.ones(SEQ, SEQ, dtype=torch.bool), 1)[None, None]
positions = torch.arange(SEQ).expand(ROWS // num_micro_batches, SEQ)
run = get_forward_backward_func()


def forward(data: Iterator[Tensor], part: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """One micro-batch, and what makes a loss of the result."""
    ids = next(data)

    def loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = per_token[:, :-1].mean()
        return mean, {"loss": mean.detach().clone()}

    return part(ids, positions, mask, labels=torch.roll(ids, -1, 1)), loss


def step(ids: Tensor) -> tuple[float, float]:
    """A batch in micro-batches; the norm counts what both tp ranks hold once."""
    found = run(
        forward_step_func=forward,
        data_iterator=iter(ids.chunk(num_micro_batches)),
        model=model,
        num_microbatches=num_micro_batches,
        seq_length=SEQ,
        micro_batch_size=ROWS // num_micro_batches,
        forward_only=False,
    )
    owned = [p for p in parameters if getattr(p, "tensor_model_parallel", False) or tp_rank == 0]
    loss = torch.stack([entry["loss"] for entry in found]).mean() if found else torch.zeros(())
    return update_together(parameters, optimizer, squares(owned), loss / tp)


measure(step)
