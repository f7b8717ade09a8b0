"""Parity with a single process: a tiny model, a plan, real ranks.

    model = build("llama", layers=5)                  a random model, saved with its weights
    compare(model, mesh="pp=2,tp=2", micro_batch=1)   compiles, runs the ranks, asserts the project's tolerances

Gates (fp32): first loss 2e-6, every gradient 1e-5 relative, first gradient norm 5e-6 relative, losses of 8 AdamW steps 2e-5.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers

from meshwright.plan import compile
from meshwright.runtime.engine import Engine
from meshwright.tests.ranks import run_ranks

VOCABULARY = 256
OPTIMIZER = {"name": "adamw", "lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": 1.0}
STEPS = 8
NOTHING = 1e-4
"""Share of the largest gradient below which one is rounding: a key bias, say, has none, since softmax does not see shifts."""

SMALL = {"use_cache": False, "vocab_size": VOCABULARY}
GROUPED = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SMALL, **GROUPED, "intermediate_size": 176}),
    "nine-heads": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**SMALL, "hidden_size": 72, "intermediate_size": 176, "num_attention_heads": 9, "num_key_value_heads": 3,
         "tie_word_embeddings": True, "max_position_embeddings": 64},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"use_cache": False, "vocab_size": VOCABULARY + 1, "n_embd": 64, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
         "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {**SMALL, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0,
         "pad_token_id": 0},
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**SMALL, **GROUPED, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}  # fmt: skip
LAYERS = {"gpt2": "n_layer", "t5": "num_layers"}


@dataclass(frozen=True)
class Tiny:
    """A saved model. Every comparison loads it anew."""

    name: str
    directory: str
    seq: int = 32

    def load(self) -> torch.nn.Module:
        loader = getattr(transformers, CONFIGS[self.name][1])
        model: torch.nn.Module = loader.from_pretrained(self.directory, attn_implementation="sdpa").train()
        return model


def build(name: str, layers: int = 4, **changes: object) -> Tiny:
    """A tiny random model in a directory that transformers loads."""
    config_class, model_class, fields = CONFIGS[name]
    config = getattr(transformers, config_class)(**{**fields, LAYERS.get(name, "num_hidden_layers"): layers, **changes})
    config.architectures = [model_class]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config)
    directory = tempfile.mkdtemp(prefix=f"tiny-{name}-")
    model.save_pretrained(directory)
    return Tiny(name, directory)


@dataclass
class Trace:
    """What a run computed: loss and norm of every step, gradients of the first."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def batches(rows: int, seq: int, steps: int, vocabulary: int = VOCABULARY) -> list[dict[str, torch.Tensor]]:
    """Global batches; -100 covers rows unevenly, one row but for its last label."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for _ in range(steps):
        ids = torch.randint(1, vocabulary, (rows, seq), generator=generator)
        labels = torch.randint(1, vocabulary, (rows, seq), generator=generator)
        for row in range(rows):
            labels[row, : (row * 11) % seq] = -100
        labels[rows - 1, :-1] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def single(tiny: Tiny, data: list[dict[str, torch.Tensor]]) -> Trace:
    """The model itself, in one process, on whole global batches."""
    model = tiny.load()
    trace = Trace()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if step == 0:
            trace.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        trace.losses.append(float(loss.detach()))
        optimizer.step()
    return trace


def run_engine(plan_dir: str, data: list[dict[str, torch.Tensor]]) -> dict[str, object]:
    """One rank; the fields of its Trace."""
    engine = Engine(plan_dir, optimizer=OPTIMIZER)
    trace = Trace()
    metrics = engine.forward_backward(data[0])
    trace.gradients = engine.gradients()
    for batch in data:
        metrics = engine.train_step(batch)
        trace.losses.append(metrics.loss)
        trace.norms.append(metrics.grad_norm)
    return asdict(trace)


def compare(tiny: Tiny, mesh: str, rows: int = 8, steps: int = STEPS, **options: object) -> str:
    """Compiles, runs, asserts; gives the plan's YAML text."""
    plan = compile(tiny.directory, mesh=mesh, seq=tiny.seq, global_batch=rows, **options)
    data = batches(rows, tiny.seq, steps)
    expected = single(tiny, data)
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        plan.save(Path(folder) / "plan")
        found = run_ranks(plan.document.mesh.world_size, run_engine, str(Path(folder) / "plan"), data, timeout=300)
        text = (Path(folder) / "plan" / "plan.yaml").read_text()
    check(expected, [Trace(**fields) for fields in found])
    return text


def check(expected: Trace, found: list[Trace]) -> None:
    """The gates, and that all ranks report the same."""
    first = found[0]
    for other in found[1:]:
        assert other.losses == first.losses and other.norms == first.norms, "ranks report different metrics"
    assert abs(first.losses[0] - expected.losses[0]) <= 2e-6, (first.losses[0], expected.losses[0])
    assert set(first.gradients) == set(expected.gradients), set(first.gradients) ^ set(expected.gradients)
    nothing = NOTHING * max(float(g.double().norm()) for g in expected.gradients.values())
    errors = {n: relative(first.gradients[n], g, nothing) for n, g in expected.gradients.items()}
    worst = max(errors, key=lambda n: errors[n])
    assert errors[worst] <= 1e-5, f"gradient of {worst} is off by {errors[worst]:.2e}"
    assert abs(first.norms[0] - expected.norms[0]) <= 5e-6 * expected.norms[0], (first.norms[0], expected.norms[0])
    apart = max(abs(a - b) for a, b in zip(first.losses, expected.losses, strict=True))
    assert apart <= 2e-5, f"losses of {len(first.losses)} steps are {apart:.2e} apart"


def relative(found: torch.Tensor, expected: torch.Tensor, nothing: float) -> float:
    """Frobenius norm of the difference over that of the expected, which counts as `nothing` at least."""
    return float((found.double() - expected.double()).norm()) / max(float(expected.double().norm()), nothing)
