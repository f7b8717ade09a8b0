"""How a stage's trainable parameters lie in flat buffers: in buckets, each cut into one shard per replica.

Terms
    replicas  the ranks along `axis` (dp; edp for slices on ep) that hold the same parameters of a stage; n of them
    bucket    a run of whole parameters with the same replicas, and the same stages if they are tied: what one collective
              reduces or gathers. Padded to n times ALIGNMENT elements, so that shards are equal
    shard     the n-th part of a bucket: what one replica updates (ZeRO-1, 2, 3) and always what it counts in the gradient
              norm, writes to a checkpoint and reads from one
    unit      what is used together: a layer, or one module outside of layers. With ZeRO-3 a bucket is (one class of) a
              unit, which is gathered for its use alone; else units are joined up to BUCKET_BYTES, as DDP does
              (Li et al., arXiv 2006.15704, section 3.2.3)

Within a bucket what is R on tp comes last, so that its sum over tp is one run. All numbers are elements. Buckets depend on
shapes and the plan alone: every rank knows every stage's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from meshwright.runtime.placement import Parameter, Placement

ALIGNMENT = 16
"""Elements that a parameter's place and a shard's length are multiples of: 64 bytes."""
BUCKET_BYTES = 25 << 20
"""Where a bucket of several units is full: DDP's default."""
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Span:
    """A parameter's place in the flat buffers: elements [start, start + size), row-major."""

    parameter: Parameter
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Bucket:
    """[start, stop) of the flat buffers, in `num_shards` shards over the replica axis `axis`."""

    spans: tuple[Span, ...]
    start: int
    stop: int
    axis: str
    num_shards: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def shard_size(self) -> int:
        return self.size // self.num_shards

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages that hold its parameters: several when they are tied."""
        return self.spans[0].parameter.stages

    def shard(self, index: int) -> tuple[int, int]:
        """[start, stop) of a replica's shard in the flat buffers."""
        start = self.start + index * self.shard_size
        return start, start + self.shard_size


Class = tuple[tuple[int, ...], str]
"""What the parameters of a bucket share: the stages of tied ones (else ()), and the replica axis."""


def bucket_class(parameter: Parameter) -> Class:
    """Of a parameter."""
    return parameter.stages if len(parameter.stages) > 1 else (), parameter.replica_axes[0]


def unit_of(name: str, layers: Collection[str]) -> str:
    """Unit of a parameter: the innermost of `layers` (module paths) that it is in, else its own module."""
    module = path = name.rpartition(".")[0]
    while path and path not in layers:
        path = path.rpartition(".")[0]
    return path or module


def group(parameters: Iterable[tuple[Parameter, int]], layers: Collection[str], zero: int) -> list[list[Parameter]]:
    """Trainable parameters (with their local sizes in elements) in buckets, in the model's order."""
    closed: list[list[Parameter]] = []
    opened: dict[tuple[Class, str], tuple[list[Parameter], int, str]] = {}
    for parameter, size in parameters:
        class_, unit = bucket_class(parameter), unit_of(parameter.name, layers)
        key = class_, unit if zero == 3 else ""
        members, total, last = opened.get(key, ([], 0, unit))
        if members and zero < 3 and unit != last and total * ELEMENT_BYTES >= BUCKET_BYTES:
            members, total = [], 0
        if not members:
            closed.append(members)
        members.append(parameter)
        opened[key] = members, total + size, unit
    return closed


def lay_out(groups: Iterable[Sequence[tuple[Parameter, tuple[int, ...]]]], num_shards: Mapping[str, int]) -> tuple[Bucket, ...]:
    """Buckets one after the other, of groups of parameters with their local shapes. `num_shards` by replica axis."""
    found: list[Bucket] = []
    start = 0
    for members in groups:
        axis = bucket_class(members[0][0])[1]
        spans: list[Span] = []
        at = start
        for parameter, shape in sorted(members, key=lambda member: member[0].layout.on("tp").kind == "R"):
            spans.append(Span(parameter, shape, at))
            at = aligned(at + prod(shape), ALIGNMENT)
        stop = start + aligned(at - start, ALIGNMENT * num_shards[axis])
        found.append(Bucket(tuple(spans), start, stop, axis, num_shards[axis]))
        start = stop
    return tuple(found)


def aligned(size: int, to: int) -> int:
    """The next multiple."""
    return -(-size // to) * to


@dataclass(frozen=True)
class Arrangement:
    """The buckets of every stage. `layers` are module paths. `zero` is the plan's."""

    placement: Placement
    layers: frozenset[str]
    zero: int

    @cached_property
    def own(self) -> tuple[Bucket, ...]:
        """Buckets of this rank."""
        return self.of(self.placement.rank)

    def of(self, rank: int) -> tuple[Bucket, ...]:
        """Buckets of a rank."""
        pipeline_rank = self.placement.mesh.coordinates(rank)["pp"]
        if pipeline_rank not in self._known:
            self._known[pipeline_rank] = self._arranged(replace(self.placement, rank=rank).held)
        return self._known[pipeline_rank]

    @cached_property
    def _known(self) -> dict[int, tuple[Bucket, ...]]:
        return {}

    def _arranged(self, held: tuple[Parameter, ...]) -> tuple[Bucket, ...]:
        mesh = self.placement.mesh
        shapes = {p.name: self.placement.local_shape(p) for p in held if p.trainable}
        sized = ((p, prod(shapes[p.name])) for p in held if p.trainable)
        groups = group(sized, self.layers, self.zero)
        return lay_out(
            ([(p, shapes[p.name]) for p in members] for members in groups), {axis: mesh.size(axis) for axis in ("dp", "edp")}
        )

    def portion(self, parameter: Parameter, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of a rank's local part of a parameter, row-major, that it stands for among the replicas: those in
        its shard of the bucket. The first replica stands for all of a frozen one."""
        replica = self._group(parameter, rank).index(rank)
        if not parameter.trainable:
            return (0, prod(self.placement.local_shape(parameter)) if replica == 0 else 0)
        bucket, span = self._spans(rank)[parameter.name]
        low, high = bucket.shard(replica)
        start = max(low, span.start)
        return start - span.start, max(start, min(high, span.stop)) - span.start

    def counts(self, parameter: Parameter, rank: int) -> bool:
        """Whether a rank's portion is the one that counts, of all ranks that hold the same."""
        return not set(self._group(parameter, rank)).isdisjoint(self.placement.owners(parameter))

    def holders(self, parameter: Parameter, owner: int) -> tuple[int, ...]:
        """Ranks whose portions make up an owner's local part."""
        return self._group(parameter, owner)

    def _group(self, parameter: Parameter, rank: int) -> tuple[int, ...]:
        return self.placement.mesh.group(rank, parameter.replica_axes[0])

    def _spans(self, rank: int) -> dict[str, tuple[Bucket, Span]]:
        """Bucket and place of each of a rank's trainable parameters."""
        pipeline_rank = self.placement.mesh.coordinates(rank)["pp"]
        if pipeline_rank not in self._places:
            self._places[pipeline_rank] = {span.parameter.name: (bucket, span) for bucket in self.of(rank) for span in bucket.spans}
        return self._places[pipeline_rank]

    @cached_property
    def _places(self) -> dict[int, dict[str, tuple[Bucket, Span]]]:
        return {}
