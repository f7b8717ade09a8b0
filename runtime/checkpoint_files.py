"""Checkpoints on disk. A directory has the checkpoints of a run, each a folder in the format of torch.distributed.checkpoint (DCP):

    DIR/step_00000012/__R_0.distcp        what rank R stands for
    DIR/step_00000012/.metadata           DCP's: of every tensor shape and boxes, and where each box is
    DIR/step_00000012/meshwright.json     the index: what is known beside tensors, and the SHA-256 of every other file
    DIR/.step_00000012.1f0e2d3c.partial   what is being written, or removed

A save writes into a folder of the last kind. When every rank's file and the metadata are on the disk the index is added, and the
folder gets its name: a save that is killed leaves the older checkpoints as they were, and the next one removes what it left. A second
save of a step becomes step_00000012-1. The index has a digest of itself: what was changed on disk is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from uuid import uuid4

from meshwright.plans.errors import InputError

INDEX = "meshwright.json"
SCHEMA = 3
FOLDER = re.compile(r"step_(\d+)(?:-(\d+))?")
PARTIAL = re.compile(r"\.step_\d+(?:-\d+)?\.[0-9a-f]{8}\.partial")


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
    """A checkpoint's index. `files`: {name: sha256}."""

    folder: Path
    facts: Facts
    files: Mapping[str, str]

    def check_files(self, names: Iterable[str]) -> None:
        """InputError for the first of these files that is not as it was written."""
        for name in names:
            path = self.folder / name
            if not path.is_file():
                raise InputError(f"{path}: is missing")
            with path.open("rb") as file:
                self._check(name, hashlib.file_digest(file, "sha256").hexdigest())

    def read_file(self, name: str) -> bytes:
        """What a file has; InputError when that is not what was written."""
        path = self.folder / name
        if not path.is_file():
            raise InputError(f"{path}: is missing")
        content = path.read_bytes()
        self._check(name, hashlib.sha256(content).hexdigest())
        return content

    def _check(self, name: str, digest: str) -> None:
        if digest != self.files.get(name):
            raise InputError(f"{self.folder / name}: is damaged: its digest is not the one in {INDEX}")


def complete(directory: Path) -> list[Path]:
    """Folders of checkpoints, oldest first; the directory itself if it is one."""
    return [directory] if (directory / INDEX).is_file() else inside(directory)


def inside(directory: Path) -> list[Path]:
    """Folders of checkpoints in a directory, oldest first."""
    if not directory.is_dir():
        return []
    found = [(match, path) for path in directory.iterdir() if (match := FOLDER.fullmatch(path.name)) and (path / INDEX).is_file()]
    return [path for match, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2] or 0)))]


def partial(directory: Path) -> list[Path]:
    """What saves that were killed left in a directory."""
    return [path for path in directory.iterdir() if PARTIAL.fullmatch(path.name)] if directory.is_dir() else []


def begin(directory: Path, step: int) -> Path:
    """Makes the folder that a save writes into; InputError when the directory has something else in it. No other save may be under way
    there: what is left of such is removed."""
    leftovers = partial(directory)
    if directory.exists() and not (directory.is_dir() and (leftovers or inside(directory) or not any(directory.iterdir()))):
        raise InputError(f"{directory}: found something else, expected a new path or a directory of checkpoints")
    for folder in leftovers:
        shutil.rmtree(folder, ignore_errors=True)
    folder = _partial_name(directory, f"step_{step:08d}")
    folder.mkdir(parents=True)
    return folder


def publish(folder: Path, facts: Facts, files: Mapping[str, str]) -> Path:
    """Makes a checkpoint of the folder that `begin` made, whose files are all on the disk: {name: sha256}."""
    with (folder / INDEX).open("w", encoding="utf-8") as file:
        file.write(_text({"schema": SCHEMA, "facts": asdict(facts), "files": files}))
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)
    name = f"step_{facts.step:08d}"
    names = (folder.with_name(f"{name}-{number}" if number else name) for number in count())
    target = folder.rename(next(path for path in names if not path.exists()))
    _sync(target.parent)
    return target


def keep_last(directory: Path, num: int, written: Path) -> None:
    """Removes all checkpoints but the newest `num` and the one that was just written. A folder loses its name first: what is half
    removed is no checkpoint."""
    for folder in inside(directory)[:-num]:
        if folder != written:
            shutil.rmtree(folder.rename(_partial_name(directory, folder.name)), ignore_errors=True)


def read_index(directory: Path) -> Index:
    """The index of the newest checkpoint in a directory, or of the folder of one. InputError when there is none, or it was changed."""
    found = complete(directory)
    if not found:
        raise InputError(f"{directory}: is no checkpoint; it has no {INDEX}")
    folder = found[-1]
    path = folder / INDEX
    try:
        text = path.read_text(encoding="utf-8")
        body = json.loads(text)["index"]
        if text != _text(body):
            raise InputError(f"{path}: is damaged: its digest is not the one in it")
        if body["schema"] != SCHEMA:
            raise InputError(f"{path}: is of schema {body['schema']}, this version reads {SCHEMA}")
        return Index(folder, Facts(**body["facts"]), body["files"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is damaged: it is no index of a checkpoint: {error!r}") from None


def _text(body: object) -> str:
    """The index's text, in which every byte counts."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"digest": digest, "index": body}) + "\n"


def _partial_name(directory: Path, name: str) -> Path:
    """A path that no other save has used."""
    return directory / f".{name}.{uuid4().hex[:8]}.partial"


def _sync(directory: Path) -> None:
    """Waits until a folder's entries are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
