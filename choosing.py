"""Decides: layouts, recomputation, schedule and stages for a captured model, and the plan document that says so.

    fit_layouts      layouts and stages that fit the memory limit, the declaration's as pins
    choose           layouts alone
    pipeline         schedule and stages for chosen layouts
    with_casts       the graph in the plan's precision
    write_document   all decisions and predictions as the plan

Nothing here touches the graph or emits. passes/ has the solvers; this module puts together what they are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

from meshwright.compiler.assignment import Assignment, Legal, OpClass, assign, legal_strategies
from meshwright.compiler.capture import Captured
from meshwright.compiler.capture.source import CUSTOM
from meshwright.compiler.decisions import (
    AXIS,
    layouts_of,
    read_layouts,
    read_parameters,
    settle_regions,
    types_on_axis,
    write_layouts,
)
from meshwright.compiler.experts import EP, Region, find_regions
from meshwright.compiler.footprint import Measurer
from meshwright.compiler.graph import Graph
from meshwright.compiler.independence import unproved_ops
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.recomputation import read_recomputed
from meshwright.passes.choose_layouts import LayoutPins, LayoutProblem, choose_layouts, module_pattern
from meshwright.passes.choose_precision import settle_precision
from meshwright.passes.choose_regions import Regions
from meshwright.passes.choose_schedule import DEFAULT, SYNTHESISED, Pipeline, ScheduleChoice, choose_schedule, may_put_off
from meshwright.passes.choose_stages import StageChoice
from meshwright.passes.pins import STAGES, pin_names, settle_pins
from meshwright.passes.segment_costs import Pricing, collective_seconds, kept_of_segments, recomputed_of, segment_costs, segment_parameters
from meshwright.passes.state_memory import with_state_memory
from meshwright.plans.document import Declaration, PlanDocument, validate
from meshwright.plans.errors import InputError, OverLimitError
from meshwright.plans.layout import I, Layout, Type
from meshwright.plans.patterns import compress, compress_mapping, expand_all, expand_mapping
from meshwright.plans.precision import ITEM_BYTES
from meshwright.plans.reading import read_plan
from meshwright.plans.signature import Signature
from meshwright.runtime.schedules import read_actions
from meshwright.setting import DEFAULT_HARDWARE, Setting

Progress = Callable[[str], None]
MEMORY_PRICES = tuple(10.0**n for n in range(-14, -5))
"""Seconds per byte that are tried, from what no layout minds to what decides alone."""
PRICE_HALVINGS = 3


def row_notes(kinds: Kinds, setting: Setting) -> tuple[str, ...]:
    """What is not known of the rows of a batch, when a step has several micro-batches."""
    if setting.global_batch == setting.micro_batch:
        return ()
    places = {module_pattern(kinds, c, kinds.op(*c).module): target for c, target in unproved_ops(kinds).items()}
    why = "may mix rows of a batch, so that micro-batches are not proved exact; run verify"
    return tuple(f"{where}: {target} {why}" for where, target in places.items())


@dataclass(frozen=True)
class Chosen:
    """Layouts of a model, what is to be said of them, and which were given."""

    assignment: Assignment
    notes: tuple[str, ...]
    pins: LayoutPins


def fit_layouts(kinds: Kinds, setting: Setting, tell: Progress) -> tuple[Chosen, Pricing, ScheduleChoice]:
    """Layouts and stages: the fastest layouts, or, where stages with these exceed the memory limit, those of the least price of memory
    whose stages fit. OverLimitError when none do."""

    def planned(memory_price: float) -> tuple[Chosen, Pricing, ScheduleChoice]:
        chosen = choose(kinds, setting, memory_price)
        pricing = priced(chosen.assignment, setting)
        tell("cutting pipeline stages")
        return chosen, pricing, pipeline(pricing, setting)

    try:
        return planned(0.0)
    except OverLimitError as error:
        if setting.mesh.size(AXIS) == 1:
            raise
        reason = error
    tell("choosing layouts that keep less")
    found: list[tuple[Chosen, Pricing, ScheduleChoice]] = []
    cheap = dear = 0.0
    for price in MEMORY_PRICES:
        try:
            found.append(planned(price))
            dear = price
            break
        except OverLimitError as error:
            reason, cheap = error, price
    if not found:
        raise reason
    for _ in range(PRICE_HALVINGS):
        price = (cheap * dear) ** 0.5 if cheap else dear / 2
        try:
            found.append(planned(price))
            dear = price
        except OverLimitError:
            cheap = price
    chosen, pricing, choice = min(found, key=lambda plan: plan[2].stages.step_s)
    note = "memory_limit: the fastest layouts do not fit; these keep less"
    return replace(chosen, notes=(*chosen.notes, note)), pricing, choice


def priced(assignment: Assignment, setting: Setting) -> Pricing:
    """How segments are priced under chosen layouts; what a declaration lists as recomputed is."""
    declared = setting.declaration
    regions = Regions(Measurer(assignment, setting.mesh, may_put_off(declared.schedule or DEFAULT)), setting.hardware)
    given = None if declared.recomputed is None else read_recomputed(assignment.kinds, declared.recomputed)
    return Pricing(assignment, setting.mesh, setting.hardware, regions, declared.recompute or "none", given)


def choose(kinds: Kinds, setting: Setting, memory_price: float = 0.0) -> Chosen:
    """Chosen layouts with the declaration's as pins. `memory_price`: seconds charged for a byte that a rank keeps."""
    problem, regions, notes = layout_problem(kinds, setting)
    problem = replace(problem, memory_price=memory_price)
    notes = (*notes, *row_notes(kinds, setting))
    if problem.legal.ranks == 1:
        return Chosen(trivial(kinds, problem.legal, problem.pins, regions), notes, problem.pins)

    def free(pins: LayoutPins) -> tuple[Mapping[OpClass, Type], Mapping[str, Type]]:
        found = choose_layouts(replace(problem, pins=pins))
        return found.results, found.parameters

    choice = choose_layouts(problem)
    pins = settle_pins(kinds, setting.declaration.pinned, problem.pins, free)
    assignment = assign(kinds, problem.legal, choice.results, choice.parameters, regions)
    return Chosen(assignment, (*notes, *choice.notes), pins)


