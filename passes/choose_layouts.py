"""Choose a layout for every op class and parameter on one mesh axis, jointly over the whole quotient graph.

The problem (solved by passes.solver_layout)
    choices      one per op class (its options: the legal strategies) and one per parameter class (its options: storage types); layers of a
                 kind share their choices, so the problem does not grow with layers or ranks
    objective    modelled seconds of one micro-batch over the whole model: compute of each op under its strategy, forward and backward, and
                 the conversions between types, each value's conversion paid once per consuming segment; times the number of members
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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from meshwright.compiler.assignment import Legal, OpClass, illegal
from meshwright.compiler.costs import conversion_s
from meshwright.compiler.flops import VIEWS, op_time_s, short_name, value_bytes
from meshwright.compiler.graph import Parameter, Value
from meshwright.compiler.hardware import Hardware, Link
from meshwright.compiler.kinds import Kinds, relative
from meshwright.compiler.labels import SEQUENCE, label_values
from meshwright.compiler.rules.factors import Strategy
from meshwright.passes.solver_layout import Choice, Edge, Option, Unsolved, solve_assignment
from meshwright.plans.errors import InputError
from meshwright.plans.layout import I, R, Type, shard
from meshwright.plans.patterns import compress

MATTERS = 0.02
SAME = "same "
TABLE_ROWS = 128
"""Tables with fewer rows (token types) are not worth a note."""
TIE_S = 1e-9
PRICE_S_PER_BYTE = 1e-7


@dataclass(frozen=True)
class LayoutChoice:
    """Chosen types: per op class the first result's, per parameter path its storage; and notes in plain words."""

    results: Mapping[OpClass, Type]
    parameters: Mapping[str, Type]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class LayoutPins:
    """What the user fixed: result types by op class, storage types by parameter path."""

    results: Mapping[OpClass, Type]
    parameters: Mapping[str, Type]


@dataclass(frozen=True)
class LayoutProblem:
    """The setting: the graph's kinds, legal strategies, the machine, and how many micro-batches share one step."""

    kinds: Kinds
    legal: Legal
    hardware: Hardware
    link: Link
    micro_batches: int
    sequence_parallel: str
    pins: LayoutPins


def parameter_class(kinds: Kinds, parameter: Parameter) -> str:
    """Parameters at one place of all layers of a kind share a class; one used in several places is its own."""
    graph = kinds.graph
    readers = [kinds.segment_of_op[i] for i in graph.consumers.get(parameter.value.name, ()) if i in kinds.segment_of_op]
    users = {segment.name: segment for segment in readers}
    if len(users) == 1:
        segment = next(iter(users.values()))
        own = relative(parameter.path, segment.prefix)
        if segment.prefix and own is not None:
            return f"{segment.kind}:{own}"
    return parameter.path


def matrix_size(parameter: Parameter) -> int:
    """Elements of a parameter's largest matrix: one expert's, one tap's of a convolution."""
    return prod(sorted(parameter.value.shape)[-2:])


def reader_kinds(kinds: Kinds, parameter: Parameter) -> tuple[str, ...]:
    """Kinds of the segments that read a parameter."""
    readers = kinds.graph.consumers.get(parameter.value.name, ())
    return tuple(dict.fromkeys(kinds.segment_of_op[i].kind for i in readers if i in kinds.segment_of_op))


def largest_matrices(kinds: Kinds) -> dict[str, int]:
    """matrix_size of the largest parameter that each kind reads."""
    found: dict[str, int] = {}
    for parameter in kinds.graph.parameters:
        for name in reader_kinds(kinds, parameter):
            found[name] = max(found.get(name, 1), matrix_size(parameter))
    return found


def storage_types(problem: LayoutProblem, parameter: Parameter) -> tuple[Type, ...]:
    """I, R, and every slicing that a consumer's strategy asks for."""
    graph = problem.kinds.graph
    found: dict[Type, None] = {I: None}
    if parameter.trainable:
        found[R] = None
    for i in graph.consumers.get(parameter.value.name, ()):
        op_class = problem.kinds.class_of_op.get(i)
        for strategy in problem.legal.strategies[op_class] if op_class else ():
            for name, type_ in zip(graph.ops[i].operands, strategy.operands, strict=True):
                if name == parameter.value.name and type_.kind == "S":
                    found[type_] = None
    return tuple(found)


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
    """The error for pins that exclude each other: names one without which the others can be had."""
    axis, pins = problem.legal.axis, problem.pins
    for op_class, type_ in pins.results.items():
        others = LayoutPins({c: t for c, t in pins.results.items() if c != op_class}, pins.parameters)
        if solvable(replace(problem, pins=others)):
            key = f"kinds.{op_class[0]}.layouts.{'.'.join(problem.kinds.keys[op_class[0]][op_class[1]])}"
            return f"plan.yaml: {key}: {type_}@{axis} contradicts the layouts pinned around it; leave it out, or change them too"
    return f"plan.yaml: the layouts given under kinds and parameters exclude each other on {axis}={problem.legal.ranks}; leave some out"


