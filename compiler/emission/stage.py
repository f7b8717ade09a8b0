"""The program of one pipeline stage: a Python module, the same for all ranks of the stage.

    PARAMETERS  patterns of the parameters it uses          RECEIVES, SENDS  boundary values: (name, local shape, dtype, requires_grad)
    INPUTS      model inputs it reads                       BUFFERS          model buffers its constants read
    constants(rt, buffers)                                  run once at load
    counts(rt, constants, inputs)                           loss targets of one micro-batch, one number per denominator it uses
    forward(rt, w, constants, inputs, received, denominators)   what SENDS says, or (loss,) on the last stage

A value made before stage k and needed at or after it is received by k; what later stages need is passed on. Values that depend on no
parameter (masks, positions, rotary tables) are made again in every stage that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.compiler.emission.function import FunctionWriter, identifier, plain_lines, settled, suffix
from meshwright.compiler.emission.regions import Tangled
from meshwright.compiler.emission.staging import StageReads, Staging, stage_reads
from meshwright.compiler.graph import Graph, Segment
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.recomputation import op_texts
from meshwright.plans.errors import InputError
from meshwright.plans.layout import I, conversion
from meshwright.plans.patterns import compress


def emit_stage(staging: Staging, stage: int) -> str:
    """The text of a stage's program."""
    graph = staging.graph
    reads = stage_reads(staging, stage)
    segments = staging.stages[stage]
    names = compress([s.name for s in segments])
    last = stage + 1 == len(staging.stages)
    header = [
        f'"""Stage {stage} of {len(staging.stages)}: {", ".join(names)}. Emitted by meshwright; edit the plan, not this file."""',
        "",
        "import torch",
        "",
        "from meshwright.runtime import ops",
        "",
        "aten = torch.ops.aten",
        "",
        table("PARAMETERS", compress(list(reads.parameters))),
        table("RECEIVES", staging.boundary(stage)),
        table("SENDS", () if last else staging.boundary(stage + 1)),
        table("INPUTS", tuple(dict.fromkeys((*reads.inputs, *reads.count_inputs)))),
        table("BUFFERS", tuple(path for _, path in reads.buffers)),
    ]
    functions = [segment_text(staging, kind, name, regions) for (kind, regions), name in staging.functions(stage).items()]
    parts = ["\n".join(header), constants_text(graph, staging.kinds, reads), counts_text(graph, staging.kinds, reads)]
    return "\n\n\n".join([*parts, *functions, ForwardWriter(staging, stage, reads).text()]) + "\n"


def segment_text(staging: Staging, kind: str, name: str, regions: Sequence[Sequence[int]]) -> str:
    """The function of a kind. InputError for regions that cannot be recomputed each in one go."""
    try:
        return FunctionWriter(staging.assignment, staging.mesh, kind).text(name, regions)
    except Tangled as problem:
        ops = op_texts(staging.kinds, kind)
        given = "; ".join(", ".join(ops[p] for p in region) for region in regions)
        raise InputError(f"plan.yaml: recomputed: regions of {kind} ({given}): {problem}; join them, or leave one out") from None


def table(name: str, rows: Iterable[object]) -> str:
    """A module-level tuple, one row a line when it is long."""
    items = [repr(row) for row in rows]
    short = f"{name} = ({', '.join(items)}{',' if len(items) == 1 else ''})"
    return short if len(short) <= 110 else "\n".join([f"{name} = (", *(f"    {item}," for item in items), ")"])


def function(header: str, lines: Iterable[str]) -> str:
    return "\n".join([header, *(f"    {line}" for line in lines)])


def constants_text(graph: Graph, kinds: Kinds, reads: StageReads) -> str:
    """constants(): what depends on neither inputs nor parameters."""
    texts = {name: f'buffers["{path}"]' for name, path in reads.buffers}
    lines = plain_lines(graph, kinds, reads.constant_ops, texts)
    items = ", ".join(f'"{identifier(n)}": {texts[n]}' for n in reads.constants)
    return function("def constants(rt, buffers):", [*lines, f"return {{{items}}}"])


def bind_constants(graph: Graph, reads: StageReads, ops: tuple[int, ...], extra: Iterable[str], texts: dict[str, str]) -> list[str]:
    """Lines that bind the constants which some ops, or extra values, are."""
    wanted = {n for i in ops for n in graph.ops[i].operands} | set(extra)
    found = [n for n in reads.constants if n in wanted]
    texts.update((n, identifier(n)) for n in found)
    return [f'{identifier(n)} = constants["{identifier(n)}"]' for n in found]


