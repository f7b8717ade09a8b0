"""`meshwright export CHECKPOINT_DIR -o HF_DIR`: a checkpoint as a directory that transformers loads, bit for bit.

    model.safetensors                       the parameters under the model's own names, FP32, tied ones once; or, above the shard
    model-00001-of-00003.safetensors, ...   size, several files and model.safetensors.index.json
    config.json                             the model's, with its dtype set to what is stored
    tokenizer files, generation_config.json as they are beside the model, if it came from a directory

Needs neither the plan nor a GPU nor other processes. Of the model one file's tensors are in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

from meshwright.plans.errors import InputError
from meshwright.runtime.buckets import ELEMENT_BYTES
from meshwright.runtime.checkpoint_files import Index, read_index
from meshwright.runtime.dcp import parameter_shapes, read_metadata, read_shards
from meshwright.runtime.shards import Shards
from meshwright.runtime.weights import INDEX_FILE, WHOLE_FILE

SHARD_BYTES = 5 * 10**9
"""What transformers' save_pretrained takes by default, per file."""
BESIDE = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
          "chat_template*", "generation_config.json", "preprocessor_config.json", "processor_config.json")  # fmt: skip
"""Files of a model directory that are not weights."""


def export(checkpoint: Path, target: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Writes the directory, whole or not at all; the number of parameters. InputError for what is no sound checkpoint, or a model that
    transformers does not load from a configuration."""
    index = read_index(checkpoint)
    if not index.facts.config:
        raise InputError(f"{index.folder}: is of a model that came without a config.json, so transformers cannot load it")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise InputError(f"{target}: found something else, expected a new path or an empty directory")
    index.check_files(sorted(index.files))
    metadata = read_metadata(index)
    shapes = parameter_shapes(index, metadata)
    work = target.absolute().with_name(f".{target.name}.writing")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    write_weights(work, index, metadata, shapes, shard_bytes)
    config = {**json.loads(index.facts.config), "dtype": "float32"}
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_beside(Path(index.facts.source), work)
    if target.exists():
        target.rmdir()
    work.rename(target)
    return sum(prod(shape) for shape in shapes.values())


def write_weights(work: Path, index: Index, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], shard_bytes: int) -> None:
    """The safetensors files, and their index when they are several."""
    sizes = {name: ELEMENT_BYTES * prod(shape) for name, shape in shapes.items()}
    files = list(cut(list(shapes), sizes, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = WHOLE_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {name: torch.empty(shapes[name]) for name in names}
        read_shards(index, metadata, {name: Shards.whole(tensor) for name, tensor in tensors.items()})
        save_file(tensors, work / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
        del tensors
    if len(files) > 1:
        text = json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}, indent=2)
        (work / INDEX_FILE).write_text(text + "\n", encoding="utf-8")


def cut(names: Sequence[str], sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names in order, in runs of at most `limit` bytes (or of one)."""
    run: list[str] = []
    total = 0
    for name in names:
        if run and total + sizes[name] > limit:
            yield run
            run, total = [], 0
        run.append(name)
        total += sizes[name]
    yield run


def copy_beside(source: Path, work: Path) -> None:
    """The model directory's other files."""
    if source.is_dir():
        for path in sorted({path for pattern in BESIDE for path in source.glob(pattern) if path.is_file()}):
            shutil.copy(path, work / path.name)
