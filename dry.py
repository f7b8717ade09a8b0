"""One rank's programs of a plan directory on fake tensors, for any world size: `meshwright check --rank R`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from meshwright.compiler.precision import DTYPES
from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.programs import program_name
from meshwright.plans.save import load_checked, load_program, load_programs
from meshwright.plans.signature import Signature
from meshwright.runtime.dryrun import DryReport, dry_run
from meshwright.runtime.program import load_program as load_stage


def dry_run_rank(plan_dir: str | Path, rank: int) -> tuple[DryReport, ...]:
    """Runs one rank's programs on fake tensors, one report per stage. InputError for a bad plan, a rank off the mesh, or a program
    that does not fit."""
    document, signature = load_checked(plan_dir)
    load_programs(plan_dir, document)
    try:
        coordinate = document.mesh.coordinates(rank)["pp"]
    except ValueError as error:
        raise InputError(str(error)) from None
    return tuple(dry_run_stage(Path(plan_dir), document, signature, rank, stage) for stage in document.stages_of(coordinate))


def dry_run_stage(plan_dir: Path, document: PlanDocument, signature: Signature, rank: int, stage: int) -> DryReport:
    """Runs one stage's program on fake tensors, as a rank has it."""
    name = program_name(stage)
    program = load_stage(load_program(plan_dir, document, name), stage, plan_dir / "programs" / name)
    layouts = document.parameter_layouts
    parameters = {
        p: (layouts[p].local_shape(signature.parameters[p].shape, document.mesh), held_dtype(signature.parameters[p].dtype, document))
        for p in program.parameters
    }
    file = plan_dir / "model" / "buffers.safetensors"
    try:
        with safe_open(file, framework="pt") as buffers:
            shapes = {n: (tuple(buffers.get_tensor(n).shape), dtype_name(buffers.get_tensor(n))) for n in buffers.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: cannot be read: {error}; compile again with --from") from None
    return dry_run(
        program,
        document.mesh,
        rank,
        parameters,
        {i.name: (i.shape, i.dtype) for i in signature.inputs},
        shapes,
        frozen=[p for p, spec in signature.parameters.items() if not spec.trainable],
    )


def held_dtype(dtype: str, document: PlanDocument) -> str:
    """The dtype that programs have a parameter in: FP32 ones are 16-bit in a 16-bit plan."""
    return DTYPES[document.precision] if dtype == "float32" else dtype


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
