"""Files of torch.distributed.checkpoint (DCP): its writer, with digests, and its reader.

    Writer          writes into a folder of runtime.checkpoint_files, and makes a checkpoint of it when all ranks are done
    read_metadata   what a checkpoint has
    read_shards     fills Shards (runtime.shards) from it

Reading executes nothing: metadata is a pickle, of which only DCP's own records are accepted, and data files are loaded as weights only.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshwright.plans.errors import InputError
from meshwright.runtime.checkpoint_files import Facts, Index, keep_last, publish
from meshwright.runtime.optimizer import STATES
from meshwright.runtime.shards import LoadPlanner, Shards

METADATA = ".metadata"
DCP = "torch.distributed.checkpoint"
RECORDS = frozenset(
    {
        *((f"{DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata")),
        *((f"{DCP}.metadata", name) for name in ("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
        (f"{DCP}.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch.serialization", "_get_layout"),
    }
)
"""What metadata is made of."""


class HashedFile(io.BufferedWriter):
    """A file that is written from its beginning to its end, counts its SHA-256, and is on the disk when it is closed."""

    def __init__(self, path: Path, digests: dict[str, str]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._sha256, self._digests, self._key = hashlib.sha256(), digests, path.name

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Adds bytes."""
        self._sha256.update(content)
        return super().write(content)

    def close(self) -> None:
        """Waits for the disk."""
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
            self._digests[self._key] = self._sha256.hexdigest()
        finally:
            super().close()


class HashedFiles(FileSystem):
    """The file system, with the SHA-256 of files that were written through it, by name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A file to write."""
        assert mode == "wb"
        with HashedFile(Path(path), self.digests) as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """The digest goes along."""
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Writes a checkpoint into `folder` (checkpoint_files.begin); with the last rank's file it becomes one, and all but the newest
    `keep` beside it are removed."""

    def __init__(self, folder: Path, facts: Facts, keep: int) -> None:
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
        self.fs = self._files = HashedFiles()
        self._folder, self._facts, self._keep = folder, facts, keep

    def stage(self, state_dict: Mapping[str, Shards]) -> dict[str, Shards]:
        """What is written while training goes on."""
        return {name: part.copied() for name, part in state_dict.items()}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file, if it has anything to write; its digest goes to rank 0 with what is in it."""
        written: Future[list[WriteResult]] = Future()
        results = super().write_data(plan, planner).value() if plan.items else []
        digests = self._files.digests
        written.set_result([replace(r, storage_data=(r.storage_data, digests[r.storage_data.relative_path])) for r in results])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all files are on the disk."""
        files = {info.relative_path: digest for ranks in results for info, digest in (r.storage_data for r in ranks)}
        super().finish(metadata, [[replace(r, storage_data=r.storage_data[0]) for r in ranks] for ranks in results])
        written = publish(self._folder, self._facts, {**files, METADATA: self._files.digests[METADATA]})
        keep_last(written.parent, self._keep, written)

    def storage_meta(self) -> StorageMeta:
        """Without a path: where it is written is not where it will be."""
        return StorageMeta(save_id=self.save_id)


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in RECORDS:
            raise pickle.UnpicklingError(f"{module}.{name} is no record of {DCP}")
        return super().find_class(module, name)


def read_metadata(index: Index) -> Metadata:
    """What a checkpoint has. InputError when it is not what was written."""
    try:
        found = _Records(io.BytesIO(index.read_file(METADATA))).load()
    except pickle.UnpicklingError as error:
        raise InputError(f"{index.folder / METADATA}: cannot be read: {error}") from None
    assert isinstance(found, Metadata)
    return found


def shapes_of(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors by name, in the model's order."""
    return {key: tuple(x.size) for key, x in metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}


def parameter_shapes(index: Index, metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Those of parameters."""
    states = tuple(f"{kind}/" for kind in STATES.get(index.facts.optimizer or "", ()))
    return {name: shape for name, shape in shapes_of(metadata).items() if not name.startswith(states)}


def read_shards(index: Index, metadata: Metadata, wanted: Mapping[str, Shards]) -> None:
    """Fills this rank's shards; no other rank is needed. InputError when the checkpoint does not have all of them."""
    planner = LoadPlanner(wanted, metadata)
    reader = FileSystemReader(str(index.folder))
    reader.set_up_storage_reader(metadata, True)
    plan = planner.create_local_plan()
    found: dict[str, int] = {}
    for item in plan.items:
        found[item.dest_index.fqn] = found.get(item.dest_index.fqn, 0) + prod(item.lengths)
    for name, part in wanted.items():
        if found.get(name, 0) != part.num_elements:
            raise InputError(f"{index.folder}: {name}: found {found.get(name, 0)} of {part.num_elements} elements that are wanted")
    reader.read_data(plan, planner).wait()
