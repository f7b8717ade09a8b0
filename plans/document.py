"""plan.yaml as values: `PlanDocument`, and `Declaration`, any subset of its keys to compile from.

Both check themselves at construction: types and ranges key by key (this file), keys together (consistency), and what
this version has (available). `read_plan` and `read_declaration` turn what is wrong into one line of InputError that
names the file and the key path; `validate` checks a plan against the model's signature.

Layouts are values here (`Layout`) and text in the file. Names are patterns (plans.patterns) in both;
`parameter_layouts`, `kind_of` and `stage_segments` expand them. Times are seconds, memory is bytes per rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from meshwright.plans.available import unavailable
from meshwright.plans.consistency import (
    Conflict,
    check_batch,
    check_parameters,
    check_placement,
    check_recomputed,
    check_segments,
    check_stages,
    check_versions,
)
from meshwright.plans.errors import InputError
from meshwright.plans.layout import Layout
from meshwright.plans.mesh import AXES, Mesh
from meshwright.plans.patterns import expand_all, expand_mapping
from meshwright.plans.signature import Signature
from meshwright.plans.units import parse_bytes

Precision = Literal["fp32", "bf16", "fp16"]
Recompute = Literal["none", "selective", "full", "auto"]
Schedule = Literal[
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "pipedream-2bw", "synthesised", "auto"
]
ModelKind = Literal["directory", "config", "gguf", "factory", "hub", "module"]


def _to_mesh(value: object) -> Mesh:
    if isinstance(value, Mesh):
        return value
    if isinstance(value, str):
        return Mesh.parse(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"found {value!r}, expected sizes by axis such as {{pp: 2, tp: 2}}")
    for axis, size in value.items():
        if axis not in AXES:
            raise Conflict(f"mesh.{axis}", f"unknown axis; the axes are {', '.join(AXES)}")
        if type(size) is not int or size < 1:
            found = str(size).lower() if isinstance(size, bool) else repr(size)
            raise Conflict(f"mesh.{axis}", f"found {found}, expected a whole number of 1 or more")
    return Mesh.of(value)


def _to_layout(value: object) -> Layout:
    if isinstance(value, Layout):
        return value
    if isinstance(value, str):
        return Layout.parse(value)
    raise ValueError(f"found {value!r}, expected a layout such as S(0)@tp, or I for the same on every rank")


def _to_module_layouts(value: object) -> Layout | Mapping[str, Layout]:
    if not isinstance(value, Mapping):
        return _to_layout(value)
    layouts: dict[str, Layout] = {}
    for op, layout in value.items():
        try:
            layouts[str(op)] = _to_layout(layout)
        except ValueError as error:
            raise ValueError(f"{op}: {error}") from None
    return layouts


def _module_layouts_text(value: Layout | Mapping[str, Layout]) -> str | dict[str, str]:
    return str(value) if isinstance(value, Layout) else {op: str(layout) for op, layout in value.items()}


def _to_bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


def _to_model(value: object) -> object:
    return {"source": value} if isinstance(value, str) else value


_BYTES_SCHEMA: dict[str, object] = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}
_LAYOUT_SCHEMA: dict[str, object] = {"type": "string"}
_MODULE_SCHEMA: dict[str, object] = {
    "anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}]
}
_MESH_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {axis: {"type": "integer", "minimum": 1} for axis in AXES},
    "additionalProperties": False,
}

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(_to_bytes), Field(ge=1), WithJsonSchema(_BYTES_SCHEMA)]
Names = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
MeshField = Annotated[
    Mesh, PlainValidator(_to_mesh), PlainSerializer(lambda m: dict(m.sizes())), WithJsonSchema(_MESH_SCHEMA)
]
LayoutField = Annotated[Layout, PlainValidator(_to_layout), PlainSerializer(str), WithJsonSchema(_LAYOUT_SCHEMA)]
ModuleLayouts = Annotated[
    Layout | Mapping[str, Layout],
    PlainValidator(_to_module_layouts),
    PlainSerializer(_module_layouts_text),
    WithJsonSchema(_MODULE_SCHEMA),
]


class Frozen(BaseModel):
    """Base of the plan's parts: immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )


class ModelDeclaration(Frozen):
    """Where the model comes from: absolute path, hub id or package.module:factory."""

    source: str
    kind: ModelKind | None = None
    parameters: Amount | None = None


class ModelSource(ModelDeclaration):
    """The same, resolved; `parameters` is their number."""

    kind: ModelKind
    parameters: Amount


