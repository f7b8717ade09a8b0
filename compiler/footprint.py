"""What segments keep for the backward pass and need for the moment, in bytes of one rank: found by running them on fake tensors.

The model's program for one stage is emitted under the chosen layouts and run on fake tensors of local shapes. The first segment of each
kind runs, forward and backward; what it does is repeated for the others, so that 126 layers take the time of one. Kept is what
autograd's saved-tensor hooks are given, and the operands of what is recomputed: each storage once, without parameters, constants and
model inputs. The moment's need is counted by runtime.live_bytes.

    Footprint     of one segment: `own_bytes` that only it keeps, `shared` storages that other segments may keep too (a layer's result is
                  the next one's operand; all decoder layers keep the encoder's), by a name that is the same in every run, and
                  `transient_bytes`: the most that is there beside what is kept, in its forward or its backward
    PutOff        the same of a segment whose weight gradients wait for a W of the schedule: another backward
    Measurer      footprints of all segments, for a recomputation per kind

Attention kernels are those of the CPU; what they keep, others keep too: operands, result, and a number per row of scores.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from meshwright.compiler.assignment import Assignment
from meshwright.compiler.emission.stage import emit_stage
from meshwright.compiler.emission.staging import Staging
from meshwright.compiler.graph import Segment
from meshwright.compiler.recomputation import NOTHING, Recomputation
from meshwright.plans.mesh import Mesh
from meshwright.runtime.context import Context, Weights
from meshwright.runtime.dry_axes import dry_axes
from meshwright.runtime.live_bytes import LiveBytes
from meshwright.runtime.main_gradients import Deferral, Work, defer_to
from meshwright.runtime.program import load_program

Function = Callable[..., Any]
NEED_DATA = (DataDependentOutputException, DynamicOutputShapeException)
"""Backwards that read data, as a model's own may, end there: what they need for the moment is counted up to that."""


@dataclass(frozen=True)
class PutOff:
    """A segment's weight gradients wait for a W.

    own_bytes, shared   what is kept from the backward to the W: operands of the products (inputs and gradients of linears)
    backward_bytes      the most that is there in the backward beside what the forward has kept, these operands included
    weight_bytes        the most that is there in the W beside these operands
    """

    own_bytes: int
    shared: Mapping[str, int] = field(default_factory=dict)
    backward_bytes: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True)
class Footprint:
    """Bytes of one segment per micro-batch; see the module. `forward_bytes`: of `transient_bytes`, what the forward needs. `put_off`: when
    weight gradients wait, where that was measured."""

    own_bytes: int
    shared: Mapping[str, int]
    transient_bytes: int
    forward_bytes: int
    put_off: PutOff | None = None

    @property
    def kept_bytes(self) -> int:
        """All that it keeps."""
        return self.own_bytes + sum(self.shared.values())


@dataclass(frozen=True)
class Output:
    """A result: a view of an argument's storage, or of a new one, by number."""

    argument: int | None
    number: int
    num_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Held:
    """Storages that a kind holds, parameters and constants left out: bytes of its own, arguments, new results and gradients of results, all
    by their places."""

    own_bytes: int
    arguments: frozenset[int]
    results: frozenset[int]
    gradients: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Record:
    """What a kind does: results, what it keeps, the moment's need of its forward and backward; and with its weight gradients put off what
    waits, the need of the backward beside what is kept, and of the W beside what waits."""

    outputs: tuple[Output, ...]
    is_tuple: bool
    kept: Held
    forward_bytes: int
    backward_bytes: int
    waiting: Held | None = None
    split_bytes: int = 0
    weight_bytes: int = 0


def storage_id(x: Tensor) -> int:
    """Of the memory that a tensor is a view of."""
    return int(x.untyped_storage()._cdata)


