"""Hardware: what one rank's device does per second, and which link joins the ranks of a mesh axis.

A hardware file is YAML; those that ship are compiler/hardware/NAME.yaml:

    name                     as plans call it
    memory_bytes             of one device
    bandwidth_bytes_per_s    of the device's memory
    peak_flops               floating-point operations per second by dtype; a dtype that is not listed runs as float32
    efficiency               shares of the peaks that real programs reach: {matmul, memory}; and, where they were measured, curves
                             {matmul_by_flops, memory_by_bytes}: lists of [size of an op, share], read between sizes on a log scale;
                             {ops}: by op, {forward, backward}: lists of [work, seconds], flops of products and attention, bytes moved by
                             others (compiler.flops), which stand for the roofline; {program: {forward, backward, forward_op_s,
                             backward_op_s}}: how many times as long as its ops a whole program takes, and seconds more for each op
    op_overhead_s            seconds that an op takes however small it is
    update_bytes_per_s       bytes of parameters that the optimizer updates per second, where that was measured
    ranks_per_core           where ranks outnumber cores, how many share one: all rates are those of a share, and a rank that waits
                             lends its own to the others
    levels                   links, innermost first: {name, ranks, latency_s, bandwidth_bytes_per_s, overlaps}. A level joins `ranks`
                             consecutive ranks (a node); the last one joins all (null). Bandwidth is one device's, one way. Where they
                             were measured, {measured_ranks, collectives}: by name (all-reduce, all-gather, reduce-scatter,
                             all-to-all), lists of [bytes, seconds] on so many ranks; other numbers of ranks are scaled by formula

`meshwright profile` writes such a file of the machine that it runs on.

Ranks fill nodes in order (tp fastest, pp slowest: plans.mesh). A group that leaves its node is as fast as its slowest crossing:
a ring through k members of each node crosses on their k network ports, and never outruns the links inside the node.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import pairwise
from math import inf, log, prod
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from meshwright.plans.errors import InputError
from meshwright.plans.mesh import RANK_AXES, Mesh
from meshwright.plans.yaml_io import load, parse

FOLDER = files("meshwright.compiler") / "hardware"
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Point = tuple[Positive, Positive]
Curve = Annotated[tuple[Point, ...], Field(strict=False)]


def read_curve(curve: Sequence[tuple[float, float]], size: float) -> float:
    """The value at a size: between points on a log scale of sizes, that of the nearest end beyond them."""
    place = bisect_left(curve, size, key=lambda point: point[0])
    if place == 0 or place == len(curve):
        return curve[min(place, len(curve) - 1)][1]
    (left, low), (right, high) = curve[place - 1 : place + 1]
    return low + (high - low) * log(size / left) / log(right / left)


def read_seconds(curve: Sequence[tuple[float, float]], num_bytes: float) -> float:
    """Seconds for an amount: linear between points, constant below the first, along the last two beyond the last."""
    if num_bytes <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    place = min(bisect_left(curve, num_bytes, key=lambda point: point[0]), len(curve) - 1)
    (left, low), (right, high) = curve[place - 1 : place + 1]
    return low + (high - low) * (num_bytes - left) / (right - left)


@dataclass(frozen=True)
class Link:
    """What joins a group of ranks: seconds per message, bytes per second and rank, one way.

    memory_bytes_per_s   the devices' memory, for what a rank does alone: slicing and padding
    overlaps             whether collectives run beside matmuls; not where the same cores do both
    reduce_bytes_per_s   adding what arrives; infinite where that overlaps with the transfer, as in NCCL
    update_bytes_per_s   parameters that the devices update per second; None where that was not measured
    ranks_per_core       above 1 where ranks share cores
    measured             (collective, [bytes, seconds] points) on `measured_ranks` ranks
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    memory_bytes_per_s: float = inf
    reduce_bytes_per_s: float = inf
    update_bytes_per_s: float | None = None
    ranks_per_core: float = 1.0
    overlaps: bool = True
    name: str = ""
    measured: tuple[tuple[str, tuple[tuple[float, float], ...]], ...] = ()
    measured_ranks: int = 2

    def seconds(self, collective: str, num_bytes: float) -> float | None:
        """What a collective was measured to take on `measured_ranks` ranks; None where it was not."""
        curve = next((points for name, points in self.measured if name == collective), None)
        return read_seconds(curve, num_bytes) if curve else None


