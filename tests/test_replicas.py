"""Copied layers: the graph is the one of a full trace; layers that must not be copied are not. tests/zoo/copies.py does so for the zoo."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from meshwright.compiler.capture import simplify
from meshwright.compiler.capture.alike import find_alike
from meshwright.compiler.capture.copies import Call, Copies
from meshwright.compiler.capture.trace import trace
from meshwright.compiler.capture.tripwire import Tripwire, tripwires
from meshwright.compiler.graph import Graph

DEPTH = 6
SMALL = {"vocab_size": 32, "use_cache": False}
LLAMA = {
    **SMALL, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": DEPTH, "num_attention_heads": 2, "num_key_value_heads": 1
}  # fmt: skip
GPT2 = {**SMALL, "n_embd": 16, "n_layer": DEPTH, "n_head": 2, "n_positions": 16}
SLIDING = ["sliding_attention" if i % 2 else "full_attention" for i in range(8)]

Count = list[int]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Count:
    """One entry for each layer that is copied."""
    found: Count = []
    original = Copies.copy

    def copy(self: Copies, number: int, *rest: object) -> Call:
        found.append(number)
        return original(self, number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Copies, "copy", copy)
    return found


def graphs(module: nn.Module, example: dict[str, object]) -> tuple[Graph, Graph]:
    """With copies and without."""
    return simplify(trace(module, example)), simplify(trace(module, example, replicate=False))


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "dropout": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), DEPTH - 3),
    "scaled by place": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True)), 0),
    "mixed windows": (
        lambda: Qwen2ForCausalLM(
            Qwen2Config(**{**LLAMA, "num_hidden_layers": 8}, layer_types=SLIDING, use_sliding_window=True, sliding_window=4)
        ),
        1 + 1,
    ),
    "router loss": (
        lambda: MixtralForCausalLM(
            MixtralConfig(**LLAMA, num_local_experts=2, num_experts_per_tok=1, output_router_logits=True)
        ),
        0,
    ),
    "encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(**SMALL, d_model=16, d_kv=8, d_ff=24, num_layers=6, num_heads=2, decoder_start_token_id=0)
        ),
        2 * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_copies_give_the_graph_of_a_full_trace(name: str, copied: Count) -> None:
    make, num_copies = MODELS[name]
    example = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "labels": torch.ones(2, 8, dtype=torch.int64)}
    found, whole = graphs(make().train(), example)
    assert found == whole
    assert len(copied) == num_copies
    assert len(whole.segments) > DEPTH


KEPT: list[torch.Tensor] = []
STATE: dict[str, object] = {}
COMMON = SimpleNamespace(counts={"calls": 0})


class Layer(nn.Module):
    """A residual linear layer with a number of its own, and something that a copy would get wrong."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number, self.what, self.seen, self.common = number, what, 0, COMMON

    def forward(self, x: torch.Tensor, scale: torch.Tensor, options: object = None) -> torch.Tensor:
        if self.what == "given back":
            return x.add_(self.linear(x) * scale)
        x = x + self.linear(x) * scale
        if self.what == "number" and self.number < 2:
            x = x * 2
        if self.what == "attribute":
            self.seen += 1
        if self.what == "object of all":
            self.common.counts["calls"] += 1
        if self.what == "escape":
            KEPT.append(x.mean())
        if self.what == "outside":
            x = x * STATE["tensor"]
        if self.what == "state" and next(STATE["cycle"]):  # type: ignore[call-overload]
            x = x.tanh()
        if self.what == "constant":
            x = x * torch.tensor([1.0, 2.0, 3.0, 4.0])
        if self.what == "in place":
            scale.add_(1)
        return x


class Model(nn.Module):
    """Layers between an input and a loss."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer(number, what) for number in range(DEPTH))
        self.what = what
        if what == "frozen":
            self.layers[4].requires_grad_(False)
        if what == "hook":
            self.layers[3].linear.register_forward_hook(lambda module, args, result: result * 2)
        if what == "tied":
            self.layers[2].linear.weight = self.layers[1].linear.weight
        if what == "width":
            self.layers[5].linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        KEPT.clear()
        x = self.first(x)
        STATE.update(cycle=cycle([False, True, False]), tensor=x.sum())
        scale = torch.ones(4)
        for number, layer in enumerate(self.layers):
            x = layer(x, scale * 2 if self.what == "argument" and number == 3 else scale, object() if self.what == "object" else None)
        return nn.functional.mse_loss(x + sum(KEPT), labels)


@pytest.mark.parametrize(
    ("what", "num_copies"),
    [
        ("nothing", DEPTH - 3), ("in place", DEPTH - 3), ("argument", DEPTH - 3), ("tied", 1), ("width", DEPTH - 4), ("frozen", DEPTH - 4),
        ("number", 0), ("attribute", 0), ("object", 0), ("object of all", 0), ("given back", 0),
        ("hook", DEPTH - 4),
    ],
)  # fmt: skip
def test_layers_that_are_unlike_are_traced(what: str, num_copies: int, copied: Count) -> None:
    found, whole = graphs(Model(what), {"x": torch.zeros(2, 4), "labels": torch.zeros(2, 4)})
    assert found == whole
    assert len(copied) == num_copies


@pytest.mark.parametrize("what", ["escape", "outside", "state", "constant"])
def test_a_trace_with_copies_that_is_not_sound_is_done_again(what: str) -> None:
    found, whole = graphs(Model(what), {"x": torch.zeros(2, 4), "labels": torch.zeros(2, 4)})
    assert found == whole


def test_a_tripwire_tells_every_use() -> None:
    layer = Layer(3, "nothing")
    uses: list[Callable[[object], object]] = [
        lambda n: n + 1, lambda n: 1 + n, lambda n: n == 3, lambda n: n < 4, lambda n: bool(n), lambda n: [0] * n, lambda n: 2**n,
        lambda n: "abcd"[n], lambda n: {3: "x"}[n], lambda n: f"{n}", lambda n: str(n), lambda n: {n}, lambda n: range(n),
        lambda n: -n, lambda n: n.bit_length(), lambda n: float(n), lambda n: n % 2, lambda n: max(n, 2), lambda n: torch.zeros(4)[n],
    ]  # fmt: skip
    for use in uses:
        with tripwires([(layer, "number")]) as used:
            result = use(layer.number)
        assert used and str(result) == str(use(3))
    with tripwires([(layer, "number")]) as used:
        assert isinstance(layer.number, int) and layer.number is not None and type(layer.number) is Tripwire
    assert not used and layer.number == 3 and type(layer.number) is int


def test_only_layers_with_equals_are_alike() -> None:
    model = nn.Sequential(*(Model("nothing").layers[:3]), nn.ModuleList(nn.Linear(2, 2) for _ in range(4)))
    assert {id(layer.module) for layer in find_alike(model).values()} == {id(m) for m in model[3]}
