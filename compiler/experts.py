"""Which ops can run where their experts are: the regions that expert parallelism moves.

A region is the part of a layer between the first and the last product with expert weights. Its rows are independent of each other and
each belongs to one expert, so a row may be computed on any rank that holds the expert. With whole experts sliced over the axis `ep`
(dim 0 of their weights) rows are sent to the rank of their expert before the region and back behind it:

    grouped   grouped_mm(x (T, k), w (E, k, n), offsets (E,)): rows sorted by expert, uneven counts; ops.dispatch and ops.combine
    batched   bmm(x (E, T, k), w (E, k, n)): every expert sees every token; ops.exchange, (E, T) to (E/ep, ep T) and back

Rows of no expert (from offsets[-1] on) are not sent: grouped_mm makes zeros of them, and a grouped region ends in grouped_mm.

(Lepikhin et al., GShard, arXiv 2006.16668, section 3.2; Gale et al., MegaBlocks, arXiv 2211.15841, for uneven counts without a capacity.)
Every data-parallel rank of an ep group sends its own tokens. A weight's gradient then holds the tokens of the whole group.

    find_regions(kinds, ranks)   every region that is legal, and why others are not
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.compiler.graph import Level, Value
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.rules.factors import Call, Factors
from meshwright.compiler.rules.table import factors_of

GROUPED = "transformers.grouped_mm_fallback.default"
BATCHED = frozenset({"aten.bmm.default", "aten.matmul.default", "aten.baddbmm.default", "aten.einsum.default"})
CUMSUM, HISTC = "aten.cumsum.default", "aten.histc.default"
EP = "ep"


@dataclass(frozen=True)
class Region:
    """Ops of one kind that run where their experts are; positions are those of the kind.

    offsets      graph name, in the representative, of the ends of every expert's rows; "" in a batched region
    ids          graph name of the sorted expert of every row, when biases are looked up by it; "" otherwise
    ops          positions whose results have rows of the ranks' own experts
    bias_ops     those of them that look up a bias by `ids`
    weight_ops   positions that reshape expert weights on the way
    entering     values of the representative whose rows are sent to their experts
    leaving      results of `ops` that are read outside: brought back
    parameters   paths of the experts' weights, of all members: sliced along dim 0
    rows         T of one rank
    """

    kind: str
    offsets: str
    ids: str
    num_experts: int
    rows: int
    ops: frozenset[int]
    bias_ops: frozenset[int]
    weight_ops: frozenset[int]
    entering: tuple[str, ...]
    leaving: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def marked(self) -> frozenset[int]:
        """Positions whose layout in a plan is S(0) on ep."""
        return self.ops | self.weight_ops


@dataclass(frozen=True)
class Regions:
    """Legal regions by kind, and in one line each why expert weights are in none."""

    by_kind: Mapping[str, tuple[Region, ...]]
    reasons: tuple[str, ...]


class NoRegion(Exception):
    """Why some experts cannot move."""


def find_regions(kinds: Kinds, ranks: int) -> Regions:
    """Regions of all kinds for `ranks` ranks along ep."""
    found: dict[str, tuple[Region, ...]] = {}
    reasons: list[str] = []
    for name in kinds.by_name:
        search = Search(kinds, name, ranks)
        regions = []
        for cores in search.core_sets():
            try:
                regions.append(search.region(cores))
            except NoRegion as error:
                reasons.append(f"{name}: {error}")
        if regions:
            found[name] = tuple(regions)
    return Regions(found, tuple(dict.fromkeys(reasons)))


class Search:
    """Regions of one kind, seen in its representative."""

    def __init__(self, kinds: Kinds, kind: str, ranks: int) -> None:
        self.kinds, self.graph, self.kind, self.ranks = kinds, kinds.graph, kinds.by_name[kind], ranks
        self.segment = self.kind.representative
        self.calls = [kinds.call(self.graph.ops[i]) for i in self.segment.ops]
        self.made = {r.name: p for p, call in enumerate(self.calls) for r in call.results}
        self.stems = self.weight_stems()

    def weight_stems(self) -> dict[str, str]:
        """Parameters with several dims, and what ops make of one of them that keep its dim 0: {value: parameter}."""
        stems: dict[str, str] = {}
        for call in self.calls:
            for value in call.operands:
                if value.name in self.graph.parameter_of and len(value.shape) > 1:
                    stems[value.name] = value.name
            stem = stems.get(call.operands[0].name) if len(call.operands) == 1 else None
            if stem is not None and leads(call, 0):
                stems.update((r.name, stem) for r in call.results)
        return stems

    def core_sets(self) -> list[frozenset[int]]:
        """Products with expert weights, by what decides where rows go: their offsets, or their number of experts."""
        sets: dict[tuple[str, int], set[int]] = {}
        for position, call in enumerate(self.calls):
            slot = self.weight_slot(call)
            if slot is None:
                continue
            offsets = call.operands[2].name if call.op.target == GROUPED else ""
            sets.setdefault((offsets, call.operands[slot].shape[0]), set()).add(position)
        return [frozenset(cores) for (offsets, _), cores in sets.items() if offsets or len(cores) > 1]

    def weight_slot(self, call: Call) -> int | None:
        """Operand number of the expert weights of a product; None for other ops."""
        if call.op.target == GROUPED:
            return 1 if call.operands[1].name in self.stems else None
        if call.op.target not in BATCHED or len(call.results[0].shape) != 3:
            return None
        slots = [s for s, v in enumerate(call.operands) if v.name in self.stems and len(v.shape) == 3]
        rows = [s for s, v in enumerate(call.operands) if v.name not in self.stems]
        if len(slots) != 1 or len(rows) != 1 or not leads(call, slots[0]) or not leads(call, rows[0], 2):
            return None
        return slots[0] if call.operands[slots[0]].shape[0] > 1 else None

    def region(self, cores: frozenset[int]) -> Region:
        """The region of some products; NoRegion says what is in the way."""
        first = self.calls[min(cores)]
        slot = self.weight_slot(first)
        assert slot is not None
        grouped = first.op.target == GROUPED
        experts = first.operands[slot].shape[0]
        if experts % self.ranks:
            raise NoRegion(f"{first.op.module}: {experts} experts do not divide by {EP}={self.ranks}")
        ids = self.sorted_ids(first.operands[2].name, experts) if grouped else ""
        inner = cores | self.between(cores)
        biases = self.bias_lookups(inner, ids, experts)
        ops = inner | biases
        for position in sorted(inner - cores):
            self.check_rows(self.calls[position], ops, 1 if grouped else 2)
        weights = {v.name for p in cores | biases for v in self.calls[p].operands if v.name in self.stems}
        weight_ops = self.weight_ops(weights)
        stems = {self.stems[name] for name in weights}
        leaving = self.leaving(ops)
        if grouped and any(self.made[name] not in cores for name in leaving):
            raise NoRegion(f"{first.op.module}: what is between the experts' products is read outside, where rows of no expert count")
        self.check_readers(stems, ops | weight_ops)
        rows_of = next(v for v in first.operands if v.name not in self.stems)
        return Region(
            self.kind.name,
            first.operands[2].name if grouped else "",
            ids if biases else "",
            experts,
            rows_of.shape[0 if grouped else 1],
            frozenset(ops),
            biases,
            weight_ops,
            self.entering(ops, biases, 1 if grouped else 2),
            leaving,
            tuple(path for stem in sorted(stems) for path in self.paths(stem)),
        )

    def between(self, cores: frozenset[int]) -> frozenset[int]:
        """Ops that come after one of the products and before another."""
        after: set[int] = set()
        for position, call in enumerate(self.calls):
            if any(self.made.get(v.name, -1) in after | cores for v in call.operands):
                after.add(position)
        before: set[int] = set()
        pending = [self.made[v.name] for p in cores for v in self.calls[p].operands if v.name in self.made]
        while pending:
            position = pending.pop()
            if position not in before:
                before.add(position)
                pending.extend(self.made[v.name] for v in self.calls[position].operands if v.name in self.made)
        return frozenset(after & before - cores)

    def sorted_ids(self, offsets: str, experts: int) -> str:
        """The sorted expert ids that offsets count: offsets = cumsum(histc(ids)); "" when they are made otherwise."""
        name = offsets
        for target in (CUMSUM, HISTC):
            call = self.made_by(name, target)
            if call is None or (target == HISTC and tuple(call.op.args[1:]) != (experts, 0, experts - 1)):
                return ""
            name = call.operands[0].name
        while (cast := self.made_by(name, "aten.to.dtype")) is not None:
            name = cast.operands[0].name
        found = self.made_by(name, "aten.sort.default")
        return name if found is not None and found.results[0].name == name else ""

    def made_by(self, name: str, target: str) -> Call | None:
        """The call that makes a value, if it is one of this target."""
        call = self.calls[self.made[name]] if name in self.made else None
        return call if call is not None and call.op.target == target else None

    def bias_lookups(self, inner: frozenset[int], ids: str, experts: int) -> frozenset[int]:
        """Lookups bias[ids] of a bias (E, n) that the region alone reads."""
        readers = {self.segment.ops[p] for p in inner}
        return frozenset(
            position
            for position, call in enumerate(self.calls)
            if call.op.target == "aten.index.Tensor"
            and ids
            and [v.name for v in call.operands[1:]] == [ids]
            and isinstance(call.op.args[1], (list, tuple))
            and len(call.op.args[1]) == 1
            and call.operands[0].name in self.stems
            and call.operands[0].shape[0] == experts
            and set(self.graph.consumers.get(call.results[0].name, ())) <= readers
        )

    def check_rows(self, call: Call, ops: frozenset[int], dims: int) -> None:
        """Whether an op keeps its rows apart: operands either have the row dims first, or are the same on every rank."""
        for slot, value in enumerate(call.operands):
            if leads(call, slot, dims):
                continue
            inside = self.made.get(value.name, -1) in ops
            if inside or not self.is_everywhere(value) or touches_rows(call, slot, dims):
                raise NoRegion(f"{call.op.module}: {call.op.target} between the experts' products does not keep rows apart")

    def entering(self, ops: frozenset[int], biases: frozenset[int], dims: int) -> tuple[str, ...]:
        """Values made outside whose rows the region reads."""
        found: dict[str, None] = {}
        for position in sorted(ops):
            call = self.calls[position]
            for slot, value in enumerate(call.operands):
                rows = leads(call, slot, dims)
                if call.op.target == GROUPED or position in biases:
                    rows = slot == (position in biases)
                if rows and value.name not in self.stems and self.made.get(value.name, -1) not in ops:
                    found[value.name] = None
        return tuple(found)

    def leaving(self, ops: frozenset[int]) -> tuple[str, ...]:
        """Results that ops outside, or other segments, read."""
        inside = {self.segment.ops[p] for p in ops}
        results = [r.name for p in sorted(ops) for r in self.calls[p].results]
        return tuple(n for n in results if any(i not in inside for i in self.graph.consumers.get(n, ())))

    def is_everywhere(self, value: Value) -> bool:
        """Whether a value is the same on every rank of a stage: a parameter or a constant."""
        producer = self.graph.producers.get(value.name)
        if producer is not None:
            return self.graph.ops[producer].level is Level.CONSTANT
        return value.name in self.graph.parameter_of or any(value.name == b.name for b, _ in self.graph.buffers)

    def weight_ops(self, weights: set[str]) -> frozenset[int]:
        """Ops on the way from the parameters to the products."""
        found: set[int] = set()
        pending = [name for name in weights if name in self.made]
        while pending:
            position = self.made[pending.pop()]
            if position not in found:
                found.add(position)
                pending.extend(v.name for v in self.calls[position].operands if v.name in self.made)
        return frozenset(found)

    def check_readers(self, stems: set[str], marked: frozenset[int]) -> None:
        """Expert weights, and what is made of them, are read by the region alone, in every member."""
        for segment in self.kind.members:
            own = {segment.ops[p] for p in marked}
            for stem in stems:
                for name in self.same_place(stem, segment.ops):
                    if any(reader not in own for reader in self.graph.consumers[name]):
                        raise NoRegion(f"{self.graph.parameter_of[name].path} is read outside the experts' products too")
        for position in marked:
            for result in self.calls[position].results:
                outside = [i for i in self.graph.consumers.get(result.name, ()) if i not in {self.segment.ops[p] for p in marked}]
                if result.name in self.stems and outside:
                    raise NoRegion(f"{self.graph.parameter_of[self.stems[result.name]].path} is read outside the experts' products too")

    def same_place(self, name: str, ops: tuple[int, ...]) -> tuple[str, ...]:
        """The values of another member that stand where a value of the representative is read."""
        found: dict[str, None] = {}
        for position, call in enumerate(self.calls):
            for slot, value in enumerate(call.operands):
                if value.name == name:
                    found[self.graph.ops[ops[position]].operands[slot]] = None
        return tuple(found)

    def paths(self, stem: str) -> tuple[str, ...]:
        """Paths of one weight in all members."""
        names = dict.fromkeys(n for s in self.kind.members for n in self.same_place(stem, s.ops))
        return tuple(self.graph.parameter_of[n].path for n in names)


def leads(call: Call, slot: int, dims: int = 1) -> bool:
    """Whether the first dims of an operand are the first dims of every result, and independent in the op."""
    factors = factors_of(call)
    if factors is None or len(factors.operands[slot]) < dims:
        return False
    names = factors.operands[slot][:dims]
    return all(is_free(factors, name) for name in names) and all(r[:dims] == names for r in factors.results)


def is_free(factors: Factors, name: str) -> bool:
    """Whether a factor is named, may be sharded and is not summed."""
    return bool(name) and name not in factors.blocked and name not in factors.summed and name not in factors.lowering


def touches_rows(call: Call, slot: int, dims: int) -> bool:
    """Whether an operand that does not lead with the row dims has one of them."""
    factors = factors_of(call)
    rows = {name for r in factors.results for name in r[:dims]} if factors else set()
    return factors is None or any(name in rows for name in factors.operands[slot])


def region_of(regions: Mapping[str, tuple[Region, ...]], kind: str, position: int) -> Region | None:
    """The region that an op class runs in."""
    return next((r for r in regions.get(kind, ()) if position in r.ops), None)


def expert_paths(regions: Mapping[str, tuple[Region, ...]]) -> frozenset[str]:
    """Parameters that are sliced over ep."""
    return frozenset(path for found in regions.values() for region in found for path in region.parameters)