class Trial(Context):
    """A Context whose segments run once per kind; the others are given results of the same shapes. `puts_off`: once more with weight
    gradients put off."""

    def __init__(self, assignment: Assignment, mesh: Mesh, puts_off: bool = False) -> None:
        super().__init__(dry_axes(mesh, 0), "cpu")
        self._segments: Sequence[Segment] = assignment.kinds.graph.segments
        self._puts_off = puts_off
        self._records: dict[str, Record] = {}
        self._names: dict[int, str] = {}
        self._alive: list[Tensor] = []
        self.products = Products()
        self.permanent: set[int] = set()
        self.constant_bytes = 0
        self.footprints: dict[str, Footprint] = {}

    def layer(self, fn: Function, weights: Weights, *args: object) -> Any:
        return self._once(Context.layer, fn, weights, args)

    def recomputed_layer(self, fn: Function, weights: Weights, *args: object) -> Any:
        return self._once(Context.recomputed_layer, fn, weights, args)

    def segment(self, fn: Function, weights: Weights, *args: object) -> Any:
        return self._once(Context.segment, fn, weights, args)

    def _once(self, call: Function, fn: Function, weights: Weights, args: Sequence[object]) -> Any:
        """What a call returns, and the footprint of its segment."""
        assert isinstance(args[-1], int)
        segment = self._segments[args[-1]]
        for x in args:
            if isinstance(x, Tensor) and storage_id(x) not in self.permanent:
                self._name(x, f"input.{len(self._names)}")
        if segment.kind not in self._records:
            self._records[segment.kind] = self._measure(segment.kind, partial(call, self, fn, weights), args)
        record = self._records[segment.kind]
        results = [self._result(output, args) for output in record.outputs]
        new: dict[int, Tensor] = {}
        for output, x in zip(record.outputs, results, strict=True):
            if output.argument is None:
                new.setdefault(output.number, x)
                self._name(x, f"{segment.name}.{output.number}")
        kept, forward = record.kept, record.forward_bytes
        shared, put_off = self._shared(kept, args, new, results), None
        if record.waiting is not None:
            waiting = self._shared(record.waiting, args, new, results)
            put_off = PutOff(record.waiting.own_bytes, waiting, record.split_bytes, record.weight_bytes)
        self.footprints[segment.name] = Footprint(kept.own_bytes, shared, max(forward, record.backward_bytes), forward, put_off)
        return tuple(results) if record.is_tuple else results[0]

    def _shared(
        self, held: Held, args: Sequence[object], new: Mapping[int, Tensor], results: Sequence[Tensor]
    ) -> dict[str, int]:
        """What is held that others may hold too, by name."""
        found = [args[place] for place in sorted(held.arguments)] + [new[n] for n in sorted(held.results)]
        counted = [(x, "") for x in found if isinstance(x, Tensor) and storage_id(x) in self._names]
        counted += [(results[place], "gradient of ") for place in sorted(held.gradients)]
        return {before + self._names[storage_id(x)]: x.untyped_storage().nbytes() for x, before in counted}

    def _name(self, x: Tensor, name: str) -> None:
        if storage_id(x) not in self._names:
            self._names[storage_id(x)] = name
            self._alive.append(x)

    def _result(self, output: Output, args: Sequence[object]) -> Tensor:
        """A tensor such as the segment returns."""
        if output.argument is not None:
            base = args[output.argument]
            assert isinstance(base, Tensor)
            x = torch.as_strided(base.detach(), output.shape, output.strides, output.offset)
        else:
            size = output.num_bytes // output.dtype.itemsize
            x = torch.as_strided(torch.empty(size, dtype=output.dtype), output.shape, output.strides, output.offset)
        return x.requires_grad_(output.requires_grad)

    def _measure(self, kind: str, run: Function, args: Sequence[object]) -> Record:
        """What a segment of a kind does."""
        record = self._run(run, args, split=False)
        if not self._puts_off:
            return record
        split = self._run(run, args, split=True)
        return replace(record, waiting=split.waiting, split_bytes=split.backward_bytes, weight_bytes=split.weight_bytes)

    def _run(self, run: Function, args: Sequence[object], split: bool) -> Record:
        """Forward and backward of a segment. `split`: and then its weight gradients."""
        given = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]
        places = {storage_id(x): i for i, x in reversed(list(enumerate(given))) if isinstance(x, Tensor)}
        saved: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            saved[storage_id(x)] = x.untyped_storage().nbytes()
            return x

        self.on_keep = pack
        with LiveBytes() as live:
            with saved_tensors_hooks(pack, lambda x: x):
                returned = run(*given)
            outputs, is_tuple = (returned, True) if isinstance(returned, tuple) else ((returned,), False)
            found = describe(outputs, places)
            results = {storage_id(x): o.number for x, o in zip(outputs, found, strict=True) if o.argument is None}
            stay = {key: weakref.ref(x.untyped_storage()) for x in outputs if (key := storage_id(x)) in results and key in saved}
            made = {key: size for key, size in saved.items() if key not in self.permanent and key not in places}
            roots = [get_gradient_edge(x) for x in outputs if x.requires_grad]
            gradients = [torch.empty_like(x) for x in outputs if x.requires_grad]
            answered = {storage_id(g): i for g, i in zip(gradients, [i for i, x in enumerate(outputs) if x.requires_grad], strict=True)}
            forward = live.peak
            del returned, outputs
            live.reset_peak()
            none: list[Work] = []
            collecting: AbstractContextManager[list[Work]] = self.products.collecting() if split else nullcontext(none)
            with collecting as work, suppress(*NEED_DATA):
                if roots:
                    torch.autograd.backward(roots, gradients)
            backward, waiting, weight = live.peak, None, 0
            if split:
                results_left = {key: n for key, n in results.items() if key in stay and stay[key]() is not None}
                waiting = self._waiting(work, places, results_left, answered)
                weight = weight_need(work, live)
        keeps = frozenset(places[key] for key in saved if key in places and key not in self.permanent)
        own = sum(size for key, size in made.items() if key not in results)
        kept = Held(own, keeps, frozenset(number for key, number in results.items() if key in saved))
        total = sum(made.values())
        return Record(found, is_tuple, kept, forward - total, backward - total, waiting, 0, weight)

    def _waiting(
        self, work: Sequence[Work], places: Mapping[int, int], results: Mapping[int, int], gradients: Mapping[int, int]
    ) -> Held:
        """What products that were put off read."""
        read = {storage_id(x): x.untyped_storage().nbytes() for one in work for x in one.operands}
        read = {key: size for key, size in read.items() if key not in self.permanent}
        own = sum(size for key, size in read.items() if not (key in places or key in results or key in gradients))
        arguments, made, answers = (frozenset(at[key] for key in read if key in at) for at in (places, results, gradients))
        return Held(own, arguments, made, answers)