def counts_text(graph: Graph, kinds: Kinds, reads: StageReads) -> str:
    """counts(): this micro-batch's loss targets."""
    texts = {n: identifier(n) for n in reads.count_inputs}
    wanted = [graph.counts[j] for j in reads.denominators]
    lines = [f'{identifier(n)} = inputs["{n}"]' for n in reads.count_inputs]
    lines += bind_constants(graph, reads, reads.count_ops, wanted, texts)
    lines += plain_lines(graph, kinds, reads.count_ops, texts)
    items = ", ".join(texts[n] for n in wanted)
    return function("def counts(rt, constants, inputs):", [*lines, f"return ({items}{',' if len(wanted) == 1 else ''})"])


class ForwardWriter:
    """Writes forward(): inputs, then one call per segment, runs of alike layers as loops."""

    def __init__(self, staging: Staging, stage: int, reads: StageReads) -> None:
        self.staging = staging
        self.graph, self.kinds = staging.graph, staging.kinds
        self.stage, self.reads = stage, reads
        self.segments = staging.stages[stage]
        self.functions = staging.functions(stage)
        self.number = {s.name: i for i, s in enumerate(self.graph.segments)}
        self.texts: dict[str, str] = {}
        self.lines: list[str] = []

    def text(self) -> str:
        for name in self.reads.inputs:
            self.texts[name] = identifier(name)
            self.lines.append(f'{identifier(name)} = inputs["{name}"]')
        externals = [n for s in self.segments for n in self.kinds.externals(s)]
        self.lines += bind_constants(self.graph, self.reads, self.reads.input_ops, externals, self.texts)
        self.lines += plain_lines(self.graph, self.kinds, self.reads.input_ops, self.texts)
        received = self.staging.crossings[self.stage]
        if received:
            self.texts.update((v.name, identifier(v.name)) for v in received)
            self.lines.append(f"{', '.join(identifier(v.name) for v in received)}{',' if len(received) == 1 else ''} = received")
        for j, value in enumerate(self.graph.denominators):
            if j in self.reads.denominators:
                self.texts[value.name] = f"denominators[{self.reads.denominators.index(j)}]"
        index = 0
        while index < len(self.segments):
            length = self.run_length(index)
            self.write_loop(index, length) if length > 1 else self.write_call(self.segments[index])
            index += length
        self.lines.append(f"return {self.returned()}")
        return function("def forward(rt, w, constants, inputs, received, denominators):", self.lines)

    def returned(self) -> str:
        if self.stage + 1 < len(self.staging.stages):
            sent = [self.texts[v.name] for v in self.staging.crossings[self.stage + 1]]
            return f"({', '.join(sent)}{',' if len(sent) == 1 else ''})"
        loss, type_ = self.texts[self.graph.loss], self.staging.assignment.type_of(self.graph.loss)
        if type_ == I:
            return f"({loss},)"
        axis = self.staging.assignment.axis
        comment = conversion(type_, I)
        self.lines.append(f'loss = ops.convert({loss}, rt.axis("{axis}"), "{type_} -> I")  # {comment.forward}')
        return "(loss,)"

    def arguments(self, segment: Segment) -> list[str]:
        """Texts of what a segment is called with, converted where its kind takes another type."""
        assignment = self.staging.assignment
        found = []
        for place, name in enumerate(self.kinds.externals(segment)):
            text = self.texts.get(name) or f'w["{self.graph.parameter_of[name].path}"]'
            value = self.graph.values[name]
            source = settled(assignment.type_of(name), value)
            target = settled(assignment.entry_type(segment.kind, place), value)
            if source != target:
                new, pair = f"{identifier(name)}_{suffix(target)}", conversion(source, target)
                comment = pair.forward + (f"; backward {pair.backward}" if value.requires_grad else "")
                axis = assignment.axis
                self.lines.append(f'{new} = ops.convert({text}, rt.axis("{axis}"), "{source} -> {target}")  # {comment}')
                text = new
            found.append(text)
        return found

    def call(self, segment: Segment, arguments: list[str], prefix: str, index: str) -> str:
        """Text of one call. Layers go through rt.layer or rt.recomputed_layer, other segments through rt.segment."""
        recomputation = self.staging.recomputation(segment)
        name = self.functions[segment.kind, recomputation.regions]
        tail = "".join(f"{a}, " for a in arguments)
        own = f"w.at({prefix})" if segment.prefix else "w"
        verb = "recomputed_layer" if recomputation.whole else "layer" if segment.prefix else "segment"
        return f"rt.{verb}({name}, {own}, {tail}{index})"

    def write_call(self, segment: Segment) -> None:
        results = self.kinds.result_values(segment)
        arguments = self.arguments(segment)
        self.texts.update((v.name, identifier(v.name)) for v in results)
        call = self.call(segment, arguments, f'"{segment.prefix}."', str(self.number[segment.name]))
        self.lines.append(f"{', '.join(self.texts[v.name] for v in results)} = {call}")

    def link(self, first: Segment, second: Segment) -> tuple[int | None, ...] | None:
        """For each argument of `second`: the result of `first` it is, or None when both take the same value. None: neither."""
        made = [v.name for v in self.kinds.result_values(first)]
        links: list[int | None] = []
        for before, after in zip(self.kinds.externals(first), self.kinds.externals(second), strict=True):
            if after in made:
                links.append(made.index(after))
            elif before == after:
                links.append(None)
            else:
                return None
        return tuple(links)

    def enters_as_is(self, segment: Segment) -> bool:
        """Whether everything that a segment is called with has the type that its kind takes."""
        assignment = self.staging.assignment
        return all(
            settled(assignment.type_of(name), self.graph.values[name])
            == settled(assignment.entry_type(segment.kind, place), self.graph.values[name])
            for place, name in enumerate(self.kinds.externals(segment))
        )

    def only_for_next(self, segment: Segment, following: Segment) -> bool:
        """Whether a layer's results are read by the next layer alone."""
        readers = {
            self.kinds.segment_of_op[i].name
            for v in self.kinds.result_values(segment)
            for i in self.graph.consumers.get(v.name, ())
            if i in self.kinds.segment_of_op
        }
        return readers <= {following.name}

    def run_length(self, start: int) -> int:
        """Number of segments from `start` that one loop can run."""
        first = self.segments[start]
        length, links = 1, None
        while start + length < len(self.segments):
            previous, following = self.segments[start + length - 1 : start + length + 1]
            if following.kind != first.kind or not first.prefix or not consecutive(previous.prefix, following.prefix):
                break
            if self.staging.recomputation(following) != self.staging.recomputation(first):
                break
            found = self.link(previous, following)
            if found is None or (links is not None and found != links):
                break
            if not self.enters_as_is(following) or not self.only_for_next(previous, following):
                break
            links, length = found, length + 1
        return length

    def write_loop(self, start: int, length: int) -> None:
        """A run of alike layers: the chained values live in variables named after the last layer's results."""
        first, second, last = (self.segments[i] for i in (start, start + 1, start + length - 1))
        links = self.link(first, second) or ()
        results = [identifier(v.name) for v in self.kinds.result_values(last)]
        arguments = self.arguments(first)
        for position, result in enumerate(links):
            if result is not None:
                if results[result] != arguments[position]:
                    self.lines.append(f"{results[result]} = {arguments[position]}")
                arguments[position] = results[result]
        stem, low, high = loop_prefix(first.prefix, last.prefix)
        shift = self.number[first.name] - low
        index = "i" if not shift else f"i {'+' if shift > 0 else '-'} {abs(shift)}"
        self.lines.append(f"for i in range({low}, {high + 1}):")
        call = self.call(first, arguments, f'f"{stem}"', index)
        self.lines.append(f"    {', '.join(results)} = {call}")
        self.texts.update((v.name, identifier(v.name)) for v in self.kinds.result_values(last))


def split_index(prefix: str) -> tuple[str, int, str]:
    """"model.layers.3" -> ("model.layers.", 3, ""); the first integer component counts."""
    parts = prefix.split(".")
    place = next(i for i, part in enumerate(parts) if part.isdigit())
    return "".join(f"{p}." for p in parts[:place]), int(parts[place]), "".join(f".{p}" for p in parts[place + 1 :])


def consecutive(first: str, second: str) -> bool:
    """Whether two layer prefixes differ in their number alone, by one."""
    a, b = split_index(first), split_index(second)
    return (a[0], a[1] + 1, a[2]) == b


def loop_prefix(first: str, last: str) -> tuple[str, int, int]:
    """f-string text of a run's prefixes, and the first and last number."""
    stem, low, tail = split_index(first)
    return f"{stem}{{i}}{tail}.", low, split_index(last)[1]
