"""Token ids from what a user has: a text file or a directory of them, a .jsonl with `text`, a 1-D .npy of ids.

Text is tokenised once per machine, by the process that calls `prepare`, into an .npy of int32 ids under the user's cache
directory (XDG_CACHE_HOME), which every process then maps into memory with `open_tokens`. Its name is a digest of the
files (path, size, time of change) and of the tokenizer's files, so that a change of either makes a new one. The
tokenizer's end-of-text token, when it has one, stands after every document: a text file, or a line of a .jsonl.

    prepare       tokenise if need be, and check every id against the vocabulary
    open_tokens   the ids, memory-mapped
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from meshwright.plans.errors import InputError

Ids = npt.NDArray[np.integer]
PIECE_CHARS = 1 << 20
SCAN_IDS = 1 << 24


@dataclass(frozen=True)
class TokenSource:
    """Where ids come from.

    data        a .npy, .jsonl, text file or directory of text files
    model       the plan's `model.source`
    kind        the plan's `model.kind`
    vocab_size  rows of the model's embedding; None when it is not known
    """

    data: Path
    model: str
    kind: str
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not self.data.exists():
            raise InputError(f"--data {self.data}: no such file or directory")

    @property
    def is_ids(self) -> bool:
        return self.data.suffix == ".npy"


@dataclass(frozen=True)
class Tokens:
    """A stream of token ids. `eos` and `mask` are the tokenizer's, None for a .npy."""

    ids: Ids
    eos: int | None = None
    mask: int | None = None


def prepare(source: TokenSource) -> None:
    """Tokenises unless that is done, and checks the ids. Call it in one process per machine, before `open_tokens`."""
    if not source.is_ids and not cache_path(source).exists():
        _tokenize(source, cache_path(source))
    check_ids(open_tokens(source).ids, source)


def open_tokens(source: TokenSource) -> Tokens:
    """The ids, memory-mapped. InputError for a .npy that is no 1-D array of integers."""
    if not source.is_ids:
        path = cache_path(source)
        special = json.loads(path.with_suffix(".json").read_text())
        return Tokens(np.load(path, mmap_mode="r"), special["eos"], special["mask"])
    try:
        ids = np.load(source.data, mmap_mode="r", allow_pickle=False)
    except ValueError as problem:
        raise InputError(f"--data {source.data}: not a readable .npy file ({problem})") from problem
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(
            f"--data {source.data}: an array of {ids.dtype} with shape {ids.shape}; token ids are a 1-D array of integers"
        )
    return Tokens(ids)


def check_ids(ids: Ids, source: TokenSource) -> None:
    """InputError naming the first id that the model's embedding has no row for."""
    limit = source.vocab_size if source.vocab_size is not None else np.iinfo(np.int64).max
    for start in range(0, len(ids), SCAN_IDS):
        part = np.asarray(ids[start : start + SCAN_IDS])
        bad = np.flatnonzero((part < 0) | (part >= limit))
        if bad.size:
            where = start + int(bad[0])
            raise InputError(
                f"--data {source.data}: token id {int(ids[where])} at position {where} is outside the model's vocabulary, "
                f"0 to {limit - 1}"
            )


def cache_path(source: TokenSource) -> Path:
    """Where the ids of this text under this tokenizer are kept."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    facts = [source.model, *map(_fingerprint, text_files(source.data)), *map(_fingerprint, _tokenizer_files(source))]
    return base / "meshwright" / f"tokens-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.npy"


def text_files(data: Path) -> list[Path]:
    """The text files of `data` in order of their path: itself, or a directory's .txt files (all its files when none is)."""
    if data.is_file():
        return [data]
    files = sorted(f for f in data.rglob("*") if f.is_file() and not f.name.startswith("."))
    texts = [f for f in files if f.suffix == ".txt"] or files
    if not texts:
        raise InputError(f"--data {data}: the directory has no files; it would have .txt files")
    return texts


def documents(data: Path) -> Iterator[Iterator[str]]:
    """Documents, each as an iterator of pieces that end at a line's end."""
    for file in text_files(data):
        if file.suffix == ".jsonl":
            for number, line in enumerate(_lines(file), start=1):
                if line.strip():
                    yield iter((_text_of(line, file, number),))
        else:
            yield _pieces(file)


def load_tokenizer(source: TokenSource) -> PreTrainedTokenizerBase:
    """The model's own tokenizer; InputError when it has none."""
    path = Path(source.model)
    if source.kind == "factory":
        raise InputError(
            f"--data {source.data}: text needs a tokenizer, and a model built by {source.model} names none; "
            "give a .npy of token ids"
        )
    try:
        if source.kind == "gguf":
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        return AutoTokenizer.from_pretrained(str(path.parent if path.is_file() else source.model))
    except (OSError, ValueError, KeyError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise InputError(
            f"--data {source.data}: text needs a tokenizer, and none was found with the model {source.model} ({reason}); "
            "give a .npy of token ids"
        ) from problem


def _tokenize(source: TokenSource, path: Path) -> None:
    """Writes `path` (ids) and its .json (special ids); the ids appear last and whole."""
    tokenizer = load_tokenizer(source)
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    path.parent.mkdir(parents=True, exist_ok=True)
    with Console(stderr=True).status(f"tokenising {source.data}"), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        raw = Path(folder) / "raw"
        with raw.open("wb") as out:
            for document in documents(source.data):
                for piece in document:
                    ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
                    np.asarray(ids, dtype=np.int32).tofile(out)
                if eos is not None:
                    np.asarray([eos], dtype=np.int32).tofile(out)
        whole = Path(folder) / "ids.npy"
        np.save(whole, np.fromfile(raw, dtype=np.int32))
        special = Path(folder) / "special.json"
        special.write_text(json.dumps({"eos": eos, "mask": tokenizer.mask_token_id}))
        special.replace(path.with_suffix(".json"))
        whole.replace(path)


def _pieces(file: Path) -> Iterator[str]:
    held: list[str] = []
    size = 0
    for line in _lines(file):
        held.append(line)
        size += len(line)
        if size >= PIECE_CHARS:
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as lines:
            yield from lines
    except UnicodeDecodeError as problem:
        raise InputError(f"--data {file}: not UTF-8 text (byte {problem.start}: {problem.reason})") from problem


def _text_of(line: str, file: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as problem:
        raise InputError(f"--data {file}: line {number} is not JSON ({problem})") from problem
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise InputError(f'--data {file}: line {number} has no text; a line is {{"text": "..."}}')
    return str(record["text"])


def _fingerprint(file: Path) -> tuple[str, int, int]:
    facts = file.stat()
    return str(file.resolve()), facts.st_size, facts.st_mtime_ns


def _tokenizer_files(source: TokenSource) -> list[Path]:
    path = Path(source.model)
    if path.is_file() and source.kind == "gguf":
        return [path]
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        return []
    names = ("vocab", "merges", "spiece", "tokenizer", "special_tokens", "added_tokens")
    return sorted(f for f in folder.iterdir() if f.is_file() and f.name.startswith(names))