def solvable(problem: LayoutProblem) -> bool:
    """Whether any assignment meets the pins."""
    try:
        solve(problem)
    except Unsolved:
        return False
    return True


class Builder:
    """Collects choices and edges of the quotient graph."""

    def __init__(self, problem: LayoutProblem) -> None:
        self.problem = problem
        self.graph = problem.kinds.graph
        self.choices: list[Choice] = []
        self.values: list[tuple[Value, ...]] = []
        self.edges: list[Edge] = []
        self.choice_of_op: dict[OpClass, int] = {}
        self.choice_of_parameter: dict[str, int] = {}
        self.parameter_choices: set[int] = set()
        self.members = {name: len(kind.members) for name, kind in problem.kinds.by_name.items()}
        self.pairs: dict[tuple[int, int, str], int] = {}
        self.entries: dict[tuple[str, int], int] = {}
        self.seen: set[tuple[str, str]] = set()
        self.known_edges: set[Edge] = set()
        self.forced = sequence_types(problem) if problem.sequence_parallel == "on" else {}
        self.largest = largest_matrices(problem.kinds)

    def add(self, choice: Choice, values: tuple[Value, ...]) -> int:
        self.choices.append(choice)
        self.values.append(values)
        return len(self.choices) - 1

    def add_parameters(self) -> None:
        """One choice per parameter class; its storage types are those that some consumer can take."""
        classes: dict[str, list[Parameter]] = {}
        for parameter in self.graph.parameters:
            classes.setdefault(parameter_class(self.problem.kinds, parameter), []).append(parameter)
        for name, members in classes.items():
            pinned = {self.problem.pins.parameters[p.path] for p in members if p.path in self.problem.pins.parameters}
            if len(pinned) > 1:
                paths = compress([p.path for p in members])
                raise InputError(
                    f"plan.yaml: parameters.{paths[0]}: layers of one kind share their layout, found "
                    f"{' and '.join(sorted(map(str, pinned)))}; give all of them the same"
                )
            types = storage_types(self.problem, members[0])
            if pinned and not pinned <= set(types):
                axis, ranks = self.problem.legal.axis, self.problem.legal.ranks
                raise InputError(
                    f"plan.yaml: parameters.{compress([p.path for p in members])[0]}: {next(iter(pinned))}@{axis} is not legal for "
                    f"shape {list(members[0].value.shape)} on {axis}={ranks}; it can be {', '.join(map(str, types))}"
                )
            kept = tuple(t for t in types if not pinned or t in pinned)
            options = tuple(Option(self.storage_cost(members, t), (), (t,)) for t in kept)
            number = self.add(Choice(name, options), (members[0].value,))
            self.parameter_choices.add(number)
            self.choice_of_parameter.update((p.path, number) for p in members)

    def storage_cost(self, members: list[Parameter], type_: Type) -> float:
        """Seconds that a storage type is charged, over all members."""
        value = members[0].value
        size = value_bytes(value)
        cost = 0.0
        if type_ == R:
            cost += conversion_s(I, R, size, self.problem.legal.ranks, self.problem.link, True)[1] / self.problem.micro_batches
        if type_.kind != "S" and self.matters(members[0]):
            cost += size * PRICE_S_PER_BYTE
        return cost * len(members)

    def matters(self, parameter: Parameter) -> bool:
        """Whether a parameter is a matrix of some size among those of its kind of segment."""
        if len(parameter.value.shape) < 2:
            return False
        largest = [self.largest[name] for name in reader_kinds(self.problem.kinds, parameter)]
        return bool(largest) and matrix_size(parameter) >= MATTERS * min(largest)

    def add_ops(self) -> None:
        """One choice per op class, one edge per operand that a choice makes."""
        for op_class, legal in self.problem.legal.strategies.items():
            kind, position = op_class
            op = self.problem.kinds.op(kind, position)
            wanted = self.problem.pins.results.get(op_class) or self.forced.get(op_class)
            kept = tuple(s for s in legal if wanted is None or s.results[0] == wanted)
            if not kept:
                raise InputError(illegal(self.problem.kinds, self.problem.legal, op_class, wanted or I))
            options = tuple(Option(self.compute_cost(op_class, s), s.operands, s.results) for s in kept)
            number = self.choice_of_op[op_class] = self.add(Choice(op.name, options), op.results)
            source = self.source_of(op.operands[0]) if short_name(op) in VIEWS and op.operands else None
            if source is not None and source[0] in self.parameter_choices:
                self.parameter_choices.add(number)
        for kind, place in self.problem.kinds.entries:
            self.add_entry(kind, place)
        for segment in self.graph.segments:
            places = {name: place for place, name in enumerate(self.problem.kinds.externals(segment))}
            for position, i in enumerate(segment.ops):
                for operand, name in enumerate(self.graph.ops[i].operands):
                    consumer = self.choice_of_op[segment.kind, position]
                    entry = self.entries.get((segment.kind, places.get(name, -1)))
                    source = (entry, 0) if entry is not None else self.source_of(name)
                    self.connect(source, consumer, operand, segment.kind, (name, segment.name))

    def add_entry(self, kind: str, place: int) -> None:
        """A choice for an external whose members' values come from several places: its type is that of the last member's value."""
        names = self.problem.kinds.entries[kind, place]
        sources = [self.source_of(name) for name in names]
        distinct = list(dict.fromkeys(sources))
        last = sources[-1]
        if len(distinct) < 2 or last is None:
            return
        types = tuple(dict.fromkeys(option.yields[last[1]] for option in self.choices[last[0]].options))
        options = tuple(Option(0.0, (t,) * len(distinct), (t,)) for t in types)
        value = self.graph.values[names[0]]
        entry = self.entries[kind, place] = self.add(Choice(f"{kind}({place})", options), (value,))
        for operand, source in enumerate(distinct):
            site = f"{SAME}{kind}({place})" if source == last else f"call {kind}({place})"
            self.connect(source, entry, operand, site, (site, kind))

    def connect(
        self, source: tuple[int, int] | None, consumer: int, operand: int, site: str, reader: tuple[str, str]
    ) -> None:
        """An edge from a choice's result; `reader` counts how often a conversion at this site runs."""
        if source is None:
            return
        edge = Edge(*source, consumer, operand, site)
        if reader not in self.seen:
            self.seen.add(reader)
            self.pairs[(*source, site)] = self.pairs.get((*source, site), 0) + 1
        if edge not in self.known_edges:
            self.known_edges.add(edge)
            self.edges.append(edge)

    def source_of(self, name: str) -> tuple[int, int] | None:
        """(choice, result) that makes a value: an op class or a parameter class; None for inputs and constants."""
        parameter = self.graph.parameter_of.get(name)
        if parameter is not None:
            return self.choice_of_parameter[parameter.path], 0
        i = self.graph.producers.get(name)
        op_class = self.problem.kinds.class_of_op.get(i) if i is not None else None
        if op_class is None or i is None:
            return None
        return self.choice_of_op[op_class], [r.name for r in self.graph.ops[i].results].index(name)

    def add_loss(self) -> None:
        """The loss leaves the program invariant."""
        sink = self.add(Choice("loss", (Option(0.0, (I,), ()),)), ())
        self.connect(self.source_of(self.graph.loss), sink, 0, "loss", (self.graph.loss, "loss"))

    def compute_cost(self, op_class: OpClass, strategy: Strategy) -> float:
        op = self.problem.kinds.op(*op_class)
        split = any(t.kind == "S" for t in (*strategy.operands, *strategy.results))
        fraction = 1 / self.problem.legal.ranks if split else 1.0
        forward, backward = op_time_s(op, self.graph.values, fraction, self.problem.hardware)
        extra = 0.0
        if strategy.lowering == "vocabulary" and strategy.results[0] == I:
            rows = value_bytes(self.graph.values[op.operands[1]])
            extra = 2 * sum(conversion_s(Type("P"), I, rows, self.problem.legal.ranks, self.problem.link, False))
        tie = TIE_S * sum(t.kind == "R" or bool(t.sections) for t in strategy.results)
        return (forward + backward + extra) * self.members[op_class[0]] + tie

    def conversion_cost(self, producer: int, result: int, site: str, source: Type, target: Type) -> float | None:
        """Seconds over all members that convert this value at this site."""
        if site.startswith(SAME):
            return None
        if {source.kind, target.kind} == {"S"} and (source.sections or target.sections):
            return None
        if producer in self.parameter_choices and (source.kind == "S" or (source, target) == (I, R)):
            return None
        value = self.values[producer][result]
        forward, backward = conversion_s(
            source, target, value_bytes(value), self.problem.legal.ranks, self.problem.link, value.requires_grad
        )
        return (forward + backward) * self.pairs.get((producer, result, site), 1)


def sequence_types(problem: LayoutProblem) -> dict[OpClass, Type]:
    """Under `sequence_parallel: on`, what layers hand on is sliced along the sequence. InputError when it does not divide."""
    graph, ranks = problem.kinds.graph, problem.legal.ranks
    labels = label_values(problem.kinds)
    found: dict[OpClass, Type] = {}
    for name, results in problem.kinds.results.items():
        representative = problem.kinds.by_name[name].representative
        for position, r in results if representative.prefix else ():
            value = graph.ops[representative.ops[position]].results[r]
            dims = [d for d, label in enumerate(labels.get(value.name, ())) if SEQUENCE in label]
            if not dims or not value.requires_grad:
                continue
            if value.shape[dims[0]] % ranks:
                raise InputError(
                    f"sequence_parallel: on: a sequence of {value.shape[dims[0]]} does not divide by "
                    f"{problem.legal.axis}={ranks}; use auto or off"
                )
            found[name, position] = shard(dims[0])
    return found


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
