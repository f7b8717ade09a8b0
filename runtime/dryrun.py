"""Dry run of one rank's stage program: forward and backward on fake tensors, for any number of ranks, in one process.

    report = dry_run(program, mesh, rank, parameters, inputs, buffers)

Tensors are given as (shape, dtype name): `parameters` by the model's own path, as this rank holds them; `inputs` by
name, one micro-batch; `buffers` by path. What is checked, each as a one-line InputError that names the program and
what does not fit:

    the program's PARAMETERS, INPUTS and BUFFERS are given
    constants(), counts() and forward() run: every op accepts the shapes it gets, every conversion divides
    what forward returns is what SENDS says (shape, dtype, whether a gradient comes back), or one scalar loss
    backward reaches every trainable parameter, and every received tensor that wants a gradient, in its own shape

The report counts collectives by (axis, collective, "forward" or "backward"), with bytes as in `dry_axes.Tally`. Collectives
that recomputation repeats are backward ones. `saved_bytes` is what autograd keeps from forward to backward besides
parameters, constants and inputs.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.plans.programs import program_name
from meshwright.plans.units import format_bytes
from meshwright.runtime.context import Context, Weights
from meshwright.runtime.dry_axes import Tally, dry_axes
from meshwright.runtime.program import Boundary, Program

Spec = tuple[Sequence[int], str]
PROGRAM_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


@dataclass(frozen=True)
class DryReport:
    """Calls and bytes of collectives by (axis, collective, direction), and bytes saved for backward."""

    rank: int
    stage: int
    calls: Mapping[tuple[str, str, str], int]
    num_bytes: Mapping[tuple[str, str, str], int]
    saved_bytes: int

    def lines(self) -> list[str]:
        """The report in words."""
        found = [f"rank {self.rank}, stage {self.stage}: saves {format_bytes(self.saved_bytes)} per micro-batch"]
        for key, calls in self.calls.items():
            axis, collective, direction = key
            amount = format_bytes(self.num_bytes[key])
            found.append(f"  {direction:8}  {collective:14}  {axis}  {calls} call{'s' if calls > 1 else ''}, {amount}")
        return found


@dataclass
class _Saved:
    """Storages that autograd keeps, each once; `known` ones are not counted."""

    known: set[int]
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self.known:
            self.storages[storage._cdata] = storage
        return x

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def dry_run(
    program: Program,
    mesh: Mesh,
    rank: int,
    parameters: Mapping[str, Spec],
    inputs: Mapping[str, Spec],
    buffers: Mapping[str, Spec],
    *,
    frozen: Collection[str] = (),
) -> DryReport:
    """Run `rank`'s program on fake tensors; `frozen` are the parameters that are not trained. See the module."""
    name = f"programs/{program_name(program.stage)}"
    _check_given(name, "parameter", program.parameters, parameters)
    _check_given(name, "input", program.inputs, inputs)
    _check_given(name, "buffer", program.buffers, buffers)
    tally = Tally()
    rt = Context(dry_axes(mesh, rank, tally), "cpu")
    with _quiet(), FakeTensorMode():
        weights = {p: _empty(parameters[p], p not in frozen) for p in program.parameters}
        given = {i: _empty(inputs[i]) for i in program.inputs}
        received = {b.name: _fresh(b.shape, b.dtype, b.requires_grad) for b in program.receives}
        with _blamed(program, name):
            constants = program.constants(rt, {b: _empty(buffers[b]) for b in program.buffers})
            counts = program.counts(rt, constants, given)
            denominators = tuple(count.to(torch.float32) for count in counts)
        saved = _Saved({t.untyped_storage()._cdata for t in (*weights.values(), *given.values(), *constants.values())})
        rt.on_keep = saved.pack
        with _blamed(program, name), saved_tensors_hooks(saved.pack, lambda x: x):
            outputs = program.forward(rt, Weights(weights), constants, given, tuple(received.values()), denominators)
        roots = _check_outputs(name, outputs, program.sends)
        tally.direction = "backward"
        with _blamed(program, name):
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        _check_gradients(name, "parameter", weights)
        _check_gradients(name, "received tensor", received)
    return DryReport(rank, program.stage, dict(tally.calls), dict(tally.num_bytes), saved.num_bytes)


def _empty(spec: Spec, requires_grad: bool = False) -> Tensor:
    return _fresh(spec[0], getattr(torch, spec[1]), requires_grad)


def _fresh(shape: Sequence[int], dtype: torch.dtype, requires_grad: bool) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, requires_grad=requires_grad and dtype.is_floating_point)


def _check_given(name: str, what: str, wanted: Collection[str], given: Collection[str]) -> None:
    missing = [path for path in wanted if path not in given]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{name}: the program reads {what} {missing[0]}{more}, which the plan does not have")


def _check_outputs(name: str, outputs: object, sends: Sequence[Boundary]) -> list[Tensor]:
    """The outputs that a gradient comes back to."""
    if not isinstance(outputs, tuple) or not all(isinstance(x, Tensor) for x in outputs):
        raise InputError(f"{name}: forward returned {type(outputs).__name__}, not a tuple of tensors")
    wanted = sends or (Boundary("loss", (), outputs[0].dtype if outputs else torch.float32, True),)
    if len(outputs) != len(wanted):
        found = "one scalar loss" if not sends else f"the {len(sends)} tensors of SENDS"
        raise InputError(f"{name}: forward returned {len(outputs)} tensors instead of {found}")
    said = "SENDS says" if sends else "expected"
    for x, want in zip(outputs, wanted, strict=True):
        if tuple(x.shape) != want.shape:
            raise InputError(f"{name}: {want.name} has shape {tuple(x.shape)}, {said} {want.shape}")
        if x.dtype != want.dtype:
            raise InputError(f"{name}: {want.name} has dtype {_dtype(x.dtype)}, {said} {_dtype(want.dtype)}")
        if x.requires_grad != want.requires_grad:
            found, other = ("no gradient", "one") if want.requires_grad else ("a gradient", "none")
            raise InputError(f"{name}: {want.name} has {found}, {said} {other}")
    return [x for x in outputs if x.requires_grad]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_gradients(name: str, what: str, leaves: Mapping[str, Tensor]) -> None:
    for path, x in leaves.items():
        if not x.requires_grad:
            continue
        if x.grad is None:
            raise InputError(f"{name}: backward gives {what} {path} no gradient")
        if x.grad.shape != x.shape:
            raise InputError(f"{name}: {what} {path} has shape {tuple(x.shape)}, its gradient {tuple(x.grad.shape)}")


@contextmanager
def _quiet() -> Iterator[None]:
    """FakeTensors log a traceback for an op that does not fit; the InputError says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _blamed(program: Program, name: str) -> Iterator[None]:
    """Errors of the program as one line, with the line of the program they come from."""
    try:
        yield
    except InputError:
        raise
    except PROGRAM_ERRORS as error:
        file = inspect.getfile(program.forward)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        place = f" line {frames[-1].lineno} `{(frames[-1].line or '').strip()}`" if frames else ""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{name}{place}: {reason}") from error
