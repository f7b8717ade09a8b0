"""From a model and a declaration to a plan: capture, choose, emit.

    compile_plan     MODEL and a Declaration -> CompiledPlan (document, programs, model files)
    plan_captured    the same from a model that is captured already, for another mesh
    check_pipeline   proof that no rank of a plan waits for ever

Choosing (choosing.py) fills the document and nothing else; emission reads the graph and the document and decides nothing. So compiling
from a complete plan repeats it, and compiling from an edited one applies the edits or refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save

from meshwright.choosing import Progress, fit_layouts, with_casts, write_document
from meshwright.compiler.assignment import assign, legal_strategies
from meshwright.compiler.capture import Captured, capture
from meshwright.compiler.decisions import (
    AXIS,
    read_layouts,
    read_parameters,
    settle_regions,
    types_on_axis,
)
from meshwright.compiler.emission.stage import emit_stage
from meshwright.compiler.emission.staging import Staging
from meshwright.compiler.experts import EP, find_regions
from meshwright.compiler.footprint import constant_bytes
from meshwright.compiler.garbage import rare_collections
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.precision import DTYPES
from meshwright.compiler.recomputation import read_recomputed
from meshwright.plans.document import Declaration, PlanDocument
from meshwright.plans.errors import InputError, OverLimitError
from meshwright.plans.programs import program_name, stage_facts
from meshwright.plans.save import save_plan_dir
from meshwright.plans.show import summary
from meshwright.plans.signature import Signature
from meshwright.plans.units import format_bytes
from meshwright.runtime.actions import Schedule
from meshwright.runtime.endless import SETTLED, unrolled
from meshwright.runtime.orders import ASYNCHRONOUS
from meshwright.runtime.schedules import plan_schedule
from meshwright.runtime.soundness import check_schedule
from meshwright.setting import Setting, settle


@dataclass(frozen=True)
class CompiledPlan:
    """A plan in memory: the document, program texts by file name, and files for model/ by name.

    weights  parameters to save beside the plan, when the model was given as a module object and has no other home
    search   what --devices found, in lines
    """

    document: PlanDocument
    programs: Mapping[str, str]
    model_files: Mapping[str, bytes]
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    search: tuple[str, ...] = ()

    def save(self, directory: str | Path) -> None:
        """Writes the plan directory, whole or not at all."""
        files = dict(self.model_files)
        if self.weights:
            files["weights.safetensors"] = save({n: t.detach().contiguous().cpu() for n, t in self.weights.items()})
        save_plan_dir(directory, self.document, self.programs, files)

    def summary(self) -> str:
        """The plan in a few lines."""
        return "\n".join((*self.search, summary(self.document)))


def compile_plan(
    model: str | torch.nn.Module,
    *,
    example: Mapping[str, object] | None = None,
    declaration: Declaration | None = None,
    progress: Progress | None = None,
) -> CompiledPlan:
    """Capture, choose what the declaration leaves open, emit. InputError for what cannot be had."""
    tell = progress or (lambda text: None)
    setting = settle(declaration or Declaration())
    tell("capturing the model")
    captured = capture(
        model,
        dict(example) if example is not None else None,
        task=setting.declaration.task,
        seq=setting.seq,
        micro_batch=setting.micro_batch,
        attention=setting.declaration.attention or "sdpa",
        dtype=DTYPES[setting.declaration.precision or "fp32"],
    )
    return with_weights(plan_captured(captured, setting, tell), captured, model)


def with_weights(compiled: CompiledPlan, captured: Captured, model: str | torch.nn.Module) -> CompiledPlan:
    """The plan with the weights of a model that was given as an object."""
    if not isinstance(model, torch.nn.Module):
        return compiled
    named = dict(model.named_parameters(remove_duplicate=False))
    signature = Signature.model_validate(captured.signature)
    return replace(compiled, weights={path: named[path] for path in (*signature.parameters, *signature.unused)})


@rare_collections()
def plan_captured(captured: Captured, setting: Setting, tell: Progress) -> CompiledPlan:
    """Chooses and emits for a captured model; it must have been captured for the setting's sequence and micro-batch."""
    graph, precision_ops = with_casts(captured, setting.declaration)
    kinds = Kinds(graph)
    tell("choosing layouts")
    document = fit(captured, kinds, precision_ops, setting, tell)
    tell("emitting programs")
    programs = emit(kinds, document)
    check_pipeline(document, programs)
    return CompiledPlan(with_buffers(document, programs, captured), programs, model_files(captured))


