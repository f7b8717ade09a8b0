"""Choose a layout for every op class and parameter on one mesh axis, jointly over the whole quotient graph.

The problem (solved by passes.solver_layout)
    choices      one per op class (its options: the legal strategies) and one per parameter class (its options: storage types); layers of a
                 kind share their choices, so the problem does not grow with layers or ranks
    objective    modelled seconds of one micro-batch over the whole model: compute of each op under its strategy, forward and backward, and
                 the conversions between types, each value's conversion paid once per consuming segment; times the number of
                 members. passes.layout_problem has the costs
    constraint   memory: where a limit binds, every byte that a rank keeps has a price, raised until the stages fit (choosing.fit_layouts)
    parameters   R storage adds one gradient all-reduce per step, shared by the micro-batches. On the tensor axis memory comes first: a
                 parameter that matters (its matrices have at least MATTERS of the elements of the largest ones in its kind of segment)
                 pays PRICE_S_PER_BYTE for every byte that is left whole
    hoisting     a sliced parameter, or a view of one, is used as its slice, and what is used as R is stored as R: the tensor axis neither
                 gathers weights nor reduces their gradients inside a micro-batch
    pins         result types and parameter types given by the user are the only options of their choice

What does not divide has no such option; `notes` say which blocks fell back for that reason. Column-then-row linears, head-parallel
attention, vocabulary-parallel embedding and loss, and sequence parallelism (Megatron-LM, arXiv 1909.08053 and 2205.05198) are
results of this optimisation, not inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.compiler.assignment import OpClass
from meshwright.compiler.kinds import Kinds, relative
from meshwright.passes.layout_problem import Builder, LayoutPins, LayoutProblem, parameter_class, storage_types
from meshwright.passes.solver_layout import Unsolved, solve_assignment
from meshwright.plans.errors import InputError
from meshwright.plans.layout import Type
from meshwright.plans.patterns import compress

__all__ = [
    "LayoutChoice",
    "LayoutPins",
    "LayoutProblem",
    "choose_layouts",
    "module_pattern",
    "parameter_class",
    "storage_types",
]
TABLE_ROWS = 128
"""Tables with fewer rows (token types) are not worth a note."""


@dataclass(frozen=True)
class LayoutChoice:
    """Chosen types: per op class the first result's, per parameter path its storage; and notes in plain words."""

    results: Mapping[OpClass, Type]
    parameters: Mapping[str, Type]
    notes: tuple[str, ...]


def choose_layouts(problem: LayoutProblem) -> LayoutChoice:
    """The cheapest legal assignment. InputError names a pin that cannot be met."""
    try:
        builder, answer = solve(problem)
    except Unsolved:
        raise InputError(contradiction(problem)) from None
    results = {op_class: builder.choices[c].options[answer[c]].yields[0] for op_class, c in builder.choice_of_op.items()}
    parameters = {
        path: builder.choices[c].options[answer[c]].yields[0]
        for path, c in builder.choice_of_parameter.items()
    }
    return LayoutChoice(results, parameters, fallback_notes(problem, builder, answer))


def solve(problem: LayoutProblem) -> tuple[Builder, tuple[int, ...]]:
    """The problem's choices, and the option taken for each."""
    builder = Builder(problem)
    builder.add_parameters()
    builder.add_ops()
    builder.add_loss()
    return builder, solve_assignment(tuple(builder.choices), tuple(builder.edges), builder.conversion_cost)


def contradiction(problem: LayoutProblem) -> str:
    """The error for pins that exclude each other, or that no layout of the ops around can have: names one without which there is one."""
    axis = problem.legal.axis
    for key, type_, others in without_each(problem):
        if solvable(replace(problem, pins=others)):
            alone = not others.results and not others.parameters
            why = "cannot be had: the ops that read it have no layouts with it" if alone else "contradicts the layouts pinned around it"
            return f"plan.yaml: {key}: {type_}@{axis} {why}; leave it out{'' if alone else ', or change them too'}"
    return f"plan.yaml: the layouts given under kinds and parameters exclude each other on {axis}={problem.legal.ranks}; leave some out"