@checked_dataclass(frozen=True, config=STRICT)
class OpTimes:
    """Seconds of an op in float32 by its work, which compiler.flops counts; no backward where no gradient flows."""

    forward: Annotated[Curve, Field(min_length=1)]
    backward: Curve = ()


@checked_dataclass(frozen=True, config=STRICT)
class ProgramTimes:
    """How many times as long as its ops a whole program takes, and seconds that it takes beside for each of them."""

    forward: Positive = 1.0
    backward: Positive = 1.0
    forward_op_s: NonNegative = 0.0
    backward_op_s: NonNegative = 0.0


@checked_dataclass(frozen=True, config=STRICT)
class Efficiency:
    """Shares of the peaks that are reached; the curves go from small ops to large ones. (Caches may outrun memory.)"""

    matmul: Share
    memory: Share
    matmul_by_flops: Curve = ()
    memory_by_bytes: Curve = ()
    ops: Mapping[str, OpTimes] = field(default_factory=dict)
    program: ProgramTimes = field(default_factory=ProgramTimes)


@dataclass(frozen=True)
class Device:
    """One rank's device."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    efficiency: Efficiency
    op_overhead_s: float
    update_bytes_per_s: float | None = None
    ranks_per_core: float = 1.0

    def flops_per_s(self, dtype: str) -> float:
        """Reached floating-point operations per second of matmuls in `dtype` ("bfloat16")."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"]) * self.efficiency.matmul

    def matmul_s(self, flops: float, dtype: str) -> float:
        """Seconds of a matmul of so many operations, by the measured curve where there is one."""
        curve = self.efficiency.matmul_by_flops
        share = read_curve(curve, flops) if curve and flops else self.efficiency.matmul
        return flops / (self.peak_flops.get(dtype, self.peak_flops["float32"]) * share)

    def memory_s(self, num_bytes: float) -> float:
        """Seconds of reading and writing so many bytes in one op, by the measured curve where there is one."""
        curve = self.efficiency.memory_by_bytes
        share = read_curve(curve, num_bytes) if curve and num_bytes else self.efficiency.memory
        return num_bytes / (self.bandwidth_bytes_per_s * share)

    @property
    def memory_bytes_per_s(self) -> float:
        """Reached bytes per second, reads and writes together."""
        return self.bandwidth_bytes_per_s * self.efficiency.memory


@checked_dataclass(frozen=True, config=STRICT)
class Level:
    """A link between `ranks` consecutive ranks; None: between all."""

    name: str
    ranks: Count | None
    latency_s: NonNegative
    bandwidth_bytes_per_s: Positive
    overlaps: bool = True
    measured_ranks: Annotated[int, Field(ge=2)] = 2
    collectives: Mapping[str, Annotated[Curve, Field(min_length=1)]] = field(default_factory=dict)


@dataclass(frozen=True)
class Topology:
    """Links, innermost first."""

    levels: tuple[Level, ...]

    @property
    def ranks_per_node(self) -> int | None:
        """Consecutive ranks that the innermost link joins; None when it joins all."""
        return self.levels[0].ranks