def layout_problem(
    kinds: Kinds, setting: Setting
) -> tuple[LayoutProblem, dict[str, tuple[Region, ...]], tuple[str, ...]]:
    """What layouts are chosen from, with the declaration's as pins; experts come first, for what they fix on the other axis."""
    declared = setting.declaration
    results = read_layouts(kinds, declared.kinds or {})
    parameters = read_parameters(kinds, expand_mapping(declared.parameters or {}))
    regions, notes = choose_regions(kinds, setting, results, parameters)
    problem = LayoutProblem(
        kinds,
        legal_strategies(kinds, AXIS, setting.mesh.size(AXIS), declared.sequence_parallel != "off", regions),
        setting.hardware,
        setting.hardware.link_for(AXIS, setting.mesh),
        setting.micro_batches,
        declared.sequence_parallel or "auto",
        LayoutPins(types_on_axis(results), types_on_axis(parameters)),
        in_flight=min(setting.micro_batches, (setting.mesh.pp + 1) / 2),
    )
    return problem, regions, notes


def choose_regions(
    kinds: Kinds, setting: Setting, results: Mapping[OpClass, Layout], parameters: Mapping[str, Layout]
) -> tuple[dict[str, tuple[Region, ...]], tuple[str, ...]]:
    """Experts that are spread over ep: all that can be, unless the declaration says otherwise; and why others are not."""
    ranks = setting.mesh.size(EP)
    legal = find_regions(kinds, ranks)
    regions = settle_regions(kinds, legal, results, parameters, ranks)
    if ranks == 1:
        return regions, ()
    if not legal.by_kind:
        why = legal.reasons[0] if legal.reasons else "the model has no expert weights that a grouped or batched product reads"
        raise InputError(f"mesh: {EP}={ranks} spreads whole experts over ranks, and none can be: {why}; use {EP}=1")
    return regions, tuple(f"{reason}; these experts are whole on every {EP} rank" for reason in legal.reasons)


def trivial(kinds: Kinds, legal: Legal, pins: LayoutPins, regions: Mapping[str, tuple[Region, ...]]) -> Assignment:
    """On an axis of one rank everything is whole; layouts pinned for a larger one cannot be kept."""
    keys = {f"kinds.{k}.layouts.{'.'.join(kinds.keys[k][p])}": t for (k, p), t in pins.results.items()}
    from_pins = {**keys, **{f"parameters.{path}": t for path, t in pins.parameters.items()}}
    for where, type_ in from_pins.items():
        if type_.kind != "I":
            raise InputError(f"plan.yaml: {where}: {type_}@{AXIS} is pinned but the mesh has {AXIS}=1; leave layouts out or use I")
    results = {op_class: options[0].results[0] for op_class, options in legal.strategies.items()}
    return assign(kinds, legal, results, {p.path: I for p in kinds.graph.parameters}, regions)