class Products(Deferral):
    """Those that read data, as experts' do, are left out: fake tensors have none."""

    def take(self, work: Work) -> None:
        """Keeps or does it."""
        with suppress(*NEED_DATA):
            super().take(work)


def weight_need(work: list[Work], live: LiveBytes) -> int:
    """The most that products which were put off need beside what they read."""
    live.reset_peak()
    before = live.now
    work.reverse()
    with torch.no_grad():
        while work:
            with suppress(*NEED_DATA):
                work.pop().run()
    return live.peak - before


def describe(outputs: Sequence[Tensor], places: Mapping[int, int]) -> tuple[Output, ...]:
    """Results as views of arguments or of new storages. `places`: arguments by storage."""
    numbers: dict[int, int] = {}
    found = []
    for x in outputs:
        place = places.get(storage_id(x))
        number = -1 if place is not None else numbers.setdefault(storage_id(x), len(numbers))
        size = x.untyped_storage().nbytes()
        found.append(Output(place, number, size, tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype, x.requires_grad))
    return tuple(found)


@dataclass
class Measurer:
    """Footprints under some layouts. What was measured is kept. `puts_off`: those of weight gradients that wait too. `constant_bytes`: of
    the whole model's constants, once something was."""

    assignment: Assignment
    mesh: Mesh
    puts_off: bool = False
    constant_bytes: int = 0
    known: dict[tuple[tuple[str, Recomputation], ...], Mapping[str, Footprint]] = field(default_factory=dict, compare=False)

    def measure(self, by_kind: Mapping[str, Recomputation]) -> Mapping[str, Footprint]:
        """Footprints by segment, when of every segment of a kind the same is recomputed."""
        key = tuple((kind, by_kind.get(kind, NOTHING)) for kind in self.assignment.kinds.by_name)
        if key not in self.known:
            self.known[key] = self._measure(by_kind)
        return self.known[key]

    def _measure(self, by_kind: Mapping[str, Recomputation]) -> Mapping[str, Footprint]:
        rt = Trial(self.assignment, self.mesh, self.puts_off)
        run_trial(rt, self.assignment, self.mesh, by_kind)
        self.constant_bytes = rt.constant_bytes
        return settled(rt.footprints)


