"""One function per kind of segment: the ops of its representative, on local shapes, with conversions where types differ.

A function is `run_KIND(rt, w, externals..., index)`: `rt` the runtime context, `w` the segment's own parameters by relative name,
`index` the segment's number in the model (it seeds dropout). It returns the values that other segments read.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.compiler.assignment import Assignment
from meshwright.compiler.emission.columns import column_groups, column_of
from meshwright.compiler.emission.lowering import Site, expression
from meshwright.compiler.emission.regions import Body, Tangled, numbers_of, read_statements
from meshwright.compiler.experts import EP, Region
from meshwright.compiler.graph import Graph, Op, Segment, Value
from meshwright.compiler.kinds import Kinds, relative, short_name
from meshwright.compiler.rules.factors import Strategy
from meshwright.plans.layout import I, Layout, R, Type, conversion
from meshwright.plans.mesh import Mesh

RESERVED = frozenset("rt w i index inputs constants received denominators buffers loss torch ops aten tp ep range float complex".split())
"""Names that programs use for themselves."""


def identifier(text: str) -> str:
    """A Python name for any text."""
    name = re.sub(r"\W", "_", text).strip("_") or "value"
    if name[0].isdigit():
        return f"value_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in RESERVED else name


def function_name(kind: str) -> str:
    return f"run_{identifier(kind)}"


@dataclass
class Names:
    """Hands out names that are not taken."""

    taken: set[str] = field(default_factory=set)

    def new(self, wanted: str) -> str:
        name, number = identifier(wanted), 0
        while name in self.taken:
            number += 1
            name = f"{identifier(wanted)}_{number}"
        self.taken.add(name)
        return name


def settled(type_: Type, value: Value) -> Type:
    """R and I are one type where no gradient flows."""
    return I if type_ == R and not value.requires_grad else type_


def local_shape(value: Value, type_: Type, axis: str, mesh: Mesh) -> tuple[int, ...]:
    return Layout.of({axis: type_}).local_shape(value.shape, mesh)


def suffix(type_: Type) -> str:
    return identifier(str(type_).lower()).strip("_").replace("__", "_")


def sequence(items: list[str]) -> str:
    """Text of a tuple."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