class Memory(Frozen):
    """Predicted bytes of one rank of a stage.

    parameters, gradients, optimizer   what lasts; gradients are the sums over micro-batches
    activations                        that autograd keeps of all micro-batches in flight
    buffers                            constants of the program, such as rotary tables
    transient                          the most that is there for the moment beside all this, what is recomputed included
    communication                      what a sum over dp needs beside the gradients
    """

    parameters: Amount
    gradients: Amount
    optimizer: Amount
    activations: Amount
    buffers: Amount = 0
    transient: Amount = 0
    communication: Amount = 0

    @property
    def total(self) -> int:
        held = self.parameters + self.gradients + self.optimizer + self.activations
        return held + self.buffers + self.transient + self.communication


class StageDeclaration(Frozen):
    """Segments of a pipeline stage; the rest is predicted and ignored in a declaration."""

    layers: Names
    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    backward_weight_s: Seconds | None = None
    memory: Memory | None = None


class Stage(StageDeclaration):
    """A pipeline stage with its predicted seconds per micro-batch. `backward_weight_s` is the part of `backward_s` that can be put off."""

    forward_s: Seconds
    backward_s: Seconds
    backward_weight_s: Seconds = 0.0
    memory: Memory


class KindDeclaration(Frozen):
    """Layouts of op results in every segment of a kind, by module path relative to the segment.

    A module's value is one layout for all its ops, or layouts by op name (the second `view` of a module is `view.1`).
    """

    segments: Names | None = None
    layouts: Mapping[str, ModuleLayouts] | None = None


class Kind(KindDeclaration):
    """The same, complete."""

    segments: Names
    layouts: Mapping[str, ModuleLayouts]


ALL = "all"
"""`regions` of segments that are recomputed from beginning to end."""


class RecomputedDeclaration(Frozen):
    """Segments of which ops run again in the backward pass: regions of them, each a list of ops such as self_attn.softmax, or all.

    frees     predicted bytes of one segment that autograd does not keep for it, per micro-batch and rank
    costs_s   predicted seconds that it takes, per micro-batch
    """

    segments: Names
    regions: Literal["all"] | Annotated[tuple[Names, ...], Field(strict=False, min_length=1)]
    frees: int | None = None
    costs_s: Seconds | None = None


class Recomputed(RecomputedDeclaration):
    """The same, with predictions."""

    frees: int
    costs_s: Seconds


class Predicted(Frozen):
    """Predicted cost of a step. `bubble`: idle share of all ranks' time. `collectives`: seconds by collective. `activations`: bytes that
    autograd keeps of one micro-batch, by segment."""

    step_s: Seconds
    tokens_per_s: Seconds
    bubble: Seconds
    collectives: Mapping[str, Seconds] = {}
    activations: Mapping[str, Amount] = {}


class Declaration(Frozen):
    """Any subset of a plan; None stands for a key that is not given. Keys that only report are read and ignored."""

    version: Literal[1] | None = Field(default=None, alias="schema")
    model: Annotated[ModelDeclaration, BeforeValidator(_to_model)] | None = None
    task: str | None = None
    attention: Literal["sdpa", "eager"] | None = None
    seed: Amount | None = None
    mesh: MeshField | None = None
    devices: Count | None = None
    hardware: str | None = None
    memory_limit: Bytes | None = None
    seq: Count | None = None
    micro_batch: Count | None = None
    global_batch: Count | None = None
    precision: Precision | None = None
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    zero: Literal[0, 1, 2, 3] | None = None
    recompute: Recompute | None = None
    schedule: Schedule | None = None
    chunks: Count | None = None
    stage_ranks: Annotated[tuple[Amount, ...], Field(strict=False)] | None = None
    actions: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    sequence_parallel: Literal["auto", "on", "off"] | None = None
    stages: Annotated[tuple[StageDeclaration, ...], Field(strict=False)] | None = None
    parameters: Mapping[str, LayoutField] | None = None
    kinds: Mapping[str, KindDeclaration] | None = None
    precision_ops: Mapping[str, str] | None = None
    recomputed: Annotated[tuple[RecomputedDeclaration, ...], Field(strict=False)] | None = None
    pinned: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    notes: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    predicted: Predicted | None = None
    decisions: str | None = None
    programs: Mapping[str, str] | None = None

    @model_validator(mode="after")
    def _check(self) -> Declaration:
        for key in type(self).model_fields:
            if reason := unavailable(key, getattr(self, key)):
                raise Conflict(key, reason)
        if self.precision == "fp16" and self.schedule == "pipedream-2bw":
            reason = "fp16 skips steps that overflow, which pipedream-2bw learns after the next has begun; use bf16 or another schedule"
            raise Conflict("precision", reason)
        if self.global_batch is not None and self.micro_batch is not None and self.mesh is not None:
            check_batch(self.global_batch, self.micro_batch, self.mesh)
        if self.schedule is not None and self.zero is not None:
            check_versions(self.schedule, self.zero)
        if self.stages is not None:
            check_stages([stage.layers for stage in self.stages], self.mesh, self.chunks or 1)
        if self.stage_ranks is not None and self.mesh is not None:
            check_placement(self.stage_ranks, self.mesh, self.chunks or 1)
        if self.stages is not None and self.kinds is not None and all(k.segments for k in self.kinds.values()):
            segments = {name: kind.segments or () for name, kind in self.kinds.items()}
            check_segments([stage.layers for stage in self.stages], segments)
        if self.parameters is not None:
            check_parameters(self.parameters)
        if self.recomputed is not None:
            check_recomputed(self.recompute or "none", [(r.segments, r.regions == ALL) for r in self.recomputed])
        return self