def pipeline(pricing: Pricing, setting: Setting) -> ScheduleChoice:
    """Schedule and stages by modelled time and memory, pinned cuts kept."""
    declared = setting.declaration
    pinned = tuple(expand_all(s.layers) for s in declared.stages) if declared.stages is not None else None
    choice = choose_schedule(
        segment_costs(pricing),
        Pipeline(
            setting.mesh,
            setting.micro_batches,
            declared.schedule or DEFAULT,
            declared.chunks,
            setting.memory_limit,
            pinned,
            setting.hardware.link_for("pp", setting.mesh),
            declared.zero or 0,
            setting.hardware.link_for("dp", setting.mesh),
            read_actions(declared.actions) if declared.actions is not None else None,
            (ITEM_BYTES[declared.precision or "fp32"], ITEM_BYTES[declared.reduce_dtype or "fp32"]),
        ),
    )
    if declared.stage_ranks not in (None, choice.stage_ranks):
        expected = " ".join(map(str, choice.stage_ranks))
        raise InputError(f"plan.yaml: stage_ranks: expected {expected}, which is how {choice.name} deals stages; or leave it out")
    return choice


def write_document(
    captured: Captured,
    chosen: Chosen,
    choice: ScheduleChoice,
    setting: Setting,
    pricing: Pricing,
    precision_ops: Mapping[str, str],
) -> PlanDocument:
    """All decisions and predictions as the plan."""
    collectives, costs = collective_seconds(pricing), segment_costs(pricing)
    declared, assignment, kinds = setting.declaration, chosen.assignment, chosen.assignment.kinds
    signature = Signature.model_validate(captured.signature)
    document = read_plan({
        "schema": 1,
        "model": {
            "source": captured.source.source,
            "kind": captured.source.kind,
            "parameters": sum(prod(p.shape) for p in (*signature.parameters.values(), *signature.unused.values())),
        },
        "task": captured.source.task or CUSTOM,
        "attention": captured.source.attention,
        "seed": declared.seed or 0,
        "mesh": dict(setting.mesh.sizes()),
        "hardware": declared.hardware or DEFAULT_HARDWARE,
        "memory_limit": declared.memory_limit,
        "seq": setting.seq,
        "micro_batch": setting.micro_batch,
        "global_batch": setting.global_batch,
        "precision": declared.precision or "fp32",
        "precision_ops": precision_ops,
        "reduce_dtype": declared.reduce_dtype or "fp32",
        "zero": declared.zero or 0,
        "recompute": declared.recompute or "none",
        "schedule": choice.name,
        "chunks": choice.chunks,
        "stage_ranks": list(choice.stage_ranks) if choice.chunks > 1 else None,
        "actions": [" ".join(map(str, actions)) for actions in choice.stages.order] if choice.name == SYNTHESISED else None,
        "sequence_parallel": declared.sequence_parallel or "auto",
        "stages": [
            {
                "layers": compress(s.segments),
                "forward_s": s.forward_s,
                "backward_s": s.backward_s,
                "backward_weight_s": s.weight_s,
                "memory": s.memory.model_dump(),
            }
            for s in choice.stages.stages
        ],
        "parameters": compress_mapping(layouts_of(assignment)),
        "kinds": {
            name: {"segments": compress([s.name for s in kind.members]), "layouts": write_layouts(assignment, name)}
            for name, kind in kinds.by_name.items()
        },
        "recomputed": recomputed_of(pricing, costs, choice.stages.stages),
        "pinned": [*stage_pins(choice.stages, pricing, setting), *pin_names(kinds, chosen.pins)],
        "notes": [*captured.graph.notes, *chosen.notes],
        "predicted": {
            **predicted(choice.stages, setting),
            "collectives": {n: t * setting.micro_batches for n, t in collectives.items()},
            "activations": compress_mapping(kept_of_segments(costs, choice.stages.stages)),
        },
    })
    validate(document, signature)
    reads = {s.name: [path for path, _ in segment_parameters(pricing, s)] for s in kinds.graph.segments}
    return with_state_memory(document, signature, reads)


def stage_pins(stages: StageChoice, pricing: Pricing, setting: Setting) -> tuple[str, ...]:
    """STAGES where the cuts were given: in a plan that names its pins, where it names them or they are not the solver's."""
    declared = setting.declaration
    if declared.stages is None:
        return ()
    if declared.pinned is None or STAGES in declared.pinned:
        return (STAGES,)
    free = pipeline(pricing, replace(setting, declaration=declared.model_copy(update={"stages": None})))
    return () if [s.segments for s in free.stages.stages] == [s.segments for s in stages.stages] else (STAGES,)


def predicted(stages: StageChoice, setting: Setting) -> dict[str, float]:
    """Step time and bubble of the schedule on the chosen stages."""
    tokens = setting.global_batch * setting.seq
    tokens_per_s = tokens / stages.step_s if stages.step_s else 0.0
    return {"step_s": stages.step_s, "tokens_per_s": tokens_per_s, "bubble": stages.bubble}


def with_casts(captured: Captured, declaration: Declaration) -> tuple[Graph, Mapping[str, str]]:
    """The graph in the declared precision, and in what type its ops compute."""
    return settle_precision(captured.graph, declaration.precision or "fp32", declaration.precision_ops)
