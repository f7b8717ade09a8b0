"""Contiguous partition with OR-Tools CP-SAT: items in order to stages, least modelled step time, within memory.

Given items 0..n-1 with seconds t_i (forward and backward of one micro-batch), seconds c_i of a cut behind item i (both
directions of one micro-batch), p stages and M micro-batches:

    T(i, j)     = t_i + ... + t_{j-1}, from prefix sums
    memory      = shared parameters of items i..j-1, each counted once, + the most that there is of micro-batches at any moment of
                  the stage (passes.stage_memory)
    minimise    (M - 1) max_s T_s + sum_s T_s + sum of c over the cuts

which is the step time of a flushing pipeline (GPipe, 1F1B) whose slowest stage never waits after its first micro-batch:
exact for equal stages, close for uneven ones (passes.simulate has the exact time of the stages that are chosen).

Model. A partition is a path 0 -> n of p arcs; arc (s, i, j) is a Boolean for "stage s is items i..j-1". Flow through every
(s, i); one arc per stage; `longest` >= T of every stage. Arcs exist only where memory allows, where they lie on some path,
and where T(i, j) is no longer than a solution as good as the hint can have. Its bounds and hint come from branch and bound on
`longest` over sweeps of reachable cuts (bit sets). Of the partitions that are equally good, the evenest is taken (least sum of
T^2). One worker and a fixed seed: the answer is a function of the problem alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from operator import add

from ortools.sat.python import cp_model

from meshwright.passes.stage_memory import RULES, Doing, Moment, Option

TOTAL_TICKS = 1 << 30

Cuts = tuple[int, ...]
"""End of each stage: stage s holds items cuts[s-1] to cuts[s]-1."""

Arc = tuple[int, int, int]
"""(stage, first item, one past the last)."""

Table = tuple[tuple[int, ...], ...]
"""A number for each run of items: [first][length - 1]."""

Ends = tuple[tuple[int, ...], ...]
"""An end for each stage and first item."""


class Infeasible(Exception):
    """No partition fits; `least_bytes` is the smallest memory limit under which one does, with its cuts."""

    def __init__(self, least_bytes: int, cuts: Cuts) -> None:
        super().__init__(f"the best partition needs {least_bytes} bytes on its largest stage")
        self.least_bytes = least_bytes
        self.cuts = cuts


@dataclass(frozen=True)
class Item:
    """One indivisible piece of the chain.

    activations    what a micro-batch keeps and needs
    shared_bytes   what a stage holds once however many of its items name it (a tied parameter), by name
    """

    seconds: float
    cut_s: float
    activations: Option
    shared_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Chain:
    """The problem.

    moments       of each stage, when micro-batches may take most
    limit_bytes   of one rank; None: no limit
    pinned        fixed ends: stage -> one past its last item
    reserved      bytes of each stage whatever its items are; (): none
    """

    items: tuple[Item, ...]
    moments: tuple[tuple[Moment, ...], ...]
    micro_batches: int
    limit_bytes: int | None = None
    pinned: Mapping[int, int] = field(default_factory=dict)
    reserved: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.moments) <= len(self.items):
            raise ValueError(f"{len(self.items)} items cannot fill {len(self.moments)} stages, each with one item or more")

    @property
    def stages(self) -> int:
        return len(self.moments)

    @cached_property
    def repeats(self) -> int:
        """How often the longest stage counts besides once. (One micro-batch takes equally long however it is cut: even is
        better.)"""
        return max(1, self.micro_batches - 1)

    @cached_property
    def tick_s(self) -> float:
        """Seconds are counted in whole ticks, so that sums do not depend on their order."""
        return (sum(i.seconds + i.cut_s for i in self.items) or 1.0) / TOTAL_TICKS

    @cached_property
    def ticks(self) -> tuple[int, ...]:
        """Prefix sums of the items' seconds."""
        return tuple(accumulate((round(i.seconds / self.tick_s) for i in self.items), initial=0))

    @cached_property
    def cut_ticks(self) -> tuple[int, ...]:
        """By where the cut is: cut_ticks[j] lies before item j; nothing at the ends."""
        return (0, *(round(i.cut_s / self.tick_s) for i in self.items[:-1]), 0)

    @cached_property
    def resident_bytes(self) -> Table:
        """resident_bytes[i][j - i - 1]: shared bytes of items i..j-1, each name once."""
        return each_once([item.shared_bytes for item in self.items])

    @cached_property
    def kept(self) -> Table:
        """[i][j - i - 1]: what items i..j-1 keep of a micro-batch until its backward, each name once."""
        return self._sums([item.activations.own_bytes for item in self.items], [item.activations.shared for item in self.items])

    @cached_property
    def put_off(self) -> Table:
        """The same from there to its W."""
        waiting = [item.activations.waiting for item in self.items]
        return self._sums([w.own_bytes for w in waiting], [w.shared for w in waiting])

    def _sums(self, own: Sequence[int], shared: Sequence[Mapping[str, int]]) -> Table:
        once = each_once(shared)
        return tuple(tuple(map(add, accumulate(own[start:]), row)) for start, row in enumerate(once))

    @cached_property
    def during(self) -> dict[Doing, Table]:
        """The same: the most that there is of a micro-batch during an action of a stage."""
        options = [item.activations for item in self.items]
        found = {}
        for now in {moment.doing for at in self.moments for moment in at}:
            shared = each_once([RULES[now].shared(option) for option in options])
            found[now] = tuple(tuple(map(add, RULES[now].peaks(options[start:]), row)) for start, row in enumerate(shared))
        return found

    def duration(self, start: int, stop: int) -> int:
        """Ticks of items start..stop-1."""
        return self.ticks[stop] - self.ticks[start]

    def memory_bytes(self, stage: int, start: int, stop: int) -> int:
        """What a stage of items start..stop-1 keeps."""
        last = stop - start - 1
        most, reserved = 0, self.reserved[stage] if self.reserved else 0
        for moment in self.moments[stage]:
            there = moment.kept * self.kept[start][last] + self.during[moment.doing][start][last]
            most = max(most, there + (moment.put_off * self.put_off[start][last] if moment.put_off else 0))
        return self.resident_bytes[start][last] + most + reserved

    def cost(self, cuts: Cuts) -> int:
        """The objective in ticks."""
        return self.repeats * self.longest(cuts) + self.ticks[-1] + self.transfers(cuts)

    def longest(self, cuts: Cuts) -> int:
        """Ticks of the longest stage."""
        return max(self.duration(start, stop) for start, stop in zip((0, *cuts[:-1]), cuts, strict=True))

    def transfers(self, cuts: Cuts) -> int:
        """Ticks that the cuts cost by themselves."""
        return sum(self.cut_ticks[j] for j in cuts[:-1])