def fit(captured: Captured, kinds: Kinds, precision_ops: Mapping[str, str], setting: Setting, tell: Progress) -> PlanDocument:
    """Decisions that hold to the memory limit with what only a whole plan knows: padded buckets, ZeRO's gathers, sums over dp. By how much
    these exceed it is kept free when it is all chosen again. OverLimitError when nothing fits."""
    limit, reserve = setting.memory_limit, 0
    while True:
        try:
            chosen, pricing, choice = fit_layouts(kinds, setting.with_less_memory(reserve), tell)
        except OverLimitError as error:
            if not reserve:
                raise
            kept = f"{format_bytes(reserve)} of {format_bytes(limit or 0)} are kept free for padded buckets, gathers and sums over dp"
            raise OverLimitError(f"{error} ({kept})") from None
        document = write_document(captured, chosen, choice, setting, pricing, precision_ops)
        excess = max(map(document.memory_of, range(setting.mesh.pp))) - (limit or 0)
        if limit is None or excess <= 0:
            return document
        reserve += excess


def with_buffers(document: PlanDocument, programs: Mapping[str, str], captured: Captured) -> PlanDocument:
    """The plan with the bytes of the constants that its programs keep."""
    stages = []
    for number, stage in enumerate(document.stages):
        size = constant_bytes(programs[program_name(number)], number, captured.buffers, document.mesh)
        stages.append(stage.model_copy(update={"memory": stage.memory.model_copy(update={"buffers": size})}))
    return document.model_copy(update={"stages": tuple(stages)})


def emit(kinds: Kinds, document: PlanDocument) -> dict[str, str]:
    """Programs by file name, from the graph and the document alone."""
    results = read_layouts(kinds, document.kinds)
    parameters = read_parameters(kinds, document.parameter_layouts)
    ranks = document.mesh.size(EP)
    regions = settle_regions(kinds, find_regions(kinds, ranks), results, parameters, ranks)
    legal = legal_strategies(kinds, AXIS, document.mesh.size(AXIS), document.sequence_parallel != "off", regions)
    assignment = assign(kinds, legal, types_on_axis(results), types_on_axis(parameters), regions)
    cut = tuple(tuple(s for s in kinds.graph.segments if s.name in set(names)) for names in document.stage_segments)
    staging = Staging(assignment, document.mesh, cut, read_recomputed(kinds, document.recomputed))
    return {program_name(k): emit_stage(staging, k) for k in range(len(cut))}


def check_pipeline(document: PlanDocument, programs: Mapping[str, str]) -> Schedule:
    """The schedule of a plan, proved to run with its programs on its mesh. UnsoundError, with the grid, when it cannot."""
    schedule = plan_schedule(document, document.num_micro_batches)
    names = [program_name(stage) for stage in range(len(document.stages))]
    if missing := next((name for name in names if name not in programs), None):
        raise InputError(f"plan.yaml: programs: {missing} is missing; compile again with --from")
    facts = [stage_facts(programs[name], Path("programs") / name) for name in names]
    check_schedule(schedule, facts, document.mesh)
    if document.schedule == ASYNCHRONOUS:
        batch = document.num_micro_batches
        check_schedule(unrolled(document.mesh.pp, batch, SETTLED), facts, document.mesh, batch)
    return schedule


def model_files(captured: Captured) -> dict[str, bytes]:
    """Files of model/: the signature, buffers that constants read, the configuration."""
    files = {"signature.json": Signature.model_validate(captured.signature).to_json().encode()}
    files["buffers.safetensors"] = save({n: t.detach().contiguous() for n, t in captured.buffers.items()})
    if captured.config_json is not None:
        files["config.json"] = captured.config_json.encode()
    return files