def run_trial(rt: Trial, assignment: Assignment, mesh: Mesh, by_kind: Mapping[str, Recomputation]) -> None:
    """Runs the whole model's program once, on fake tensors."""
    graph = assignment.kinds.graph
    recomputed = {s.name: by_kind.get(s.kind, NOTHING) for s in graph.segments}
    program = load_program(emit_stage(Staging(assignment, mesh, (graph.segments,), recomputed), 0), 0, Path("<footprint>"))
    with FakeTensorMode():
        weights: dict[str, Tensor] = {}
        for p in graph.parameters:
            shape = assignment.parameter_layout(p.path).local_shape(p.value.shape, mesh)
            weights[p.path] = torch.empty(shape, dtype=getattr(torch, p.value.dtype), requires_grad=p.trainable)
            if p.trainable:
                weights[p.path].grad_dtype = torch.float32
                weights[p.path].grad = torch.empty_like(weights[p.path], dtype=torch.float32, requires_grad=False)
                defer_to(weights[p.path], rt.products)
        inputs = {v.name: torch.empty(v.shape, dtype=getattr(torch, v.dtype)) for v in graph.inputs}
        buffers = {path: torch.empty(v.shape, dtype=getattr(torch, v.dtype)) for v, path in graph.buffers}
        with torch.no_grad():
            constants = program.constants(rt, buffers)
            denominators = [count.float() for count in program.counts(rt, constants, inputs)]
        fixed = [*weights.values(), *inputs.values(), *buffers.values(), *constants.values()]
        rt.permanent = {storage_id(x) for x in fixed}
        rt.constant_bytes = storage_bytes(constants.values())
        program.forward(rt, Weights(weights), constants, inputs, (), denominators)


def constant_bytes(text: str, stage: int, buffers: Mapping[str, Tensor], mesh: Mesh) -> int:
    """Of the folded constants of a stage's program, which the rank keeps."""
    program = load_program(text, stage, Path("<footprint>"))
    with FakeTensorMode(), torch.no_grad():
        given = {name: torch.empty(buffers[name].shape, dtype=buffers[name].dtype) for name in program.buffers}
        made = program.constants(Context(dry_axes(mesh, 0), "cpu"), given)
        return storage_bytes(made.values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of all their storages, each once."""
    return sum({storage_id(x): x.untyped_storage().nbytes() for x in tensors}.values())


def settled(found: Mapping[str, Footprint]) -> dict[str, Footprint]:
    """What one segment alone keeps is its own."""
    kept = settled_parts({segment: (f.own_bytes, f.shared) for segment, f in found.items()})
    waiting = settled_parts({segment: (f.put_off.own_bytes, f.put_off.shared) for segment, f in found.items() if f.put_off is not None})
    settled = {}
    for segment, f in found.items():
        put_off = None if f.put_off is None else replace(f.put_off, own_bytes=waiting[segment][0], shared=waiting[segment][1])
        settled[segment] = replace(f, own_bytes=kept[segment][0], shared=kept[segment][1], put_off=put_off)
    return settled


def settled_parts(parts: Mapping[str, tuple[int, Mapping[str, int]]]) -> dict[str, tuple[int, dict[str, int]]]:
    """Own and shared bytes of each, what nobody else has being its own."""
    holders = Counter(name for _, shared in parts.values() for name in shared)
    return {
        segment: (
            own + sum(size for name, size in shared.items() if holders[name] == 1),
            {name: size for name, size in shared.items() if holders[name] > 1},
        )
        for segment, (own, shared) in parts.items()
    }