def without_each(problem: LayoutProblem) -> Iterator[tuple[str, Type, LayoutPins]]:
    """Each pin's key and type, with the other pins. Parameters at one place of all layers of a kind are one."""
    kinds, pins = problem.kinds, problem.pins
    for op_class, type_ in pins.results.items():
        key = f"kinds.{op_class[0]}.layouts.{'.'.join(kinds.keys[op_class[0]][op_class[1]])}"
        yield key, type_, LayoutPins({c: t for c, t in pins.results.items() if c != op_class}, pins.parameters)
    classes: dict[str, list[str]] = {}
    for parameter in kinds.graph.parameters:
        if parameter.path in pins.parameters:
            classes.setdefault(parameter_class(kinds, parameter), []).append(parameter.path)
    for paths in classes.values():
        others = {path: t for path, t in pins.parameters.items() if path not in paths}
        yield f"parameters.{compress(paths)[0]}", pins.parameters[paths[0]], LayoutPins(pins.results, others)


def solvable(problem: LayoutProblem) -> bool:
    """Whether any assignment meets the pins."""
    try:
        solve(problem)
    except Unsolved:
        return False
    return True


def fallback_notes(problem: LayoutProblem, builder: Builder, answer: tuple[int, ...]) -> tuple[str, ...]:
    """Blocks that run whole on every rank because a size does not divide, and ops without a rule."""
    notes: dict[str, None] = {}
    axis, ranks = problem.legal.axis, problem.legal.ranks
    for op_class, refused in problem.legal.refusals.items():
        taken = builder.choices[builder.choice_of_op[op_class]].options[answer[builder.choice_of_op[op_class]]]
        op = problem.kinds.op(*op_class)
        heads = [r for r in refused if r.factor == "h"]
        if heads and taken.yields[0].kind != "S":
            sizes = sorted({r.size for r in heads})
            where = module_pattern(problem.kinds, op_class, op.module)
            notes[f"{where}: {sizes[0]} heads do not divide by {axis}={ranks}; the attention core runs on every {axis} rank"] = None
        vocabulary = [r for r in refused if r.factor == "v"]
        if vocabulary and vocabulary[0].size >= TABLE_ROWS:
            where = module_pattern(problem.kinds, op_class, op.module)
            instead = "its columns are sharded" if taken.needs[0].kind == "S" else f"it is whole on every {axis} rank"
            notes[f"{where}: a vocabulary of {vocabulary[0].size} does not divide by {axis}={ranks}; {instead}"] = None
    for note in whole_parameters(problem, builder, answer):
        notes[note] = None
    for op_class in problem.legal.without_rule:
        op = problem.kinds.op(*op_class)
        notes[f"{module_pattern(problem.kinds, op_class, op.module)}: {op.target} has no rule; it runs on every {axis} rank"] = None
    return tuple(notes)


def whole_parameters(problem: LayoutProblem, builder: Builder, answer: tuple[int, ...]) -> tuple[str, ...]:
    """Matrices that matter and are whole on every rank, by pattern, with their shapes."""
    axis, ranks = problem.legal.axis, problem.legal.ranks
    found: dict[tuple[int, ...], list[str]] = {}
    for parameter in problem.kinds.graph.parameters:
        choice = builder.choice_of_parameter[parameter.path]
        shape = parameter.value.shape
        if parameter.path in problem.pins.parameters or not builder.matters(parameter):
            continue
        if builder.choices[choice].options[answer[choice]].yields[0].kind != "S":
            found.setdefault(shape, []).append(parameter.path)
    return tuple(
        f"{pattern}: whole on every {axis} rank; no layout of its shape {list(shape)} divides by {axis}={ranks} in all that reads it"
        for shape, paths in found.items()
        for pattern in compress(paths)
    )


def module_pattern(kinds: Kinds, op_class: OpClass, module: str) -> str:
    """The module of an op class over all members, as one pattern."""
    kind = kinds.by_name[op_class[0]]
    own = relative(module + ".", kind.representative.prefix) if kind.representative.prefix else None
    if own is None:
        return module or op_class[0]
    return compress([f"{s.prefix}.{own}".rstrip(".") for s in kind.members])[0]
