"""The quotient of a graph by its kinds: what is decided once, however many layers there are.

Terms
    op class         (kind, position): the ops at one position of all segments of a kind
    member           one segment of a kind; the representative is the first
    external         a value that a segment reads and does not make: other segments' results, model inputs, constants,
                     and parameters outside the segment's own module
    entry            one external of a kind: it has one type for all members, that of the last member's value; what another member is
                     called with is converted at the call
    op key           (module path relative to the segment, name): how a plan names an op; the name is the op's short name, with
                     `.N` from the second of that name in its module
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.compiler.graph import Graph, Op, Segment, Value
from meshwright.compiler.rules.factors import Call

OpKey = tuple[str, str]


@dataclass(frozen=True)
class Kind:
    """A kind: its members in program order."""

    name: str
    members: tuple[Segment, ...]

    @property
    def representative(self) -> Segment:
        return self.members[0]


@dataclass(frozen=True)
class Kinds:
    """All kinds of a graph, with what emission and choosing need to know of them."""

    graph: Graph

    @cached_property
    def by_name(self) -> dict[str, Kind]:
        found: dict[str, list[Segment]] = {}
        for segment in self.graph.segments:
            found.setdefault(segment.kind, []).append(segment)
        return {name: Kind(name, tuple(members)) for name, members in found.items()}

    @cached_property
    def class_of_op(self) -> dict[int, tuple[str, int]]:
        """(kind, position) of each COMPUTE op, by index in graph.ops."""
        return {i: (s.kind, position) for s in self.graph.segments for position, i in enumerate(s.ops)}

    @cached_property
    def segment_of_op(self) -> dict[int, Segment]:
        return {i: s for s in self.graph.segments for i in s.ops}

    def op(self, kind: str, position: int) -> Op:
        """The representative's op of a class."""
        return self.graph.ops[self.by_name[kind].representative.ops[position]]

    def call(self, op: Op) -> Call:
        """The op with the Values of its operands."""
        return Call(op, tuple(self.graph.values[name] for name in op.operands), op.results)

    @cached_property
    def keys(self) -> dict[str, tuple[OpKey, ...]]:
        """Op keys of each kind, by position."""
        return {name: op_keys(self.graph, kind.representative) for name, kind in self.by_name.items()}

    @cached_property
    def results(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """(position, result index) of the values of each kind that some other segment, or the loss, reads."""
        read_outside: dict[str, set[tuple[int, int]]] = {name: set() for name in self.by_name}
        for segment in self.graph.segments:
            own = set(segment.ops)
            for position, i in enumerate(segment.ops):
                for r, value in enumerate(self.graph.ops[i].results):
                    readers = self.graph.consumers.get(value.name, ())
                    if value.name == self.graph.loss or any(reader not in own for reader in readers):
                        read_outside[segment.kind].add((position, r))
        return {name: tuple(sorted(found)) for name, found in read_outside.items()}

    def result_values(self, segment: Segment) -> tuple[Value, ...]:
        """The results of one segment, as its kind returns them."""
        return tuple(self.graph.ops[segment.ops[p]].results[r] for p, r in self.results[segment.kind])

    def externals(self, segment: Segment) -> tuple[str, ...]:
        """Names of the values a segment is called with, by first use; its own parameters are not among them."""
        made = {r.name for i in segment.ops for r in self.graph.ops[i].results}
        found: dict[str, None] = {}
        for i in segment.ops:
            for name in self.graph.ops[i].operands:
                if name not in made and not self.is_own(segment, name):
                    found.setdefault(name)
        return tuple(found)

    @cached_property
    def entries(self) -> dict[tuple[str, int], tuple[str, ...]]:
        """Values that the members of a kind are called with, by (kind, place among the externals), in order of members."""
        lists = {name: [self.externals(s) for s in kind.members] for name, kind in self.by_name.items()}
        return {
            (name, place): tuple(externals[place] for externals in members)
            for name, members in lists.items()
            for place in range(len(members[0]))
        }

    def is_own(self, segment: Segment, name: str) -> bool:
        """Whether a value is a parameter of the segment's own module."""
        parameter = self.graph.parameter_of.get(name)
        return parameter is not None and relative(parameter.path, segment.prefix) is not None


def relative(path: str, prefix: str) -> str | None:
    """A parameter path relative to a module, or None when it is not inside."""
    if not prefix:
        return path
    return path[len(prefix) + 1 :] if path.startswith(prefix + ".") else None


def short_name(target: str) -> str:
    """"aten.linear.default" -> "linear"."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def op_keys(graph: Graph, segment: Segment) -> tuple[OpKey, ...]:
    """(relative module, name) of every op of a segment, in order."""
    seen: dict[OpKey, int] = {}
    keys = []
    for i in segment.ops:
        op = graph.ops[i]
        module = op.module
        if segment.prefix and (module == segment.prefix or module.startswith(segment.prefix + ".")):
            module = module[len(segment.prefix) + 1 :]
        key = (module or "(layer)", short_name(op.target))
        seen[key] = number = seen.get(key, -1) + 1
        keys.append(key if not number else (key[0], f"{key[1]}.{number}"))
    return tuple(keys)