def each_once(named: Sequence[Mapping[str, int]]) -> Table:
    """[i][j - i - 1]: sum over i..j-1, each name once."""
    rows = []
    for start in range(len(named)):
        held: set[str] = set()
        total, row = 0, []
        for sizes in named[start:]:
            total += sum(n for name, n in sizes.items() if name not in held)
            held.update(sizes)
            row.append(total)
        rows.append(tuple(row))
    return tuple(rows)


class Sweep:
    """Cuts on partitions with no stage longer than `longest`: bit j of `ends[s]` stands for stage s ending before item j."""

    def __init__(self, chain: Chain, room: Ends, longest: int) -> None:
        self.chain, self.room, self.longest = chain, room, longest
        size, last = len(chain.items), chain.stages - 1
        reached, behind = [], 1
        for stage in range(chain.stages):
            behind = self.ends_after(stage, behind) & pinned_ends(chain, stage)
            reached.append(behind)
        self.feasible = bool(reached[last] >> size & 1)
        ahead = 1 << size
        self.ends = [0] * last + [ahead]
        for stage in range(last - 1, -1, -1):
            ahead = sum(1 << j for j in bits(reached[stage]) if self.span(stage + 1, j) & ahead)
            self.ends[stage] = ahead

    def last(self, stage: int, start: int) -> int:
        """The largest end that a stage may have when it starts at an item (no larger than the item when it may have none)."""
        ticks = self.chain.ticks
        return min(self.room[stage][start], bisect_right(ticks, ticks[start] + self.longest) - 1)

    def span(self, stage: int, start: int) -> int:
        """Ends that a stage may have when it starts at an item."""
        stop = self.last(stage, start)
        return (1 << stop + 1) - (1 << start + 1) if stop > start else 0

    def ends_after(self, stage: int, starts: int) -> int:
        """Ends that a stage may have when it starts at any of these items."""
        found = 0
        for start in bits(starts):
            found |= self.span(stage, start)
        return found

    def arcs(self) -> Iterator[Arc]:
        """Every stage of every such partition, by stage and first item."""
        starts = 1
        for stage in range(self.chain.stages):
            for start in bits(starts):
                yield from ((stage, start, stop) for stop in bits(self.span(stage, start) & self.ends[stage]))
            starts = self.ends[stage]


