"""The layout problem as numbers: choices, edges and costs of the quotient graph on one mesh axis, for passes.solver_layout.

passes.choose_layouts states the problem; `Builder` writes it down. Costs are seconds:

    compute       of an op on its share, forward and backward, times the members of its kind
    conversions   both collectives. Of those that a linear's input needs in backward only what its matmuls do not hide (passes.overlap),
                  taking all linears that read it there to be sharded by their columns. What is gathered for another op is kept whole: where
                  links do not overlap that counts like a second gather, or gathers would move away from linears to save it
    products      whose result is added to what layers hand on are not sliced along the hidden size, unless pinned so or where no contracted
                  dim divides. A gather before such a product can hide where a reduce-scatter behind it cannot: in FP32 that would look
                  0.2% faster on 8 h100 than Megatron's layout, on the strength of an overlap that costs the matmul nothing
    memory        `memory_price` seconds for every byte that a rank keeps: parameters with gradient and moments (4 bytes kept per byte), and
                  what autograd keeps of each op, as often as micro-batches are in flight. 0 unless a memory limit binds: then it is a
                  Lagrange multiplier of that constraint, so of all layouts that keep no more bytes the chosen ones are fastest
                  (Everett, Operations Research 11(3), 1963)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from meshwright.compiler.assignment import Legal, OpClass, illegal
from meshwright.compiler.costs import all_gather_s, conversion_s
from meshwright.compiler.flops import op_time_s, short_name, value_bytes
from meshwright.compiler.graph import Op, Parameter, Value
from meshwright.compiler.hardware import Hardware, Link
from meshwright.compiler.kinds import Kinds, relative
from meshwright.compiler.labels import SEQUENCE, added_products, label_values
from meshwright.compiler.rules.factors import Strategy
from meshwright.compiler.views import VIEWS
from meshwright.passes.overlap import Beside, linear_input, linear_input_s, matmuls
from meshwright.passes.segment_costs import what_is_saved
from meshwright.passes.solver_layout import Choice, Edge, Option
from meshwright.plans.errors import InputError
from meshwright.plans.layout import I, P, R, Type, shard
from meshwright.plans.patterns import compress

MATTERS = 0.02
SAME = "same "
TIE_S = 1e-9
PRICE_S_PER_BYTE = 1e-7
STATES = 4
"""Bytes kept per byte of an fp32 parameter: itself, its gradient, two moments."""


@dataclass(frozen=True)
class LayoutPins:
    """What the user fixed: result types by op class, storage types by parameter path."""

    results: Mapping[OpClass, Type]
    parameters: Mapping[str, Type]


@dataclass(frozen=True)
class LayoutProblem:
    """The setting: the graph's kinds, legal strategies, the machine, and how many micro-batches share one step.

    memory_price   seconds charged for every byte that a rank keeps; activations count for `in_flight` micro-batches
    """

    kinds: Kinds
    legal: Legal
    hardware: Hardware
    link: Link
    micro_batches: int
    sequence_parallel: str
    pins: LayoutPins
    memory_price: float = 0.0
    in_flight: float = 1.0


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
        self.linears: dict[tuple[int, int, str], dict[int, Op]] = {}
        self.seen: set[tuple[str, str]] = set()
        self.known_edges: set[Edge] = set()
        self.forced = sequence_types(problem) if problem.sequence_parallel == "on" else {}
        self.largest = largest_matrices(problem.kinds)
        self.added = added_products(problem.kinds)

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
        cost += self.problem.memory_price * STATES * self.local(size, type_)
        return cost * len(members)

    def local(self, num_bytes: int, type_: Type) -> float:
        """Bytes on one rank."""
        return num_bytes / self.problem.legal.ranks if type_.kind == "S" else float(num_bytes)

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
            if wanted is None and op_class in self.added and not self.reads_pinned(op):
                kept = without_hidden(kept, len(op.results[0].shape))
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
                    if source is not None and name == linear_input(self.graph.ops[i], self.graph):
                        self.linears.setdefault((*source, segment.kind), {}).setdefault(position, self.graph.ops[i])

    def reads_pinned(self, op: Op) -> bool:
        """Whether a parameter that an op reads, or its equal in another layer, is pinned."""
        own = {self.choice_of_parameter[self.graph.parameter_of[n].path] for n in op.operands if n in self.graph.parameter_of}
        return any(self.choice_of_parameter[path] in own for path in self.problem.pins.parameters)

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
            extra = 2 * sum(conversion_s(P, I, rows, self.problem.legal.ranks, self.problem.link, False))
        kept = self.problem.memory_price * self.problem.in_flight * self.kept_bytes(op_class, strategy)
        tie = TIE_S * sum(t.kind == "R" or bool(t.sections) for t in strategy.results)
        return (forward + backward + extra + kept) * self.members[op_class[0]] + tie

    def kept_bytes(self, op_class: OpClass, strategy: Strategy) -> float:
        """Bytes that autograd keeps of an op; a tensor that several ops keep is shared among them. A linear's gathered input is kept as
        what it was gathered from: that is charged where it is converted."""
        if not self.problem.memory_price:
            return 0.0
        op = self.problem.kinds.op(*op_class)
        gathered = linear_input(op, self.graph)
        operands = [(n, t) for n, t in zip(op.operands, strategy.operands, strict=True) if t != R or n != gathered]
        results = [(r.name, t) for r, t in zip(op.results, strategy.results, strict=True)]
        total = 0.0
        for name, type_ in what_is_saved(op, operands, results):
            if self.is_activation(name):
                savers = max(1, self.savers.get((op_class[0], self.base(name)), 1))
                total += self.local(value_bytes(self.graph.values[name]), type_) / savers
        return total

    def is_activation(self, name: str) -> bool:
        return name not in self.graph.parameter_of and self.graph.values[name].dtype.startswith(("float", "bfloat"))

    def base(self, name: str) -> str:
        """What a value is a view of."""
        producer = self.graph.producers.get(name)
        while producer is not None and short_name(self.graph.ops[producer]) in VIEWS and self.graph.ops[producer].operands:
            name = self.graph.ops[producer].operands[0]
            producer = self.graph.producers.get(name)
        return name

    @cached_property
    def savers(self) -> dict[tuple[str, str], int]:
        """How many ops of a kind keep a tensor, by kind and base."""
        found: dict[tuple[str, str], int] = {}
        for kind in self.problem.kinds.by_name.values():
            for i in kind.representative.ops:
                op = self.graph.ops[i]
                named = what_is_saved(op, [(n, I) for n in op.operands], [(r.name, I) for r in op.results])
                for base in {self.base(name) for name, _ in named}:
                    found[kind.name, base] = found.get((kind.name, base), 0) + 1
        return found

    def conversion_cost(self, producer: int, result: int, site: str, source: Type, target: Type) -> float | None:
        """Seconds over all members that convert this value at this site."""
        if site.startswith(SAME):
            return None
        if {source.kind, target.kind} == {"S"} and (source.sections or target.sections):
            return None
        if producer in self.parameter_choices and (source.kind == "S" or (source, target) == (I, R)):
            return None
        value, ranks, link = self.values[producer][result], self.problem.legal.ranks, self.problem.link
        size, place = value_bytes(value), (producer, result, site)
        if target == R and place in self.linears:
            beside = self.beside(place)
            kept = self.problem.memory_price * self.problem.in_flight * self.local(size, source) if beside.weight_s else 0.0
            forward, backward = linear_input_s(source, len(value.shape), size, ranks, link, beside)
            return (forward + backward + kept) * self.pairs.get(place, 1)
        seconds = sum(conversion_s(source, target, size, ranks, link, value.requires_grad))
        if target == R and source.kind == "S" and value.requires_grad and not link.overlaps:
            seconds += all_gather_s(size, ranks, link)
        return seconds * self.pairs.get(place, 1)

    def beside(self, place: tuple[int, int, str]) -> Beside:
        """The matmuls of the linears that read a value at a site."""
        return matmuls(self.linears[place].values(), self.graph, self.problem.legal.ranks, self.problem.hardware)


def without_hidden(found: tuple[Strategy, ...], rank: int) -> tuple[Strategy, ...]:
    """Strategies that leave the last dim of a result of `rank` dims whole; all of them where the contracted dim cannot be cut instead."""
    return tuple(s for s in found if s.results[0] != shard(rank - 1)) if any(s.results[0] == P for s in found) else found


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