@dataclass(frozen=True)
class Hardware:
    """A device and what joins many of it."""

    name: str
    device: Device
    topology: Topology

    def link_for(self, axis: str, mesh: Mesh) -> Link:
        """The link that the groups of a mesh axis talk over: that of the group which spans most."""
        size, stride = mesh.size(axis), axis_stride(axis, mesh)
        level, inner = self.topology.levels[0], None
        for outer in self.topology.levels[1:]:
            if level.ranks is None or not leaves_block(size, stride, level.ranks, mesh.world_size):
                break
            level, inner = outer, level
        bandwidth = level.bandwidth_bytes_per_s
        if inner is not None and inner.ranks is not None and axis != "pp":
            members = min(size, max(1, inner.ranks // stride))
            bandwidth = min(bandwidth * members, max(bandwidth, inner.bandwidth_bytes_per_s))
        return Link(
            level.latency_s,
            bandwidth,
            self.device.memory_bytes_per_s,
            update_bytes_per_s=self.device.update_bytes_per_s,
            ranks_per_core=self.device.ranks_per_core,
            overlaps=level.overlaps,
            name=level.name,
            measured=tuple(level.collectives.items()),
            measured_ranks=level.measured_ranks,
        )


class HardwareFile(BaseModel):
    """A hardware file as it is written."""

    model_config = STRICT

    name: str
    memory_bytes: Count
    bandwidth_bytes_per_s: Positive
    peak_flops: Mapping[str, Positive]
    efficiency: Efficiency
    op_overhead_s: NonNegative
    update_bytes_per_s: Positive | None = None
    ranks_per_core: Annotated[float, Field(ge=1)] = 1.0
    levels: tuple[Level, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> HardwareFile:
        if "float32" not in self.peak_flops:
            raise ValueError("peak_flops has no float32, the rate of every dtype that is not listed")
        if self.levels[-1].ranks is not None:
            raise ValueError("the last of levels must join all ranks: give it ranks: null")
        for inner, outer in pairwise(self.levels):
            if inner.ranks is None or (outer.ranks is not None and outer.ranks <= inner.ranks):
                raise ValueError(f"levels go from the smallest to the largest: {inner.name} comes before {outer.name}")
        for name, curve in self.curves():
            if any(left[0] >= right[0] for left, right in pairwise(curve)):
                raise ValueError(f"{name}: sizes must grow from point to point")
        return self

    def curves(self) -> Iterator[tuple[str, Sequence[tuple[float, float]]]]:
        """Every measured curve, with where it is."""
        yield "efficiency.matmul_by_flops", self.efficiency.matmul_by_flops
        yield "efficiency.memory_by_bytes", self.efficiency.memory_by_bytes
        for name, times in self.efficiency.ops.items():
            yield f"efficiency.ops.{name}.forward", times.forward
            yield f"efficiency.ops.{name}.backward", times.backward
        for number, level in enumerate(self.levels):
            yield from ((f"levels[{number}].collectives.{name}", curve) for name, curve in level.collectives.items())

    def hardware(self) -> Hardware:
        """The same as values."""
        device = Device(
            self.name,
            self.memory_bytes,
            self.bandwidth_bytes_per_s,
            self.peak_flops,
            self.efficiency,
            self.op_overhead_s,
            self.update_bytes_per_s,
            self.ranks_per_core,
        )
        return Hardware(self.name, device, Topology(self.levels))


def known_hardware() -> tuple[str, ...]:
    """Names that ship, sorted."""
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in FOLDER.iterdir() if entry.name.endswith(".yaml")))


def load_hardware(name_or_file: str) -> Hardware:
    """Hardware by a name that ships, or from a file; InputError names those that ship, or the key that is wrong."""
    if name_or_file in known_hardware():
        entry = FOLDER / f"{name_or_file}.yaml"
        return read_hardware(parse(entry.read_text("utf-8"), name_or_file), name_or_file)
    path = Path(name_or_file)
    if not path.is_file():
        raise InputError(
            f"hardware: found {name_or_file!r}, expected one of {', '.join(known_hardware())}, or a hardware file (YAML)"
        )
    return read_hardware(load(path), name_or_file)


def read_hardware(data: object, where: str) -> Hardware:
    """Hardware from a file's data."""
    try:
        return HardwareFile.model_validate(data).hardware()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{where}: {key + ': ' if key else ''}{first['msg'].removeprefix('Value error, ')}") from None


def axis_stride(axis: str, mesh: Mesh) -> int:
    """Difference in rank between neighbours along an axis; ep runs along dp."""
    place = RANK_AXES.index("dp" if axis == "ep" else axis)
    return prod(mesh.size(a) for a in RANK_AXES[place + 1 :])


def leaves_block(size: int, stride: int, block: int, world_size: int) -> bool:
    """Whether some group of `size` ranks that are `stride` apart has members in two blocks of consecutive ranks."""
    span = stride * (size - 1)
    firsts = (start + offset for start in range(0, world_size, stride * size) for offset in range(stride))
    return any(first // block != (first + span) // block for first in firsts)