class PlanDocument(Declaration):
    """A whole plan: every decision and prediction. `decisions` and `programs` are digests that saving fills in."""

    version: Literal[1] = Field(alias="schema")
    model: Annotated[ModelSource, BeforeValidator(_to_model)]
    task: str
    attention: Literal["sdpa", "eager"]
    seed: Amount
    mesh: MeshField
    hardware: str
    seq: Count
    micro_batch: Count
    global_batch: Count
    precision: Precision
    reduce_dtype: Literal["fp32", "bf16"]
    zero: Literal[0, 1, 2, 3]
    recompute: Recompute
    schedule: Schedule
    chunks: Count
    sequence_parallel: Literal["auto", "on", "off"]
    stages: Annotated[tuple[Stage, ...], Field(strict=False)]
    parameters: Mapping[str, LayoutField]
    kinds: Mapping[str, Kind]
    precision_ops: Mapping[str, str] = {}
    recomputed: Annotated[tuple[Recomputed, ...], Field(strict=False)] = ()
    pinned: Annotated[tuple[str, ...], Field(strict=False)] = ()
    notes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    predicted: Predicted
    programs: Mapping[str, str] = {}

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step on each dp rank."""
        return self.global_batch // (self.mesh.dp * self.micro_batch)

    @cached_property
    def ranks_of_stages(self) -> tuple[int, ...]:
        """The pp coordinate of every stage: `stage_ranks`, or round and round."""
        return self.stage_ranks or tuple(range(self.mesh.pp)) * self.chunks

    def stages_of(self, coordinate: int) -> tuple[int, ...]:
        """The stages of the ranks with a pp coordinate."""
        return tuple(stage for stage, rank in enumerate(self.ranks_of_stages) if rank == coordinate)

    def memory_of(self, coordinate: int) -> int:
        """Predicted bytes of a rank with a pp coordinate."""
        return sum(self.stages[stage].memory.total for stage in self.stages_of(coordinate))

    @cached_property
    def parameter_layouts(self) -> Mapping[str, Layout]:
        """Layout of every parameter by its full name."""
        return expand_mapping(self.parameters)

    @cached_property
    def kind_of(self) -> Mapping[str, str]:
        """Kind of every segment by its name."""
        return {name: kind for kind, k in self.kinds.items() for name in expand_all(k.segments)}

    @cached_property
    def stage_segments(self) -> tuple[tuple[str, ...], ...]:
        """Segment names of every stage."""
        return tuple(expand_all(stage.layers) for stage in self.stages)

    @cached_property
    def stage_of(self) -> Mapping[str, int]:
        """Stage of every segment by its name."""
        return {name: stage for stage, names in enumerate(self.stage_segments) for name in names}


def validate(document: PlanDocument, signature: Signature, where: str = "plan.yaml") -> None:
    """Checks a plan against the model: every parameter once, every local shape whole.

    Raises InputError naming the parameter, the size and the axis.
    """
    for pattern in document.parameters:
        for name in expand_all([pattern]):
            if name not in signature.parameters:
                hint = f"; it is tied to {signature.tied[name]}" if name in signature.tied else ""
                raise InputError(f"{where}: parameters.{pattern}: the model trains no parameter {name}{hint}")
            shape = signature.parameters[name].shape
            try:
                document.parameters[pattern].local_shape(shape, document.mesh)
            except ValueError as error:
                raise InputError(f"{where}: parameters.{pattern}: {name} of shape {shape}: {error}") from None
    for name in signature.parameters:
        if name not in document.parameter_layouts:
            raise InputError(f"{where}: parameters: {name} is missing; give its layout, such as {name}: I")
