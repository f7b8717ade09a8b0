"""Training data: what a batch holds, that only seed and step decide it, and what bad data is told."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.data import Batches, permuted
from meshwright.plans.errors import InputError
from meshwright.tokens import Tokens, TokenSource, documents, open_tokens, prepare

CAUSAL = {"input_ids": (1, 8), "labels": (1, 8)}


def batches(ids: np.ndarray, task: str = "causal-lm", seed: int = 0, **options: object) -> Batches:
    settings: dict[str, object] = {"inputs": CAUSAL, "global_batch": 4, "vocab_size": 100, **options}
    return Batches(Tokens(ids), task, seed=seed, **settings)


def test_every_sequence_comes_once_per_epoch() -> None:
    data = batches(np.arange(80, dtype=np.int32))
    rows = torch.cat([data.batch(step)["input_ids"] for step in range(5)])
    for epoch in (rows[:10], rows[10:]):
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 80, 8))
    assert rows[:10].tolist() != rows[10:].tolist()
    assert torch.equal(rows[:, 1:] - rows[:, :-1], torch.ones_like(rows[:, 1:]))


def test_order_depends_on_seed_and_step_alone() -> None:
    ids = np.arange(160, dtype=np.int32)
    first = batches(ids).batch(3)
    assert torch.equal(first["input_ids"], batches(ids).batch(3)["input_ids"])
    assert not torch.equal(first["input_ids"], batches(ids, seed=1).batch(3)["input_ids"])
    assert first["input_ids"].dtype == first["labels"].dtype == torch.int64
    assert torch.equal(first["input_ids"], first["labels"])
    assert first["input_ids"].data_ptr() != first["labels"].data_ptr()


def test_rows_can_be_read_alone() -> None:
    for task in ("causal-lm", "masked-lm"):
        data = batches(np.random.default_rng(0).integers(5, 90, 800).astype(np.int32), task, mask_token=3, global_batch=6)
        whole, part = data.batch(2), data.batch(2, range(2, 5))
        assert all(torch.equal(part[name], whole[name][2:5]) for name in whole)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 65, 1000])
def test_an_epoch_is_a_permutation(length: int) -> None:
    orders = [[permuted(i, length, (seed, 0, epoch)) for i in range(length)] for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(length)) for order in orders)
    if length >= 64:
        assert len({tuple(order) for order in orders}) == 3
        stay = sum(i == j for i, j in enumerate(orders[0]))
        near = sum(abs(a - b) == 1 for a, b in pairwise(orders[0]))
        assert stay <= 6 and near <= 12, "as few places and neighbours stay as by chance"


def test_the_order_of_a_corpus_needs_no_memory() -> None:
    places = {permuted(i, 10**12, (0, 0, 0)) for i in range(2000)}
    assert len(places) == 2000 and max(places) < 10**12
    assert abs(sum(places) / 2000 / 10**12 - 0.5) < 0.05


def test_fewer_sequences_than_a_batch() -> None:
    assert batches(np.arange(17, dtype=np.int32)).batch(0)["input_ids"].shape == (4, 8)


def test_masked_language_modelling() -> None:
    ids = np.random.default_rng(0).integers(5, 100, 64 * 512).astype(np.int32)
    inputs = {name: (1, 512) for name in ("input_ids", "labels", "attention_mask", "token_type_ids")}
    data = batches(ids, "masked-lm", inputs=inputs, global_batch=64, mask_token=3)
    batch = data.batch(0)
    target = batch["labels"] != -100
    original = torch.where(target, batch["labels"], batch["input_ids"])
    assert sorted(original[:, 0].tolist()) == sorted(ids[::512].tolist())
    assert abs(target.float().mean().item() - 0.15) < 0.01
    shown = batch["input_ids"][target]
    assert abs((shown == 3).float().mean().item() - 0.8) < 0.02
    assert abs((shown == batch["labels"][target]).float().mean().item() - 0.1) < 0.02
    assert torch.equal(batch["input_ids"], data.batch(0)["input_ids"])
    assert batch["attention_mask"].min() == 1 and batch["token_type_ids"].max() == 0


def test_sequence_to_sequence() -> None:
    data = batches(np.arange(40), "seq2seq-lm", inputs={"input_ids": (1, 6), "labels": (1, 4)})
    batch = data.batch(0)
    assert batch["input_ids"].shape == (4, 6) and batch["labels"].shape == (4, 4)
    assert torch.equal(batch["labels"][:, 0], batch["input_ids"][:, -1] + 1)


def test_ids_are_read_from_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(50, dtype=np.uint16))
    source = TokenSource(tmp_path / "ids.npy", "nowhere", "factory", vocab_size=50)
    prepare(source)
    assert isinstance(open_tokens(source).ids, np.memmap)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1, 2, 60, 3]), "token id 60 at position 2 is outside the model's vocabulary, 0 to 49"),
        (np.array([1, -5]), "token id -5 at position 1"),
        (np.zeros((2, 2), dtype=np.int32), r"int32 with shape \(2, 2\); token ids are a 1-D array of integers"),
        (np.zeros(4, dtype=np.float32), "an array of float32"),
    ],
)
def test_bad_ids(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(InputError, match=message):
        prepare(TokenSource(tmp_path / "ids.npy", "nowhere", "factory", vocab_size=50))


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        TokenSource(tmp_path / "absent.txt", "nowhere", "directory")
    (tmp_path / "broken.npy").write_bytes(b"not an array")
    with pytest.raises(InputError, match=r"not a readable \.npy"):
        open_tokens(TokenSource(tmp_path / "broken.npy", "nowhere", "factory"))
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"words": 1}\n')
    with pytest.raises(InputError, match="line 2 has no text"):
        list(documents(tmp_path / "broken.jsonl"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="not UTF-8 text"):
        list(next(documents(tmp_path / "latin.txt")))


def test_bad_requests() -> None:
    with pytest.raises(InputError, match="has 5 tokens; one sequence of this plan needs 8"):
        batches(np.arange(5))
    with pytest.raises(InputError, match="--mask-token"):
        batches(np.arange(50), "masked-lm")
    with pytest.raises(InputError, match="the plan's task is sequence-classification"):
        batches(np.arange(50), "sequence-classification")
    with pytest.raises(InputError, match="the model takes pixel_values"):
        batches(np.arange(50), inputs={**CAUSAL, "pixel_values": (1, 3)})


def test_text_is_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = word_tokenizer(tmp_path / "model")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.txt").write_text("cat sat\n")
    (tmp_path / "text" / "a.txt").write_text("the cat\nsat\n")
    (tmp_path / "text" / "notes.md").write_text("mat")
    source = TokenSource(tmp_path / "text", str(model), "directory", vocab_size=10)
    prepare(source)
    tokens = open_tokens(source)
    assert tokens.ids.tolist() == [2, 3, 4, 0, 3, 4, 0] and tokens.ids.dtype == np.int32
    assert (tokens.eos, tokens.mask) == (0, 1)
    written = next((tmp_path / "cache" / "meshwright").glob("*.npy")).stat().st_mtime_ns
    prepare(source)
    assert next((tmp_path / "cache" / "meshwright").glob("*.npy")).stat().st_mtime_ns == written
    assert len(list((tmp_path / "cache" / "meshwright").iterdir())) == 2

    lines = tmp_path / "text.jsonl"
    lines.write_text("\n".join(json.dumps({"text": t}) for t in ("the", "mat mat")))
    source = TokenSource(lines, str(model), "directory", vocab_size=5)
    with pytest.raises(InputError, match="token id 5 at position 2"):
        prepare(source)


def test_text_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("the cat")
    (tmp_path / "model").mkdir()
    for model, kind in (("package.module:factory", "factory"), (str(tmp_path / "model"), "directory")):
        with pytest.raises(InputError, match=r"give a \.npy of token ids"):
            prepare(TokenSource(tmp_path / "a.txt", model, kind))


def word_tokenizer(folder: Path) -> Path:
    """A tokenizer of five words and two special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "<mask>": 1, "the": 2, "cat": 3, "sat": 4, "mat": 5}
    inner = Tokenizer(models.WordLevel(words, unk_token="<mask>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", mask_token="<mask>").save_pretrained(folder)
    return folder