class FunctionWriter:
    """Writes the function of one kind."""

    def __init__(self, assignment: Assignment, mesh: Mesh, kind: str) -> None:
        self.assignment = assignment
        self.kinds: Kinds = assignment.kinds
        self.graph: Graph = assignment.kinds.graph
        self.mesh = mesh
        self.kind = self.kinds.by_name[kind]
        self.segment: Segment = self.kind.representative
        self.names = Names({"rt", "w", "index", "torch", "ops", "aten", assignment.axis, EP})
        self.texts: dict[str, str] = {}
        self.converted: dict[tuple[str, Type, Region | None], str] = {}
        self.moved: dict[tuple[str, Region | None], str] = {}
        self.routes: dict[Region, str] = {}
        self.home: dict[str, Region | None] = self.homes()
        self.ids: dict[Region, str] = {}
        self.weights = self.results_at(lambda region: region.weight_ops)
        self.lookups = self.results_at(lambda region: region.bias_ops)
        self.entered = assignment.entry_types(kind)
        self.lines: list[str] = []
        self.returned = ""
        self.sites = 0
        self.columns = column_groups(assignment, kind)

    def text(self, name: str, regions: Sequence[Sequence[int]] = ()) -> str:
        """The function under a name, behind those of its recomputed `regions` of op positions. Tangled when these wait for each other,
        or have parts of one statement."""
        body = self.body()
        axes = (self.assignment.axis, EP)
        functions: list[str] = []
        lines = list(self.lines)
        if regions:
            chosen = [self.statements_of(body, region) for region in regions]
            twice = [i for i, number in Counter(i for each in chosen for i in each).items() if number > 1]
            if twice:
                raise Tangled(f"one statement makes ops of two regions: {body.statements[twice[0]].text}")
            found = [r for each in chosen for r in body.split(body.grown(each, self.movers(body)))]
            functions, lines = body.fold(found, name, axes)
        header = f"def {name}(rt, w, {''.join(e + ', ' for e in body.known[:-1])}index):"
        words = {word for line in lines for word in re.split(r"\W", line.split("#")[0])}
        bind = [f'{axis} = rt.axis("{axis}")' for axis in axes if axis in words]
        whole = [f'"""{self.title()}"""', *bind, *lines, f"return {self.returned}"]
        return "\n\n\n".join([*functions, "\n".join([header, *(f"    {line}" for line in whole)])])

    def statements_of(self, body: Body, positions: Sequence[int]) -> frozenset[int]:
        """Statements that make the results of ops."""
        return numbers_of(body, [self.texts[r.name] for p in positions for r in self.graph.ops[self.segment.ops[p]].results])

    def movers(self, body: Body) -> frozenset[int]:
        """Statements that are no op's: conversions and such."""
        return frozenset(range(len(body.statements))) - self.statements_of(body, range(len(self.segment.ops)))

    def body(self) -> Body:
        """The function's statements; they are written once."""
        externals = [self.external(name) for name in self.kinds.externals(self.segment)]
        module = ""
        for position, i in enumerate(self.segment.ops):
            op = self.graph.ops[i]
            if op.results[0].name in self.texts:
                continue
            if op.module != module and op.module:
                module = op.module
                self.lines.append(f"# {relative(module, self.segment.prefix) if module != self.segment.prefix else 'layer'}")
            if position in self.columns:
                self.write_columns(self.columns[position])
            else:
                self.write(op, self.assignment.strategies[self.kind.name, position])
        results = [self.place(v.name, None) for v in self.kinds.result_values(self.segment)]
        self.returned = results[0] if len(results) == 1 else f"({', '.join(results)})"
        return Body(read_statements(self.lines), (*externals, "index"), tuple(results))

    def homes(self) -> dict[str, Region | None]:
        """The region that each value made here lies in; None for one whose rows are this rank's own."""
        return {
            r.name: self.assignment.region(self.kind.name, position)
            for position, i in enumerate(self.segment.ops)
            for r in self.graph.ops[i].results
        }

    def results_at(self, positions_of: Callable[[Region], frozenset[int]]) -> frozenset[str]:
        """Results of some ops of this kind's regions."""
        regions = self.assignment.regions.get(self.kind.name, ())
        positions = {position for region in regions for position in positions_of(region)}
        return frozenset(r.name for p in positions for r in self.graph.ops[self.segment.ops[p]].results)

    def title(self) -> str:
        names = [s.name for s in self.kind.members]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}: {len(names)} alike"

    def external(self, name: str) -> str:
        """Names a value that the function is called with."""
        i = self.graph.producers.get(name)
        wanted = name
        if name in self.graph.parameter_of:
            wanted = self.graph.parameter_of[name].path.replace(".", "_")
        elif i is not None and i in self.kinds.class_of_op:
            wanted = "hidden"
        elif i is not None:
            wanted = short_name(self.graph.ops[i].target)
        self.texts[name] = self.names.new(wanted)
        return self.texts[name]

    def operand(self, name: str) -> str:
        """Text of a value in its own type."""
        if name not in self.texts:
            own = relative(self.graph.parameter_of[name].path, self.segment.prefix)
            self.texts[name] = f'w["{own}"]'
        return self.texts[name]

    def route(self, region: Region) -> str:
        """Name of a region's route: who gets which rows. It is made where rows are first sent."""
        if region not in self.routes:
            offsets = self.convert(region.offsets, I, None)
            self.routes[region] = self.names.new("route")
            self.lines.append(f"{self.routes[region]} = ops.route({offsets}, {EP}, {region.rows})")
        return self.routes[region]

    def place(self, name: str, region: Region | None) -> str:
        """Text of a value where it is read: sent to its rows' experts, or brought back from them."""
        home, text = self.home.get(name), self.operand(name)
        if home == region:
            return text
        if (name, region) not in self.moved:
            at = region or home
            assert at is not None and (region is None or home is None), f"%{name} is read in two regions"
            base = text if text.isidentifier() else identifier(name)
            new = self.moved[name, region] = self.names.new(f"{base}_{'experts' if region else 'back'}")
            if at.offsets:
                verb = "dispatch" if region else "combine"
                line = f"{new} = ops.{verb}({text}, {self.route(at)})  # all-to-all; backward all-to-all"
            else:
                dims = "0, 1" if region else "1, 0"
                line = f"{new} = ops.exchange({text}, {EP}, {dims})  # all-to-all; backward all-to-all"
            self.lines.append(line)
        return self.moved[name, region]

    def convert(self, name: str, target: Type, region: Region | None) -> str:
        """Text of a value as `target`, where `region` reads it; the conversion is written where it is first needed."""
        value = self.graph.values[name]
        source = settled(self.entered.get(name, self.assignment.type_of(name)), value)
        target = settled(target, value)
        text = self.place(name, region)
        if source == target:
            return text
        if (name, target, region) not in self.converted:
            base = text if text.isidentifier() else identifier(self.graph.parameter_of[name].path.split(".")[-1])
            new = self.names.new(f"{base}_{suffix(target)}")
            pair = conversion(source, target)
            comment = pair.forward + (f"; backward {pair.backward}" if value.requires_grad else "")
            self.lines.append(f'{new} = ops.convert({text}, {self.assignment.axis}, "{source} -> {target}")  # {comment}')
            self.converted[name, target, region] = new
        return self.converted[name, target, region]

    def local_ids(self, region: Region) -> str:
        """Name of the experts of the rows that came, counted from this rank's first."""
        if region not in self.ids:
            sent = self.place(region.ids, region)
            self.ids[region] = self.names.new("local_ids")
            self.lines.append(f"{self.ids[region]} = ops.local_experts({sent}, {EP}, {region.num_experts})")
        return self.ids[region]

    def read(self, name: str, need: Type, region: Region | None) -> str:
        """Text of an operand of an op in `region`. Rows are sent there; weights and what is the same everywhere are read as they are."""
        if region is None:
            return self.convert(name, need, None)
        if name == region.offsets:
            return f"{self.route(region)}.offsets"
        moves = name in region.entering or self.home.get(name) == region
        return self.convert(name, need, region if moves else None)

    def write(self, op: Op, strategy: Strategy) -> None:
        """One op: conversions of its operands, then the assignment of its results."""
        region = self.home[op.name]
        needs = dict(zip(op.operands, strategy.operands, strict=True))
        looks_up = region is not None and op.name in self.lookups
        texts = {
            name: self.local_ids(region) if looks_up and region and name == region.ids else self.read(name, need, region)
            for name, need in needs.items()
        }
        shapes = tuple(
            self.shape_in(local_shape(v, t, self.assignment.axis, self.mesh), v.name)
            for v, t in zip(op.results, strategy.results, strict=True)
        )
        text = expression(self.site(op, strategy, texts, shapes))
        names = [self.names.new(short_name(op.target)) for _ in op.results]
        self.texts.update(zip((r.name for r in op.results), names, strict=True))
        layout = "" if strategy.results[0] == I else f"  # {strategy.results[0]} {list(shapes[0])}"
        self.lines.append(f"{', '.join(names)} = {text}{layout}")

    def shape_in(self, shape: tuple[int, ...], name: str) -> tuple[int, ...]:
        """A local shape where its rows are: as many as come (-1) in a grouped region, those of all ranks in a batched one."""
        region = self.home[name]
        if name in self.weights:
            return (shape[0] // self.mesh.ep, *shape[1:])
        if region is None:
            return shape
        if region.offsets:
            return (-1, *shape[1:])
        return (shape[0] // self.mesh.ep, shape[1] * self.mesh.ep, *shape[2:])

    def write_columns(self, positions: tuple[int, ...]) -> None:
        """Linears of one converted value, as one call."""
        ops = [self.graph.ops[self.segment.ops[p]] for p in positions]
        columns = [c for c in map(column_of, ops) if c is not None]
        x = columns[0].x
        source = settled(self.entered.get(x, self.assignment.type_of(x)), self.graph.values[x])
        weights = [self.operand(c.weight) + (".t()" if c.transposed else "") for c in columns]
        biases = [self.operand(c.bias) if c.bias else "None" for c in columns]
        names = [self.names.new(short_name(op.target)) for op in ops]
        self.texts.update(zip((op.results[0].name for op in ops), names, strict=True))
        pair = conversion(source, R)
        self.lines += [
            f"{', '.join(names)}{',' if len(names) == 1 else ''} = ops.column_linear(  # {pair.forward}; backward {pair.backward}",
            f"    {self.operand(x)}, {self.assignment.axis},",
            f"    {sequence(weights)},",
            f"    {sequence(biases)},",
            f'    "{source} -> R",',
            ")",
        ]

    def site(self, op: Op, strategy: Strategy, texts: Mapping[str, str], shapes: tuple[tuple[int, ...], ...]) -> Site:
        self.sites += 1
        sharded = f'("{self.assignment.axis}",)' if strategy.results[0].kind == "S" else "()"
        seed = f"rt.seed(index, {self.sites}, {sharded})"
        axis = self.assignment.axis
        return Site(self.kinds.call(op), strategy, texts, shapes, axis, self.assignment.ranks, seed)


def invariant(op: Op) -> Strategy:
    """The strategy of ops outside segments: the same on every rank."""
    return Strategy("", (I,) * len(op.operands), (I,) * len(op.results))


def plain_lines(graph: Graph, kinds: Kinds, indices: Iterable[int], texts: dict[str, str]) -> list[str]:
    """CONSTANT and INPUT ops, one line each; `texts` is filled with the names of their results."""
    lines = []
    for i in indices:
        op = graph.ops[i]
        shapes = tuple(r.shape for r in op.results)
        site = Site(kinds.call(op), invariant(op), texts, shapes, "", 1, "0")
        for result in op.results:
            texts[result.name] = identifier(result.name)
        lines.append(f"{', '.join(texts[r.name] for r in op.results)} = {expression(site)}")
    return lines
