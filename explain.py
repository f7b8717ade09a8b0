"""Why a plan is as it is: `explain_plan(PLAN_DIR, NAME)`, behind `meshwright explain`.

NAME is a parameter (model.layers.3.mlp.up_proj.weight), an op by its kind or by any layer (layer.mlp.up_proj.linear,
model.layers.3.mlp.up_proj), a segment (model.layers.3, head), or a stage (stage_1).

The model is captured again and the plan is priced as it stands. Each alternative is then forced, everything else that is not pinned is
chosen anew, and the two plans are compared; so what an alternative costs includes what it drags along. What no rule allows is
listed with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path

from meshwright.choosing import choose, layout_problem, pipeline, priced, with_casts
from meshwright.compiler.assignment import Assignment, OpClass, assign
from meshwright.compiler.capture import capture
from meshwright.compiler.costs import conversion_s
from meshwright.compiler.decisions import AXIS
from meshwright.compiler.flops import value_bytes
from meshwright.compiler.graph import Parameter, Segment
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.labels import label_values
from meshwright.compiler.precision import DTYPES
from meshwright.passes.choose_layouts import LayoutPins, choose_layouts, parameter_class, storage_types
from meshwright.passes.choose_stages import SegmentCost, StageChoice
from meshwright.passes.explain import (
    Alternative,
    Explanation,
    Outcome,
    Row,
    op_costs,
    parameter_types,
    result_types,
    segment_split,
)
from meshwright.passes.pins import STAGES, marked_pins, op_names
from meshwright.passes.segment_costs import Pricing, collective_seconds, segment_costs
from meshwright.passes.step_end import OPTIMIZER_PER_PARAMETER
from meshwright.plans.document import PlanDocument, StageDeclaration
from meshwright.plans.errors import InputError
from meshwright.plans.layout import I, R, Type
from meshwright.plans.patterns import expand
from meshwright.plans.reading import read_declaration
from meshwright.plans.save import PLAN_FILE, load_checked
from meshwright.plans.units import format_bytes, format_seconds
from meshwright.plans.yaml_io import load
from meshwright.setting import Setting, settle

Progress = Callable[[str], None]
Cuts = tuple[tuple[str, ...], ...]


def explain_plan(plan_dir: str | Path, name: str, progress: Progress | None = None) -> Explanation:
    """What was chosen for a name and why. InputError for a name that the plan does not have."""
    tell = progress or (lambda text: None)
    document, _ = load_checked(plan_dir)
    declaration = read_declaration(load(Path(plan_dir) / PLAN_FILE), {}, PLAN_FILE)
    setting = settle(declaration)
    tell("capturing the model")
    captured = capture(
        document.model.source,
        None,
        task=document.task,
        seq=document.seq,
        micro_batch=document.micro_batch,
        attention=document.attention,
        dtype=DTYPES[document.precision],
    )
    tell("pricing alternatives")
    return Explainer(document, setting, Kinds(with_casts(captured, setting.declaration)[0])).explain(name)


def first_of(pattern: str) -> str:
    """The first name that a pattern stands for; InputError for what is no pattern."""
    try:
        return expand(pattern)[0]
    except ValueError as problem:
        raise InputError(f"NAME: {problem}") from None


def on_axis(type_: Type) -> str:
    """A type as a layout is written."""
    return "I" if type_ == I else f"{type_}@{AXIS}"


@dataclass(frozen=True)
class Explainer:
    """A plan with the graph that it was made for."""

    document: PlanDocument
    setting: Setting
    kinds: Kinds

    @cached_property
    def given(self) -> LayoutPins:
        """Every layout of the plan."""
        problem, _, _ = layout_problem(self.kinds, self.setting)
        return problem.pins

    @cached_property
    def marked(self) -> LayoutPins:
        """The layouts that were pinned."""
        return marked_pins(self.kinds, self.document.pinned, self.given)

    @cached_property
    def free(self) -> Setting:
        """The setting with pinned stages alone."""
        return self.with_stages(self.document.stage_segments if STAGES in self.document.pinned else None)

    @cached_property
    def pricing(self) -> Pricing:
        """The plan as it stands."""
        return self.priced(choose(self.kinds, self.setting).assignment)

    @cached_property
    def segments(self) -> tuple[SegmentCost, ...]:
        return segment_costs(self.pricing)

    @cached_property
    def stages(self) -> StageChoice:
        return pipeline(self.pricing, self.setting).stages

    @cached_property
    def outcome(self) -> Outcome:
        return self.outcome_of(self.pricing, self.setting)

    def with_stages(self, cuts: Cuts | None) -> Setting:
        """The setting with other cuts, or none."""
        stages = tuple(StageDeclaration(layers=names) for names in cuts) if cuts else None
        return replace(self.setting, declaration=self.setting.declaration.model_copy(update={"stages": stages}))

    def priced(self, assignment: Assignment) -> Pricing:
        """An assignment on this machine."""
        return priced(assignment, self.setting)

    def outcome_of(self, pricing: Pricing, setting: Setting) -> Outcome:
        """What a step of a plan takes and needs."""
        stages = pipeline(pricing, setting).stages
        times = {n: t * setting.micro_batches for n, t in collective_seconds(pricing).items()}
        return Outcome(stages.step_s, max(s.memory.total for s in stages.stages), times)

    def with_layouts(self, results: Mapping[OpClass, Type], parameters: Mapping[str, Type], marked: LayoutPins | None = None) -> Outcome:
        """The best plan with some layouts beside the pinned ones. InputError when there is none."""
        pins = self.marked if marked is None else marked
        problem, regions, _ = layout_problem(self.kinds, self.setting)
        choice = choose_layouts(
            replace(problem, pins=LayoutPins({**pins.results, **results}, {**pins.parameters, **parameters}))
        )
        assignment = assign(self.kinds, problem.legal, choice.results, choice.parameters, regions)
        return self.outcome_of(self.priced(assignment), self.free)

    def alternative(self, choice: str, plan: Callable[[], Outcome], reason: str) -> Alternative:
        """What a choice costs, or why not."""
        if reason:
            return Alternative(choice, None, reason)
        try:
            found = plan()
        except InputError as error:
            return Alternative(choice, None, str(error))
        dearer = found.step_s < self.outcome.step_s and found.memory_bytes > self.outcome.memory_bytes
        return Alternative(choice, found, f"memory comes first on {AXIS}" if dearer else "")

    def explain(self, name: str) -> Explanation:
        """The explanation of a name; of the first where a pattern stands for several."""
        if "{" in name:
            return self.explain(first_of(name))
        parameters = {alias: p for p in self.kinds.graph.parameters for alias in (p.path, *p.aliases)}
        segments = {s.name: s for s in self.kinds.graph.segments}
        ops = self.op_places()
        stage = re.fullmatch(r"stages?[ _\[]?(\d{1,6})\]?", name)
        if stage is not None and int(stage[1]) < len(self.document.stages):
            return self.explain_stage(int(stage[1]))
        if name in parameters:
            return self.explain_parameter(parameters[name])
        if name in segments:
            return self.explain_segment(segments[name])
        if name in ops:
            return self.explain_op(name, ops[name])
        stages = [f"stage_{s}" for s in range(len(self.document.stages))]
        near = get_close_matches(name, [*parameters, *segments, *ops, *stages], n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"NAME: the plan has no parameter, op, segment or stage {name}{hint}")

    def op_places(self) -> dict[str, OpClass]:
        """Op classes by key below their kind and below every member; a module stands for its last op."""
        found: dict[str, OpClass] = {}
        for name, members in op_names(self.kinds).items():
            _, kind, _, own = name.split(".", 3)
            prefixes = [s.prefix for s in self.kinds.by_name[kind].members if s.prefix]
            found.update((f"{prefix}.{own}", members[-1]) for prefix in (kind, f"kinds.{kind}.layouts", *prefixes))
            if not prefixes:
                found[own] = members[-1]
        return found

    def explain_parameter(self, parameter: Parameter) -> Explanation:
        """Storage: what it holds, what its gradient costs, what reads it, every other type."""
        name = parameter_class(self.kinds, parameter)
        members = [p.path for p in self.kinds.graph.parameters if parameter_class(self.kinds, p) == name]
        chosen = self.document.parameter_layouts[parameter.path].on(AXIS)
        problem, _, _ = layout_problem(self.kinds, self.setting)
        size, read = self.pricing.master_bytes(parameter.value.name), self.pricing.local_bytes(parameter.value.name)
        values = "" if read == size else f"{format_bytes(read)} and masters of "
        rows: list[Row] = [
            (
                "memory",
                f"{values}{format_bytes(size)} on a rank, its gradient as much, optimizer {format_bytes(OPTIMIZER_PER_PARAMETER * size)}",
            ),
            ("alike in", f"{len(members)} {'layers' if len(members) > 1 else 'place'}"),
        ]
        if chosen == R:
            ranks = problem.legal.ranks
            seconds = conversion_s(I, R, value_bytes(parameter.value), ranks, problem.link, True)[1]
            rows.append(("gradient", f"all-reduce over {AXIS}, {format_seconds(seconds)} once a step"))
        rows += self.reader_rows(parameter)
        legal = parameter_types(self.kinds, problem.legal, parameter, storage_types(problem, parameter))
        others = tuple(
            self.alternative(on_axis(t), partial(self.with_layouts, {}, {path: t for path in members}), why)
            for t, why in legal.items()
            if t != chosen
        )
        pinned = parameter.path in self.marked.parameters
        rest = {p: t for p, t in self.marked.parameters.items() if p not in members}
        return Explanation(
            parameter.path,
            f"parameter of shape {list(parameter.value.shape)}",
            str(self.document.parameter_layouts[parameter.path]),
            pinned,
            self.outcome,
            tuple(rows),
            others if self.setting.mesh.size(AXIS) > 1 else (),
            self.unpinned(LayoutPins(self.marked.results, rest)) if pinned else None,
        )

    def reader_rows(self, parameter: Parameter) -> list[Row]:
        """The ops that read a parameter, with their operands' types."""
        found: dict[str, str] = {}
        for i in self.kinds.graph.consumers.get(parameter.value.name, ()):
            op_class = self.kinds.class_of_op.get(i)
            if op_class is not None:
                strategy = self.pricing.assignment.strategies[op_class]
                types = f"{', '.join(map(str, strategy.operands))} -> {', '.join(map(str, strategy.results))}"
                found[f"{op_class[0]}.{'.'.join(self.kinds.keys[op_class[0]][op_class[1]])}"] = types
        return [("read by", f"{name} ({types})") for name, types in found.items()]

    def unpinned(self, pins: LayoutPins) -> Outcome | None:
        """The best plan under fewer pins."""
        try:
            return self.with_layouts({}, {}, pins)
        except InputError:
            return None

    def explain_op(self, name: str, op_class: OpClass) -> Explanation:
        """Layout of a result: compute, conversions, every other type."""
        op = self.kinds.op(*op_class)
        chosen = self.pricing.assignment.strategies[op_class].results[0]
        problem, _, _ = layout_problem(self.kinds, self.setting)
        sequence = self.document.sequence_parallel != "off"
        legal = result_types(self.kinds, problem.legal, label_values(self.kinds), op_class, sequence)
        others = tuple(
            self.alternative(on_axis(t), partial(self.with_layouts, {op_class: t}, {}), why)
            for t, why in legal.items()
            if t != chosen
        )
        pinned = op_class in self.marked.results
        rest = {c: t for c, t in self.marked.results.items() if c != op_class}
        members = len(self.kinds.by_name[op_class[0]].members)
        return Explanation(
            name,
            f"{op.target} giving {list(op.results[0].shape)}, alike in {members} segments of kind {op_class[0]}",
            on_axis(chosen),
            pinned,
            self.outcome,
            op_costs(self.pricing, op_class),
            others if self.setting.mesh.size(AXIS) > 1 else (),
            self.unpinned(LayoutPins(rest, self.marked.parameters)) if pinned else None,
        )

    def explain_segment(self, segment: Segment) -> Explanation:
        """A segment: its time and memory, the stage it is in, and the stages next to it when it could go there."""
        index = next(i for i, s in enumerate(self.kinds.graph.segments) if s.name == segment.name)
        cost = self.segments[index]
        stage = self.document.stage_of[segment.name]
        rows: tuple[Row, ...] = (
            ("time", f"forward {format_seconds(cost.forward_s)}, backward {format_seconds(cost.backward_s)} per micro-batch"),
            *segment_split(self.pricing, self.kinds.by_name[segment.kind]),
            ("parameters", f"{format_bytes(sum(cost.parameter_bytes.values()))} on a rank"),
            ("activations", f"{format_bytes(cost.activation_bytes)} kept per micro-batch"),
            ("boundary", f"{format_bytes(cost.boundary_bytes)} cross a cut behind it"),
        )
        cuts = self.document.stage_segments
        others = []
        if stage and cuts[stage][0] == segment.name:
            others.append(self.cut_alternative(f"in stage {stage - 1}", stage, 1))
        if stage + 1 < len(cuts) and cuts[stage][-1] == segment.name:
            others.append(self.cut_alternative(f"in stage {stage + 1}", stage + 1, -1))
        what = f"segment of kind {segment.kind}, {len(segment.ops)} ops"
        return Explanation(
            segment.name, what, f"stage {stage}", STAGES in self.document.pinned, self.outcome, rows, tuple(others), self.free_stages()
        )

    def explain_stage(self, stage: int) -> Explanation:
        """A stage: its share of time and memory, and its cuts moved by a segment."""
        cost, cuts = self.stages.stages[stage], self.document.stage_segments
        slowest = max(s.forward_s + s.backward_s for s in self.stages.stages)
        own = cost.forward_s + cost.backward_s
        memory = cost.memory
        rows: tuple[Row, ...] = (
            ("time", f"forward {format_seconds(cost.forward_s)}, backward {format_seconds(cost.backward_s)} per micro-batch"),
            ("share of the slowest stage", f"{own / slowest:.0%}" if slowest else "100%"),
            ("bubble of the step", f"{self.stages.bubble:.1%}"),
            ("parameters", format_bytes(memory.parameters)),
            ("gradients", format_bytes(memory.gradients)),
            ("optimizer", format_bytes(memory.optimizer)),
            ("activations", format_bytes(memory.activations)),
        )
        others = []
        for cut in (stage, stage + 1):
            if 0 < cut < len(cuts):
                others.append(self.cut_alternative(f"{cuts[cut][0]} in stage {cut - 1}", cut, 1))
                others.append(self.cut_alternative(f"{cuts[cut - 1][-1]} in stage {cut}", cut, -1))
        what = f"pipeline stage {stage} of {len(cuts)}"
        choice = f"{cuts[stage][0]} to {cuts[stage][-1]}, {len(cuts[stage])} segments"
        pinned = STAGES in self.document.pinned
        return Explanation(f"stage_{stage}", what, choice, pinned, self.outcome, rows, tuple(others), self.free_stages())

    def free_stages(self) -> Outcome | None:
        """The plan with the solver's cuts, when they were pinned."""
        if STAGES not in self.document.pinned:
            return None
        return self.outcome_of(self.pricing, self.with_stages(None))

    def cut_alternative(self, choice: str, cut: int, step: int) -> Alternative:
        """The cut before stage `cut` moved by one segment, later or earlier."""
        cuts = [list(names) for names in self.document.stage_segments]
        if step > 0:
            cuts[cut - 1].append(cuts[cut].pop(0))
        else:
            cuts[cut].insert(0, cuts[cut - 1].pop())
        if not all(cuts):
            return Alternative(choice, None, "it would leave a stage without segments")
        setting = self.with_stages(tuple(map(tuple, cuts)))
        return self.alternative(choice, lambda: self.outcome_of(self.pricing, setting), "")
