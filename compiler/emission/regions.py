"""Ops of a function that are recomputed: statements moved into functions of their own, called through rt.recompute.

    body = Body(lines, known)        the statements of an emitted function; `known` are names that it is called with
    body.grown(chosen)               `chosen` statements and those that only move values between them (conversions)
    body.split(chosen)               them as regions: connected, and such that each can run in one go
    body.fold(regions, name)         the function's lines with a call per region, and the regions' functions

Statements are assignments, each name bound once, so that any order in which operands come first computes the same; seeds of dropout are
in the statements' text. A region can run in one go when no value goes from it to a statement outside and back. A call stands where the
last of its region stood, unless something reads a result before that.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise

Region = tuple[int, ...]
"""Numbers of statements, ascending."""


class Tangled(ValueError):
    """Regions that wait for each other's results."""


@dataclass(frozen=True)
class Statement:
    """An assignment with the comments above it: names that it binds and reads. `terms`: how often it reads each name, and each parameter
    by its text."""

    lines: tuple[str, ...]
    binds: tuple[str, ...]
    reads: tuple[str, ...]
    terms: Mapping[str, int]

    @property
    def text(self) -> str:
        """In one line."""
        return " ".join(line.strip() for line in self.lines if not line.lstrip().startswith("#"))


def read_statements(lines: Sequence[str]) -> tuple[Statement, ...]:
    """Statements of a function's body, as written."""
    found, start = [], 0
    for node in ast.parse("\n".join(lines)).body:
        assert isinstance(node, ast.Assign) and node.end_lineno is not None
        binds = tuple(n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name))
        names = [n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)]
        parameters = [ast.unparse(n) for n in ast.walk(node.value) if isinstance(n, ast.Subscript) and ast.unparse(n.value) == "w"]
        reads = tuple(dict.fromkeys(names))
        found.append(Statement(tuple(lines[start : node.end_lineno]), binds, reads, Counter([*names, *parameters])))
        start = node.end_lineno
    return tuple(found)


