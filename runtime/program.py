"""Stage programs: the text in PLAN_DIR/programs, checked against its digest and bound to its names.

A program is a Python module with these names (compiler/emit writes it, the engine calls it):

    PARAMETERS           patterns of the parameters' names
    RECEIVES, SENDS      tensors from the previous and to the next stage: (name, local shape, dtype, requires_grad) each
    INPUTS, BUFFERS      model inputs and model buffers that it reads
    constants(rt, buffers) -> dict[str, Tensor]           once, at load
    counts(rt, constants, inputs) -> tuple[Tensor, ...]   loss targets of one micro-batch, int64, one per denominator
    forward(rt, weights, constants, inputs, received, denominators) -> tuple[Tensor, ...]
                         SENDS, or this micro-batch's part of the loss on the last stage

`load_program` executes the text; `stage_parameters` only reads PARAMETERS, so that a rank knows what other stages hold.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.plans.patterns import expand_all
from meshwright.runtime.context import Context, Weights

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Boundary:
    """A tensor between two stages, as one rank has it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Program:
    """A stage's program; see the module."""

    stage: int
    parameters: tuple[str, ...]
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    inputs: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: Callable[[Context, Tensors], Tensors]
    counts: Callable[[Context, Tensors, Tensors], tuple[Tensor, ...]]
    forward: Callable[[Context, Weights, Tensors, Tensors, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]


def load_program(text: str, stage: int, path: Path) -> Program:
    """Program of a stage from its text; `path` is where tracebacks point."""
    module = ModuleType(f"meshwright_stage_{stage}")
    module.__file__ = str(path)
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    exec(compile(text, str(path), "exec"), module.__dict__)  # noqa: S102 - its digest has been checked
    names = vars(module)
    needed = ("PARAMETERS", "RECEIVES", "SENDS", "INPUTS", "BUFFERS", "constants", "counts", "forward")
    if missing := [name for name in needed if name not in names]:
        raise InputError(f"{path}: defines no {', '.join(missing)}; compile again with --from")
    return Program(
        stage,
        expand_all(names["PARAMETERS"]),
        tuple(_boundary(*spec) for spec in names["RECEIVES"]),
        tuple(_boundary(*spec) for spec in names["SENDS"]),
        tuple(names["INPUTS"]),
        tuple(names["BUFFERS"]),
        names["constants"],
        names["counts"],
        names["forward"],
    )


def _boundary(name: str, shape: Sequence[int], dtype: str, requires_grad: bool) -> Boundary:
    return Boundary(name, tuple(shape), cast(torch.dtype, getattr(torch, dtype)), requires_grad)
