"""Checkpoints on disk. A directory holds the checkpoints of a run, each in a folder of its own:

    DIR/step_00000012/rank_R.safetensors   what rank R stands for: "parameters/NAME", "exp_avg/NAME", ..., one-dimensional portions
    DIR/step_00000012/rank_R.json          what is in it, written when it is complete
    DIR/step_00000012/checkpoint.json      the index, written last: step, optimizer, seeds, files with their digests, and of every
                                           tensor shape and pieces

A folder without its index is no checkpoint: a save that was killed leaves the older ones as they were. A second save of a step
goes into step_00000012-1. The index has a digest of itself, every file's is in the index: what was changed on disk is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from meshwright.plans.errors import InputError
from meshwright.runtime.weights import Piece

INDEX = "checkpoint.json"
SCHEMA = 2
FOLDER = re.compile(r"step_(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Facts:
    """What a checkpoint knows beside tensors.

    step        steps done
    skipped     those of them that did not update: overflows in fp16
    loss_scale  of fp16, 0 for none; good_steps: since it last changed
    optimizer   its name, None without
    seed        of dropout; with the step, all the random state that there is
    data        where the data goes on, as the trainer wrote it
    source, kind, config, tied    of the model, for export: where it comes from, config.json's text, {alias: name}
    """

    step: int
    optimizer: str | None
    seed: int = 0
    data: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    kind: str = ""
    config: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    skipped: int = 0
    loss_scale: float = 0.0
    good_steps: int = 0


@dataclass(frozen=True)
class Index:
    """A checkpoint's index. `files`: {name: sha256}; shapes and pieces by "kind/parameter"."""

    folder: Path
    facts: Facts
    files: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[str, list[Piece]]

    def check_files(self, names: Iterable[str]) -> None:
        """InputError for the first of these files that is not as it was written."""
        for name in names:
            path = self.folder / name
            if not path.is_file():
                raise InputError(f"{path}: is missing")
            if digest_of(path) != self.files[name]:
                raise InputError(f"{path}: is damaged: its digest is not the one in {INDEX}")


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folders(directory: Path) -> list[Path]:
    """Folders of checkpoints, complete or not, oldest first."""
    if not directory.is_dir():
        return []
    found = [(match, path) for path in directory.iterdir() if (match := FOLDER.fullmatch(path.name)) and path.is_dir()]
    return [path for match, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2] or 0)))]


def complete(directory: Path) -> list[Path]:
    """Folders with an index, oldest first; the directory itself if it is one."""
    if (directory / INDEX).is_file():
        return [directory]
    return [folder for folder in folders(directory) if (folder / INDEX).is_file()]


def new_folder(directory: Path, step: int) -> Path:
    """Makes the folder of a save; InputError when the directory holds something else."""
    if (directory.exists() and not directory.is_dir()) or (directory.is_dir() and any(directory.iterdir()) and not folders(directory)):
        raise InputError(f"{directory}: found something else, expected a new path or a directory of checkpoints")
    name = f"step_{step:08d}"
    for attempt in range(10**6):
        folder = directory / (f"{name}-{attempt}" if attempt else name)
        if (folder / INDEX).is_file():
            continue
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder
    raise InputError(f"{directory}: has too many checkpoints of step {step}")


def keep_last(directory: Path, count: int) -> None:
    """Removes all but the newest `count` checkpoints, and what killed saves left before them. An index goes first: what is half
    removed is no checkpoint."""
    kept = complete(directory)[-count:]
    all_folders = folders(directory)
    for folder in all_folders[: all_folders.index(kept[-1])] if kept else ():
        if folder not in kept:
            (folder / INDEX).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """The file appears with all of its content, or not at all."""
    work = path.with_name(f".{path.name}.writing")
    with work.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(work, path)


def write_part(folder: Path, rank: int, tensors: Mapping[str, object]) -> None:
    """Says that a rank's file is complete, and what is in it: {key: {"shape", "ranges", "portion"}}."""
    file = f"rank_{rank}.safetensors"
    digest = digest_of(folder / file) if tensors else None
    write_whole(folder / f"rank_{rank}.json", json.dumps({"file": file, "digest": digest, "tensors": tensors}))


def write_index(folder: Path, num_ranks: int, facts: Facts) -> None:
    """Joins all ranks' parts to the index: from here on the folder is a checkpoint."""
    files: dict[str, str] = {}
    tensors: dict[str, dict[str, object]] = {}
    for rank in range(num_ranks):
        part = json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8"))
        if part["digest"] is not None:
            files[part["file"]] = part["digest"]
        for key, entry in part["tensors"].items():
            pieces = tensors.setdefault(key, {"shape": entry["shape"], "pieces": []})["pieces"]
            assert isinstance(pieces, list)
            pieces.append({"file": part["file"], "ranges": entry["ranges"], "portion": entry["portion"]})
    body = {"schema": SCHEMA, "facts": asdict(facts), "files": files, "tensors": tensors}
    write_whole(folder / INDEX, json.dumps({"digest": _digest(body), "index": body}) + "\n")


def read_index(directory: Path) -> Index:
    """The index of the newest checkpoint in a directory, or of the folder of one. InputError when there is none, or it was changed."""
    found = complete(directory)
    if not found:
        raise InputError(f"{directory}: is no checkpoint; it has no {INDEX}")
    folder = found[-1]
    path = folder / INDEX
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        body = outer["index"]
        if outer["digest"] != _digest(body):
            raise InputError(f"{path}: is damaged: its digest is not the one in it")
        if body["schema"] != SCHEMA:
            raise InputError(f"{path}: is of schema {body['schema']}, this version reads {SCHEMA}")
        shapes = {key: tuple(entry["shape"]) for key, entry in body["tensors"].items()}
        pieces = {key: [_piece(folder, key, p) for p in entry["pieces"]] for key, entry in body["tensors"].items()}
        return Index(folder, Facts(**body["facts"]), body["files"], shapes, pieces)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is damaged: it is no index of a checkpoint: {error!r}") from None


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _piece(folder: Path, key: str, entry: Mapping[str, object]) -> Piece:
    ranges, portion = entry["ranges"], entry["portion"]
    assert isinstance(ranges, list) and isinstance(portion, list)
    runs = tuple(tuple((int(start), int(stop)) for start, stop in dim) for dim in ranges)
    return Piece(folder / str(entry["file"]), key, runs, (int(portion[0]), int(portion[1])))