@dataclass(frozen=True)
class Body:
    """The statements of one function. `known`: names of its arguments; `returned`: names that it returns."""

    statements: tuple[Statement, ...]
    known: tuple[str, ...]
    returned: tuple[str, ...]

    @cached_property
    def maker(self) -> dict[str, int]:
        """The statement that binds each name."""
        return {name: i for i, s in enumerate(self.statements) for name in s.binds}

    @cached_property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        """Statements whose results each reads."""
        return tuple(tuple(dict.fromkeys(self.maker[n] for n in s.reads if n in self.maker)) for s in self.statements)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Statements that read each one's results."""
        found: list[list[int]] = [[] for _ in self.statements]
        for i, made in enumerate(self.operands):
            for j in made:
                found[j].append(i)
        return tuple(map(tuple, found))

    def grown(self, chosen: Collection[int], movers: Collection[int]) -> frozenset[int]:
        """`chosen` and those of `movers` that read one of them, and that nothing else reads."""
        found = set(chosen)
        for i in sorted(movers):
            inner = self.readers[i] and not set(self.statements[i].binds) & set(self.returned)
            if inner and found.issuperset(self.readers[i]) and not found.isdisjoint(self.operands[i]):
                found.add(i)
        return frozenset(found)

    def split(self, chosen: Collection[int]) -> tuple[Region, ...]:
        """The largest connected regions of `chosen` that values do not leave and come back to."""
        exits = [0] * len(self.statements)
        touched = [False] * len(self.statements)
        for i, operands in enumerate(self.operands):
            touched[i] = i in chosen or any(touched[j] for j in operands)
            through = max((exits[j] + (1 if i in chosen and j not in chosen and touched[j] else 0) for j in operands), default=0)
            exits[i] = through
        parent = {i: i for i in chosen}

        def root(i: int) -> int:
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            return i

        for i in chosen:
            for j in self.operands[i]:
                if j in parent and exits[i] == exits[j]:
                    parent[root(i)] = root(j)
        members: dict[int, list[int]] = {}
        for i in sorted(chosen):
            members.setdefault(root(i), []).append(i)
        return tuple(map(tuple, members.values()))

    def order(self, regions: Sequence[Region]) -> tuple[Region, ...]:
        """Statements and regions so that operands come first, as near to their places as can be. Tangled when there is no such order."""
        inside = {i for region in regions for i in region}
        nodes: list[Region] = [*regions, *((i,) for i in range(len(self.statements)) if i not in inside)]
        node_of = {i: number for number, node in enumerate(nodes) for i in node}
        waits = [{node_of[j] for i in node for j in self.operands[i]} - {number} for number, node in enumerate(nodes)]
        ready = [(node[-1], number) for number, node in enumerate(nodes) if not waits[number]]
        heapify(ready)
        found: list[Region] = []
        while ready:
            _, number = heappop(ready)
            found.append(nodes[number])
            for other in {node_of[r] for i in nodes[number] for r in self.readers[i]} - {number}:
                waits[other].discard(number)
                if not waits[other]:
                    heappush(ready, (nodes[other][-1], other))
        if len(found) < len(nodes):
            raise Tangled("values go from a region to ops outside it and back")
        return tuple(found)

    def moved(self, regions: Sequence[Region]) -> frozenset[int]:
        """Statements of regions that change places with others among the readers of a value, so that its gradient would be summed in
        another order, and be rounded otherwise. Two terms may change places, unless they are a parameter's: these add to what is there."""
        place = {i: at for at, i in enumerate(i for node in self.order(regions) for i in node)}
        inside = {i for region in regions for i in region}
        readers: dict[str, list[int]] = {}
        for i, statement in enumerate(self.statements):
            for name in statement.terms:
                readers.setdefault(name, []).append(i)
        found: set[int] = set()
        for name, places in readers.items():
            value = name in self.maker or name in self.known
            if (value and sum(self.statements[i].terms[name] for i in places) > 2) or "[" in name:
                late = [a for a, b in pairwise(places) if place[a] > place[b]]
                found.update(i for i in (late if inside.issuperset(late) else inside))
        return frozenset(found)

    def arguments(self, region: Region) -> tuple[str, ...]:
        """Names that a region is called with."""
        made = {name for i in region for name in self.statements[i].binds}
        reads = dict.fromkeys(n for i in region for n in self.statements[i].reads)
        return tuple(n for n in reads if n not in made and (n in self.maker or n in self.known))

    def results(self, region: Region) -> tuple[str, ...]:
        """Names of a region that are read outside."""
        inside = set(region)
        names = [n for i in region for n in self.statements[i].binds]
        return tuple(n for n in names if n in self.returned or not inside.issuperset(self.readers_of(n)))

    def readers_of(self, name: str) -> tuple[int, ...]:
        return tuple(i for i in self.readers[self.maker[name]] if name in self.statements[i].reads)

    def fold(self, regions: Sequence[Region], name: str, axes: Sequence[str]) -> tuple[list[str], list[str]]:
        """(texts of the regions' functions, lines of the body); `axes` are names that functions bind with rt.axis."""
        starts = {region: number for number, region in enumerate(sorted(regions))}
        functions: dict[int, str] = {}
        lines: list[str] = []
        for node in self.order(regions):
            if node not in starts:
                lines += self.statements[node[0]].lines
                continue
            called = f"{name}_region" + (f"_{starts[node]}" if len(regions) > 1 else "")
            given = "".join(f", {a}" for a in self.arguments(node))
            results = ", ".join(self.results(node))
            functions[starts[node]] = self.function(node, called, axes)
            lines += ["# runs again in the backward pass", f"{results} = rt.recompute({called}, w{given})"]
        return [functions[number] for number in sorted(functions)], lines

    def function(self, region: Region, name: str, axes: Sequence[str]) -> str:
        """Text of a region's function."""
        read = {n for i in region for n in self.statements[i].reads}
        bind = [f'{axis} = rt.axis("{axis}")' for axis in axes if axis in read]
        body = [*bind, *(line for i in region for line in self.statements[i].lines), f"return {', '.join(self.results(region))}"]
        given = "".join(f", {a}" for a in self.arguments(region))
        return "\n".join([f"def {name}(rt, w{given}):", *(f"    {line}" for line in body)])


def numbers_of(body: Body, names: Iterable[str]) -> frozenset[int]:
    """Statements that bind any of the names."""
    return frozenset(body.maker[n] for n in names if n in body.maker)