def bits(number: int) -> Iterator[int]:
    """Positions of the bits that are set, from the lowest."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def pinned_ends(chain: Chain, stage: int) -> int:
    """Ends that the pins leave to a stage; the last stage, and no other, ends the chain."""
    size = len(chain.items)
    possible = 1 << size if stage == chain.stages - 1 else (1 << size) - 1
    return possible & 1 << chain.pinned[stage] if stage in chain.pinned else possible


def last_ends(chain: Chain, limit_bytes: int | None) -> Ends:
    """For each stage and first item, the largest end that memory allows (the first item itself when there is none)."""
    size = len(chain.items)
    if limit_bytes is None:
        return ((size,) * size,) * chain.stages

    def last_end(stage: int, start: int) -> int:
        stops = range(start + 1, size + 1)
        return start + bisect_right(stops, limit_bytes, key=lambda stop: chain.memory_bytes(stage, start, stop))

    return tuple(tuple(last_end(stage, start) for start in range(size)) for stage in range(chain.stages))


def least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number of low..high for which `holds`, which holds for `high` and from some number on."""
    return low + bisect_left(range(low, high), True, key=holds)


def solve_partition(chain: Chain) -> Cuts:
    """The best cuts. Raises Infeasible when no partition fits the memory limit."""
    room = last_ends(chain, chain.limit_bytes)
    total = chain.ticks[-1]
    if not Sweep(chain, room, total).feasible:
        raise least_memory(chain)
    shortest = least(0, total, lambda longest: Sweep(chain, room, longest).feasible)
    hint = settle_longest(chain, room, shortest)
    most = (chain.cost(hint) - total - least_transfers(Sweep(chain, room, total))) // chain.repeats
    best = optimal_cuts(chain, tuple(Sweep(chain, room, most).arcs()), (shortest, most), hint)
    return cheapest_cuts(Sweep(chain, room, chain.longest(best)))


