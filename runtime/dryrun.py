"""Dry run of one rank's stage program: forward and backward on fake tensors, for any number of ranks, in one process.

    report = dry_run(program, mesh, rank, parameters, inputs, buffers)

`program` is a loaded stage module. Tensors are given as (shape, dtype name): `parameters` by the model's own path, as
this rank holds them; `inputs` by name, one micro-batch; `buffers` by path. What is checked, each as a one-line
InputError that names the program and what does not fit:

    the program's PARAMETERS, INPUTS and BUFFERS are given
    constants(), counts() and forward() run: every op accepts the shapes it gets, every conversion divides
    what forward returns is what SENDS says (shape, dtype, whether a gradient comes back), or one scalar loss
    backward reaches every trainable parameter, and every received tensor that wants a gradient, in its own shape

The report counts collectives by (axis, collective, "forward" or "backward"), with bytes as in `axes.Tally`. Collectives
that recomputation repeats are backward ones. `saved_bytes` is what autograd keeps from forward to backward besides
parameters, constants and inputs.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.plans.patterns import expand_all
from meshwright.runtime.axes import Tally, dry_axes
from meshwright.runtime.context import Context, Weights

Spec = tuple[Sequence[int], str]
Boundary = tuple[str, Sequence[int], str, bool]
PROGRAM_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


@dataclass(frozen=True)
class DryReport:
    """Calls and bytes of collectives by (axis, collective, direction); bytes saved for backward; number of counts."""

    calls: Mapping[tuple[str, str, str], int]
    num_bytes: Mapping[tuple[str, str, str], int]
    saved_bytes: int
    num_counts: int


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
    program: ModuleType,
    mesh: Mesh,
    rank: int,
    parameters: Mapping[str, Spec],
    inputs: Mapping[str, Spec],
    buffers: Mapping[str, Spec],
    *,
    frozen: Collection[str] = (),
    recompute: str = "none",
) -> DryReport:
    """Run `rank`'s program on fake tensors; `frozen` are the parameters that are not trained. See the module."""
    name = program.__name__.rpartition(".")[2]
    _check_given(name, "parameter", expand_all(program.PARAMETERS), parameters)
    _check_given(name, "input", program.INPUTS, inputs)
    _check_given(name, "buffer", program.BUFFERS, buffers)
    tally = Tally()
    rt = Context(dry_axes(mesh, rank, tally), "cpu", recompute=recompute)
    with _quiet(), FakeTensorMode():
        weights = {p: _empty(parameters[p], p not in frozen) for p in expand_all(program.PARAMETERS)}
        given = {i: _empty(inputs[i]) for i in program.INPUTS}
        received = tuple(_empty((shape, dtype), grad) for _, shape, dtype, grad in program.RECEIVES)
        with _blamed(program, name):
            constants = program.constants(rt, {b: _empty(buffers[b]) for b in program.BUFFERS})
            counts = program.counts(rt, constants, given)
            denominators = tuple(count.to(torch.float32) for count in counts)
        saved = _Saved({t.untyped_storage()._cdata for t in (*weights.values(), *given.values(), *_tensors(constants))})
        with _blamed(program, name), saved_tensors_hooks(saved.pack, lambda x: x):
            outputs = program.forward(rt, Weights(weights), constants, given, received, denominators)
        roots = _check_outputs(name, outputs, program.SENDS)
        tally.direction = "backward"
        with _blamed(program, name):
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        _check_gradients(name, "parameter", weights)
        names = [value for value, *_ in program.RECEIVES]
        _check_gradients(name, "received tensor", dict(zip(names, received, strict=True)))
    return DryReport(dict(tally.calls), dict(tally.num_bytes), saved.num_bytes, len(counts))


def _empty(spec: Spec, requires_grad: bool = False) -> Tensor:
    shape, dtype = spec
    x = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
    return x.requires_grad_(requires_grad and x.is_floating_point())


def _tensors(constants: Mapping[str, object]) -> Iterator[Tensor]:
    return (x for x in constants.values() if isinstance(x, Tensor))


def _check_given(name: str, what: str, wanted: Collection[str], given: Collection[str]) -> None:
    missing = [path for path in wanted if path not in given]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{name}: the program reads {what} {missing[0]}{more}, which the plan does not have")


def _check_outputs(name: str, outputs: object, sends: Sequence[Boundary]) -> list[Tensor]:
    """The outputs that a gradient comes back to."""
    if not isinstance(outputs, tuple) or not all(isinstance(x, Tensor) for x in outputs):
        raise InputError(f"{name}: forward returned {type(outputs).__name__}, not a tuple of tensors")
    wanted = sends or (("loss", (), "", True),)
    if len(outputs) != len(wanted):
        found = "one scalar loss" if not sends else f"the {len(sends)} tensors of SENDS"
        raise InputError(f"{name}: forward returned {len(outputs)} tensors instead of {found}")
    for x, (value, shape, dtype, grad) in zip(outputs, wanted, strict=True):
        if tuple(x.shape) != tuple(shape):
            raise InputError(f"{name}: {value} has shape {tuple(x.shape)}, SENDS says {tuple(shape)}")
        if dtype and x.dtype != getattr(torch, dtype):
            raise InputError(f"{name}: {value} has dtype {str(x.dtype).removeprefix('torch.')}, SENDS says {dtype}")
        if x.requires_grad != grad:
            found, said = ("no gradient", "it has one") if grad else ("a gradient", "it has none")
            raise InputError(f"{name}: {value} has {found}, SENDS says {said}")
    return [x for x in outputs if x.requires_grad]


def _check_gradients(name: str, what: str, leaves: Mapping[str, Tensor]) -> None:
    for path, x in leaves.items():
        if not x.requires_grad:
            continue
        if x.grad is None:
            raise InputError(f"{name}: backward gives {what} {path} no gradient")
        if x.grad.shape != x.shape:
            raise InputError(
                f"{name}: {what} {path} has shape {tuple(x.shape)}, but its gradient {tuple(x.grad.shape)}"
            )


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
def _blamed(program: ModuleType, name: str) -> Iterator[None]:
    """Errors of the program as one line, with the line of the program they come from."""
    try:
        yield
    except InputError:
        raise
    except PROGRAM_ERRORS as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == program.__file__]
        place = f" line {frames[-1].lineno} `{(frames[-1].line or '').strip()}`" if frames else ""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{name}{place}: {reason}") from error
