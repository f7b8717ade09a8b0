"""Reading a rank's part of tensors from safetensors files, and nothing else of them.

Terms
    ranges    what a rank holds of a tensor: per dim, the [start, stop) runs of global indices in local order (several
              runs where the layout has sections)
    place     where a whole tensor is: a key of a file
    source    the places of all tensors by the model's own names
    portion   elements [start, stop) of what ranges hold, row-major: what one replica keeps of its part (runtime.buckets)

Reading copies what is wanted of a tensor, cast to the destination's dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.plans.layout import Layout, local_slices
from meshwright.plans.mesh import Mesh
from meshwright.plans.signature import Signature

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Ranges = tuple[tuple[tuple[int, int], ...], ...]
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Place:
    """Tensor `key` of `file`."""

    file: Path
    key: str


Source = Mapping[str, Place]


def whole(shape: Sequence[int]) -> Ranges:
    """Ranges of everything."""
    return tuple(((0, n),) for n in shape)


def local_ranges(shape: Sequence[int], layout: Layout, mesh: Mesh, at: Mapping[str, int]) -> Ranges:
    """Ranges of the rank with coordinates `at`."""
    ranges = list(whole(shape))
    for axis, type_ in layout.types:
        if type_.kind != "S" or mesh.size(axis) == 1:
            continue
        if ranges[type_.dim] != ((0, shape[type_.dim]),):
            raise ValueError(f"layout {layout} shards dim {type_.dim} twice")
        ranges[type_.dim] = local_slices(type_, shape[type_.dim], mesh.size(axis), at[axis])
    return tuple(ranges)


def overlaps(have: Sequence[tuple[int, int]], want: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    """(slice of what is there, slice of what is wanted) for each run of indices that is in both, along one dim."""
    have_at = 0
    for have_start, have_stop in have:
        want_at = 0
        for want_start, want_stop in want:
            start, stop = max(have_start, want_start), min(have_stop, want_stop)
            if start < stop:
                offset = have_at - have_start
                place = want_at - want_start
                yield slice(start + offset, stop + offset), slice(start + place, stop + place)
            want_at += want_stop - want_start
        have_at += have_stop - have_start


def copy_overlap(target: Tensor, want: Ranges, tensor: Any, have: Ranges) -> int:
    """Copies what `tensor` (or a safetensors slice of it) has of `want` into `target`; the number of elements."""
    count = 0
    for pairs in product(*(list(overlaps(h, w)) for h, w in zip(have, want, strict=True))):
        part = tensor[tuple(pair[0] for pair in pairs)]
        target[tuple(pair[1] for pair in pairs)].copy_(part)
        count += part.numel()
    return count


def local_shape(ranges: Ranges) -> tuple[int, ...]:
    """Shape of what ranges hold."""
    return tuple(sum(stop - start for start, stop in runs) for runs in ranges)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of a tensor, row-major, as the fewest boxes of [start, stop) per dim, in order: part of a row,
    whole rows, part of a row."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return [((first, first + 1), *rest) for rest in boxes(shape[1:], start - first * row, stop - first * row)]
    after, before = -(-start // row), stop // row
    found = [((first, first + 1), *rest) for rest in boxes(shape[1:], start - first * row, row)] if first < after else []
    if after < before:
        found.append(((after, before), *((0, n) for n in shape[1:])))
    return found + ([((last, last + 1), *rest) for rest in boxes(shape[1:], 0, stop - last * row)] if before <= last else [])


def within(ranges: Ranges, box: Box) -> Ranges:
    """Ranges of a box of what ranges hold."""
    return tuple(tuple(_cut(runs, start, stop)) for runs, (start, stop) in zip(ranges, box, strict=True))


def _cut(runs: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    at = 0
    for low, high in runs:
        first, last = max(start, at), min(stop, at + high - low)
        if first < last:
            yield low + first - at, low + last - at
        at += high - low


class Reader:
    """Open safetensors files; a context manager."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, target: Tensor, place: Place, want: Ranges) -> None:
        """Fills `target` with the wanted ranges of a tensor; InputError when it does not have them all."""
        handle = self.open(place.file)
        try:
            stored = handle.get_slice(place.key)
            have = whole(stored.get_shape())
            count = copy_overlap(target, want, stored if have else handle.get_tensor(place.key), have)
        except SafetensorError as error:
            raise InputError(f"{place.file}: {place.key}: cannot be read: {error}") from None
        if count != target.numel():
            raise InputError(f"{place.file}: {place.key}: found {count} of {target.numel()} elements that are wanted")

    def read_portion(self, target: Tensor, place: Place, want: Ranges, start: int) -> None:
        """Fills `target`, of one dim, with the wanted ranges' elements from `start` on, row-major."""
        at = 0
        for box in boxes(local_shape(want), start, start + target.numel()):
            shape = [high - low for low, high in box]
            part = target[at : at + prod(shape)].view(shape)
            self.read(part, place, within(want, box))
            at += prod(shape)

    def shape(self, file: Path, key: str) -> tuple[int, ...]:
        """Shape of a tensor in a file."""
        return tuple(self.open(file).get_slice(key).get_shape())

    def open(self, file: Path) -> Any:
        """The file's handle; InputError when it cannot be read."""
        if file not in self._files:
            try:
                self._files[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise InputError(f"{file}: cannot be read: {error}") from None
        return self._files[file]


def weight_files(directory: Path, reader: Reader) -> dict[str, Path] | None:
    """{tensor name: file} of a directory's safetensors; None without any. InputError for a file that is missing.

    `directory` may also be one such file.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        files = {name: directory / file for name, file in _weight_map(index).items()}
        for file in sorted(set(files.values())):
            if not file.is_file():
                raise InputError(f"{index}: names {file.name}, which is not in {directory}")
        return files
    single = directory if directory.is_file() else directory / WHOLE_FILE
    return dict.fromkeys(reader.open(single).keys(), single) if single.is_file() else None


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: is no index of safetensors files: {error!r}") from None


def find_weights(directory: Path, signature: Signature) -> Source | None:
    """Source of all parameters in a directory's (or one file's) safetensors under the model's own names and shapes.

    None when it has no safetensors or they are written otherwise: then a copy must be made (weight_copy). A tied
    parameter may stand there under any of its names.
    """
    shapes = {name: spec.shape for name, spec in (*signature.parameters.items(), *signature.unused.items())}
    names: dict[str, list[str]] = {name: [name] for name in shapes}
    for alias, name in signature.tied.items():
        names[name].append(alias)
    source: dict[str, Place] = {}
    with Reader() as reader:
        files = weight_files(directory, reader)
        if files is None:
            return None
        for name, shape in shapes.items():
            key = next((n for n in names[name] if n in files), None)
            if key is None or reader.shape(files[key], key) != shape:
                return None
            source[name] = Place(files[key], key)
    return source
