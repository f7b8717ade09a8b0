"""Every form of MODEL, and what is said about bad ones."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config

from meshwright.compiler.capture import build_model, capture, find_source
from meshwright.compiler.capture.source import _classify
from meshwright.plans.errors import InputError

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "architectures": ["LlamaForCausalLM"],
}

FACTORY = """
import torch
from torch import nn

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 5)
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, x, labels):
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale.sum()
        return nn.functional.cross_entropy(self.out(x), labels)

def make():
    return Tower(), {"x": torch.zeros(2, 8), "labels": torch.zeros(2, dtype=torch.int64)}

def bare():
    return Tower()

def wrong():
    return 3

NUMBER = 3
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    LlamaConfig(**TINY).to_json_file(path)
    return path


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "tower_factory.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tower_factory", raising=False)
    return "tower_factory"


def test_config_file_and_directory(config_file: Path) -> None:
    captured = capture(str(config_file), seq=8, micro_batch=1)
    assert (captured.source.kind, captured.source.task, captured.source.has_weights) == ("config", "causal-lm", False)
    directory = capture(str(config_file.parent), seq=8, micro_batch=1)
    assert directory.source == captured.source and str(directory.graph) == str(captured.graph)  # no weights: its config
    assert json.loads(captured.config_json or "")["architectures"] == ["LlamaForCausalLM"]


def test_skeleton_captures_as_the_real_model_does(config_file: Path) -> None:
    real = LlamaForCausalLM(LlamaConfig(**TINY))
    skeleton = capture(str(config_file), seq=8, micro_batch=2)
    assert str(skeleton.graph) == str(capture(real, seq=8, micro_batch=2).graph)
    assert skeleton.signature == capture(real, seq=8, micro_batch=2).signature
    for path, buffer in skeleton.buffers.items():
        torch.testing.assert_close(buffer, real.get_buffer(path))


def test_model_without_weights_is_initialised_from_the_seed(config_file: Path) -> None:
    source = find_source(str(config_file))
    one, same, other = (build_model(source, seed).state_dict() for seed in (0, 0, 1))
    torch.manual_seed(0)
    direct = LlamaForCausalLM(LlamaConfig(**TINY)).state_dict()
    assert all(torch.equal(one[k], same[k]) and torch.equal(one[k], direct[k]) for k in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_directory_with_weights(tmp_path: Path) -> None:
    torch.manual_seed(7)
    saved = LlamaForCausalLM(LlamaConfig(**TINY))
    saved.save_pretrained(tmp_path)
    source = find_source(str(tmp_path))
    assert source.has_weights
    loaded = build_model(source, seed=0)
    assert loaded.training and all(torch.equal(p, saved.state_dict()[k]) for k, p in loaded.state_dict().items())


def test_factory(factory: str) -> None:
    captured = capture(f"{factory}:make", seq=8, micro_batch=4)
    assert captured.source.kind == "factory" and captured.config_json is None
    assert [(v.name, v.shape) for v in captured.graph.inputs] == [("x", (4, 8)), ("labels", (4,))]
    expected = [("layers.0", "layers"), ("layers.1", "layers.b"), ("layers.2", "layers.b"), ("head", "head")]
    assert [(s.name, s.kind) for s in captured.graph.segments] == expected
    assert torch.equal(captured.buffers["scale"], torch.tensor([2.0, 3.0]))
    given = {"x": torch.zeros(2, 8), "labels": torch.zeros(2, dtype=torch.int64)}
    assert capture(f"{factory}:bare", given, seq=8, micro_batch=4).graph.inputs == captured.graph.inputs
    assert isinstance(build_model(captured.source, 0), nn.Module)


def test_task_and_missing_start_token(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=97)
    config.to_json_file(path)
    assert find_source(str(path)).task == "seq2seq-lm"
    assert find_source(str(path), task="sequence-classification").task == "sequence-classification"
    assert capture(str(path), seq=8, micro_batch=1).signature["inputs"][1]["name"] == "labels"  # type: ignore[index]


def bad(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_bad_models_are_one_clear_line(tmp_path: Path, config_file: Path, factory: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = {
        "nowhere/config.json": "no such file",
        "/nowhere/at/all": "no such file",
        str(empty): "no config.json",
        bad(tmp_path / "notes.txt", "hello"): "expected a config.json or a .gguf",
        bad(tmp_path / "broken.json", "{"): "not JSON",
        bad(tmp_path / "nameless.json", {"hidden_size": 3}): "no `model_type`",
        bad(tmp_path / "unknown.json", {"model_type": "zebra"}): "model_type 'zebra'",
        bad(tmp_path / "noheads.json", {"model_type": "llama", "num_attention_heads": 0}): "transformers cannot",
        bad(tmp_path / "fake.gguf", "not gguf"): "transformers cannot load",
        "someone/unknown-model": "hub id",
        "no_such_package.module:make": "cannot import",
        f"{factory}:absent": "has no 'absent'",
        f"{factory}:NUMBER": "not a callable",
        f"{factory}:wrong": "found a int",
        f"{factory}:bare": "example inputs are needed",
    }
    for text, expected in cases.items():
        with pytest.raises(InputError) as caught:
            capture(text, seq=8, micro_batch=1)
        assert expected in str(caught.value) and "\n" not in str(caught.value), (text, str(caught.value))
    with pytest.raises(InputError, match="has no masked-lm model; tasks it has: causal-lm"):
        find_source(str(config_file), task="masked-lm")
    with pytest.raises(InputError, match="expected one of causal-lm"):
        find_source(str(config_file), task="poetry")
    with pytest.raises(InputError, match="expected one of sdpa, eager"):
        find_source(str(config_file), attention="flash")


def test_kinds_of_text(config_file: Path) -> None:
    assert _classify("org/model")[0] == "hub" and _classify("gpt2")[0] == "hub"
    assert _classify("package.module:make")[0] == "factory"
    assert _classify(str(config_file))[0] == "config"


def test_eager_attention(config_file: Path) -> None:
    graph = capture(str(config_file), seq=8, micro_batch=1, attention="eager").graph
    assert not any("scaled_dot_product" in op.target for op in graph.ops)
    assert any(op.target == "aten.softmax.int" for op in graph.ops)


def test_a_large_model_needs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8}
    LlamaConfig(**sizes, num_hidden_layers=12, vocab_size=128256).to_json_file(path)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.perf_counter()
    captured = capture(str(path), seq=4096, micro_batch=1)
    assert time.perf_counter() - start_s < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 500_000
    assert [s.kind for s in captured.graph.segments].count("layer") == 12