def settle_longest(chain: Chain, room: Ends, shortest: int) -> Cuts:
    """Branch and bound on `longest`: the best cuts with no longer stage than the middle of a range, then its halves if need be.

    For a given `longest` the cheapest cuts are a shortest path, and what they cost only falls as `longest` grows.
    """

    def cheapest(longest: int) -> Cuts:
        return cheapest_cuts(Sweep(chain, room, longest))

    total = chain.ticks[-1]
    best = cheapest(shortest)
    ranges = [(shortest + 1, total, least_transfers(Sweep(chain, room, total)))]
    while ranges:
        low, high, transfers = ranges.pop()
        if low > high or chain.repeats * low + total + transfers >= chain.cost(best):
            continue
        middle = min((low + high) // 2, (chain.cost(best) - total - transfers) // chain.repeats)
        cuts = cheapest(middle)
        best = min(best, cuts, key=chain.cost)
        ranges.append((middle + 1, high, transfers))
        ranges.append((low, chain.longest(cuts) - 1, chain.transfers(cuts)))
    return best


def least_transfers(sweep: Sweep) -> int:
    """What the cheapest cuts of a sweep cost by themselves: n log n for each stage, where cheapest_cuts looks at every arc."""
    chain = sweep.chain
    costs = {0: 0}
    for stage in range(chain.stages):
        found: dict[int, int] = {}
        open_: list[tuple[int, int]] = []
        starts = iter(sorted(costs))
        start = next(starts, None)
        for stop in bits(sweep.ends[stage]):
            while start is not None and start < stop:
                heappush(open_, (costs[start], sweep.last(stage, start)))
                start = next(starts, None)
            while open_ and open_[0][1] < stop:
                heappop(open_)
            if open_:
                found[stop] = open_[0][0] + chain.cut_ticks[stop]
        costs = found
    return costs[len(chain.items)]


def cheapest_cuts(sweep: Sweep) -> Cuts:
    """The cuts that cost least by themselves, and of all those the ones with the evenest stages: a shortest path."""
    chain = sweep.chain
    best: list[dict[int, tuple[int, int, Cuts]]] = [{0: (0, 0, ())}, *({} for _ in range(chain.stages))]
    for stage, start, stop in sweep.arcs():
        cost, squares, cuts = best[stage][start]
        found = (cost + chain.cut_ticks[stop], squares + chain.duration(start, stop) ** 2, (*cuts, stop))
        best[stage + 1][stop] = min(best[stage + 1].get(stop, found), found)
    return best[-1][len(chain.items)][2]


def optimal_cuts(chain: Chain, arcs: tuple[Arc, ...], bounds: tuple[int, int], hint: Cuts) -> Cuts:
    """The path of least cost with CP-SAT; `longest` lies within `bounds`, and no path costs less than the hint."""
    model = cp_model.CpModel()
    taken = {arc: model.new_bool_var(f"stage{arc[0]}:{arc[1]}-{arc[2]}") for arc in arcs}
    longest = model.new_int_var(*bounds, "longest")
    into: dict[tuple[int, int], list[cp_model.IntVar]] = {}
    out_of: dict[tuple[int, int], list[cp_model.IntVar]] = {}
    for (stage, start, stop), variable in taken.items():
        out_of.setdefault((stage, start), []).append(variable)
        into.setdefault((stage + 1, stop), []).append(variable)
    for node, variables in out_of.items():
        model.add(sum(variables) == (sum(into[node]) if node[0] else 1))
    for stage in range(chain.stages):
        own = [(arc, variable) for arc, variable in taken.items() if arc[0] == stage]
        model.add_exactly_one(variable for _, variable in own)
        model.add(sum(chain.duration(arc[1], arc[2]) * variable for arc, variable in own) <= longest)
    transfers = sum(chain.cut_ticks[arc[2]] * variable for arc, variable in taken.items() if chain.cut_ticks[arc[2]])
    cost = chain.repeats * longest + transfers
    model.add(cost >= chain.cost(hint) - chain.ticks[-1])
    model.minimize(cost)
    path = set(zip(range(chain.stages), (0, *hint[:-1]), hint, strict=True))
    for arc, variable in taken.items():
        model.add_hint(variable, arc in path)
    model.add_hint(longest, chain.longest(hint))
    return solved(model, taken)


def solved(model: cp_model.CpModel, taken: Mapping[Arc, cp_model.IntVar]) -> Cuts:
    """The model's best path."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.cp_model_presolve = False
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, f"CP-SAT found {solver.status_name(status)} where the sweep has a path"
    return tuple(arc[2] for arc, variable in taken.items() if solver.boolean_value(variable))


def least_memory(chain: Chain) -> Infeasible:
    """The smallest limit that some partition fits, and the best such partition. ValueError when the pins allow none."""
    total, size = chain.ticks[-1], len(chain.items)
    if not Sweep(chain, last_ends(chain, None), total).feasible:
        raise ValueError(f"the pinned ends {dict(chain.pinned)} leave a stage without items")
    most = max(chain.memory_bytes(stage, 0, size) for stage in range(chain.stages))
    limit = least(0, most, lambda limit_bytes: Sweep(chain, last_ends(chain, limit_bytes), total).feasible)
    return Infeasible(limit, cheapest_cuts(Sweep(chain, last_ends(chain, limit), total)))
