"""A schedule made for the stages at hand: F, B and W of every rank ordered for their own times, transfers and memory.

Given the stages' places on ranks, seconds F_s, B_s, W_s of a micro-batch and c_s of the transfer behind stage s, m micro-batches, and
room R_r on rank r, of which a micro-batch of stage s takes a_s from its forward to its backward and d_s from there to its weight gradient,
and for the moment more in each of these (passes.stage_memory):

    minimise   the end of the last action
    subject to F(s, i) after F(s-1, i) + c_(s-1);  B(s, i) after F(s, i) and B(s+1, i) + c_s;  W(s, i) after B(s, i)
               a rank does one action at a time; micro-batches on rank r never take more than R_r
               actions of a kind and stage in the order of micro-batches (they are alike, so nothing is lost)

    list_order   a list scheduler: at any time a rank does the backward that is ready, or else the forward, or else fills the gap with W
    improve      CP-SAT from the best order known: intervals, no overlap per rank, a cumulative constraint per rank for memory; then the
                 same over windows of time in turn, actions outside of which keep their order (large neighbourhood search)

Orders are compared by their exact simulated time (passes.simulate), starting with the named schedule's: the result is never worse, takes
no more room, and is a function of the problem alone (one worker, deterministic time limits).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from ortools.sat.python import cp_model

from meshwright.passes.order_problem import Problem, taken_bytes
from meshwright.passes.simulate import Timeline, Times, timed
from meshwright.runtime.actions import Action, Kind, Schedule, split_backwards
from meshwright.runtime.schedules import reads_from

TICKS = 1 << 15
"""Of the start's step; times are whole numbers of them."""
WHOLE_ACTIONS = 400
"""Actions up to which the whole problem is solved at once first."""
WHOLE_LIMIT, WINDOW_LIMIT = 2.0, 0.1
"""Deterministic time of one solve, as CP-SAT counts it."""
WINDOW_ACTIONS = 40
ROUNDS = 2
MOST_WINDOWS = 60
"""Windows that are solved in a round, evenly spread over a step."""
MANY_CHOICES = 30_000
"""Actions times ranks from which the list scheduler tries its middle policies alone."""
GAIN = 1e-4
"""Relative improvement that counts."""


def synthesise(problem: Problem, tell: Callable[[str], None] = lambda text: None) -> Schedule:
    """The best order found; `start` itself when nothing beats it."""
    best = problem.start
    for order in list_orders(problem):
        best = better(problem, best, order)
    if is_shortest(problem, best):
        return best
    tell("ordering actions with CP-SAT")
    if sum(len(actions) for actions in split_order(problem, best)) <= WHOLE_ACTIONS:
        best = better(problem, best, improve(problem, best, None, WHOLE_LIMIT))
    for _ in range(ROUNDS):
        before = problem.step_s(best)
        for window in windows(problem, best):
            if is_shortest(problem, best):
                return best
            best = better(problem, best, improve(problem, best, window, WINDOW_LIMIT))
        if problem.step_s(best) > before * (1 - GAIN):
            break
    return best


def is_shortest(problem: Problem, order: Schedule) -> bool:
    """Whether an order is as short as any can be: a rank begins with the forward of its first stage, then has all its work to do."""
    times, ranks = problem.times, problem.ranks
    least = 0.0
    for rank in range(len(problem.start)):
        stages = problem.stages_on(rank)
        sent = sum(times.transfer_s[s] for s in range(stages[0]) if ranks[s] != ranks[s + 1])
        work = problem.micro_batches * sum(times.forward_s[s] + times.backward_s[s] for s in stages)
        least = max(least, sum(times.forward_s[: stages[0]]) + sent + work)
    return problem.step_s(order) <= least * (1 + GAIN)


def better(problem: Problem, best: Schedule, other: Schedule | None) -> Schedule:
    """The shorter of two orders that fit; the first unless the other gains something."""
    if other is None or any(map(int.__gt__, taken_bytes(other, problem.needs), problem.room)):
        return best
    return other if problem.step_s(other) < problem.step_s(best) * (1 - GAIN) else best


# the list scheduler


@dataclass(frozen=True)
class Policy:
    """How the list scheduler chooses.

    eagerness   forwards that a rank does before backwards are preferred, in multiples of the stages that follow on other ranks
    patience    the shortest gap that is filled with W, as a share of W
    """

    eagerness: float
    patience: float


def list_orders(problem: Problem) -> Iterator[Schedule]:
    """Orders of all policies that come to an end."""
    few = sum(map(len, problem.start)) * len(problem.start) > MANY_CHOICES
    for eagerness, patience in product((1.0, 2.0) if few else (0.5, 1.0, 1.5, 2.0, 3.0), (0.5,) if few else (0.0, 0.5, 1.0)):
        order = list_order(problem, Policy(eagerness, patience))
        if order is not None:
            yield order


def list_order(problem: Problem, policy: Policy) -> Schedule | None:
    """An order by one policy; None when it runs out of room."""
    state = _List(problem, policy)
    while state.left:
        if not state.advance():
            return None
    return tuple(map(tuple, state.found))


class _List:
    """Ranks in time: whoever is free first does the next thing."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        num_ranks = len(problem.start)
        self.found: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.free = [0.0] * num_ranks
        self.used = [0] * num_ranks
        self.ends: dict[Action, float] = {}
        self.next = {(s, kind): 0 for s in range(len(problem.ranks)) for kind in problem.kinds(s)}
        self.left = len(self.next) * problem.micro_batches
        self.stages = [problem.stages_on(rank) for rank in range(num_ranks)]
        self.spare = [max(problem.extra(Action(stage, Kind.B, 0)) for stage in stages) for stages in self.stages]

    def advance(self) -> bool:
        """One more action, of the rank that can begin one first; False when no rank can."""
        choices = [choice for rank in range(len(self.free)) if (choice := self.choose(rank)) is not None]
        if not choices:
            return False
        start, rank, action = min(choices, key=lambda c: c[:2])
        split = action.stage in self.problem.splits
        self.ends[action] = self.free[rank] = start + self.problem.times.seconds(action, split)
        self.found[rank].append(action)
        self.next[action.stage, action.kind] += 1
        self.left -= 1
        needs = self.problem.needs[action.stage]
        if action.kind is Kind.F:
            self.used[rank] += needs.kept
        elif action.kind is Kind.B:
            self.used[rank] += (needs.put_off if split else 0) - needs.kept
        else:
            self.used[rank] -= needs.put_off
        return True

    def fits(self, rank: int, action: Action) -> bool:
        """Whether a rank has room for an action, and after a forward still for any backward."""
        needs, extra = self.problem.needs[action.stage], self.problem.extra(action)
        if action.kind is Kind.F:
            extra = needs.kept + max(extra, self.spare[rank])
        return action.kind is Kind.W or self.used[rank] + extra <= self.problem.room[rank]

    def choose(self, rank: int) -> tuple[float, int, Action] | None:
        """(start, rank, action) of what a rank does next."""
        now = self.free[rank]
        ready = {kind: self.candidates(rank, kind, now) for kind in (Kind.F, Kind.B, Kind.W)}
        held = sum(self.next[s, Kind.F] - self.next[s, Kind.B] for s in self.stages[rank])
        eager = held < self.policy.eagerness * (len(self.free) - rank)
        order = (Kind.F, Kind.B) if eager else (Kind.B, Kind.F)
        pressing = [ready[kind][0] for kind in order if ready[kind] and ready[kind][0][0] <= now]
        if pressing:
            return pressing[0][0], rank, pressing[0][1]
        waiting = min((ready[kind][0] for kind in order if ready[kind]), key=lambda c: c[0], default=None)
        if ready[Kind.W]:
            start, action = ready[Kind.W][0]
            gap = self.policy.patience * self.problem.times.backward_weight_s[action.stage]
            if waiting is None or waiting[0] - now >= gap:
                return start, rank, action
        return None if waiting is None else (waiting[0], rank, waiting[1])

    def candidates(self, rank: int, kind: Kind, now: float) -> list[tuple[float, Action]]:
        """(when it can start, action) for the next action of a kind in every stage of a rank, earliest and latest stage first."""
        found = []
        for stage in self.stages[rank]:
            if self.next.get((stage, kind), self.problem.micro_batches) >= self.problem.micro_batches:
                continue
            action = Action(stage, kind, self.next[stage, kind])
            if not self.fits(rank, action):
                continue
            ready = ready_s(self.problem, action, self.ends)
            if ready is not None:
                found.append((max(now, ready), action))
        return sorted(found, key=lambda c: (c[0], -c[1].stage))


def ready_s(problem: Problem, action: Action, ends: dict[Action, float]) -> float | None:
    """When what an action reads is there; None while that is not known."""
    times = []
    for source, delay in sources(problem, action):
        if source not in ends:
            return None
        times.append(ends[source] + delay)
    return max(times, default=0.0)


def sources(problem: Problem, action: Action) -> Iterator[tuple[Action, float]]:
    """What an action comes after, and how long after."""
    source = reads_from(action, len(problem.ranks))
    if source is not None:
        sent = problem.ranks[source.stage] != problem.ranks[action.stage]
        yield source, problem.times.transfer_s[min(source.stage, action.stage)] if sent else 0.0
    if action.kind is not Kind.F:
        yield Action(action.stage, Kind.F if action.kind is Kind.B else Kind.B, action.micro_batch), 0.0


# CP-SAT

Time = cp_model.LinearExprT
Window = tuple[float, float]
"""Ticks from and to: actions that start in it are free."""


def split_order(problem: Problem, order: Schedule) -> Schedule:
    """The same order with a W right behind every backward that had its weight gradients in it."""
    found = []
    for actions in order:
        split = split_backwards(actions)
        row: list[Action] = []
        for a in actions:
            if a.kind is not Kind.W or a.stage in problem.splits:
                row.append(a)
            if a.kind is Kind.B and a.stage in problem.splits and (a.stage, a.micro_batch) not in split:
                row.append(Action(a.stage, Kind.W, a.micro_batch))
        found.append(tuple(row))
    return tuple(found)


def in_ticks(problem: Problem, order: Schedule) -> tuple[Times, Timeline]:
    """The times in whole ticks, and when actions run with them."""
    tick_s = problem.step_s(problem.start) / TICKS or 1.0
    rows = (problem.times.forward_s, problem.times.backward_input_s, problem.times.backward_weight_s, problem.times.transfer_s)
    times = Times(*(tuple(float(round(t / tick_s)) for t in row) for row in rows))
    return times, timed(split_order(problem, order), times)


def windows(problem: Problem, order: Schedule) -> Iterator[Window]:
    """Windows that overlap by half, over a whole step."""
    starts = sorted(span.start_s for rank in in_ticks(problem, order)[1].timeline for span in rank)
    half = WINDOW_ACTIONS // 2
    places = range(0, max(1, len(starts) - half), half)
    for first in places[:: -(-len(places) // MOST_WINDOWS)]:
        last = min(first + WINDOW_ACTIONS, len(starts)) - 1
        yield starts[first], starts[last]


def improve(problem: Problem, order: Schedule, window: Window | None, limit: float) -> Schedule | None:
    """A better order by CP-SAT within a deterministic time limit; None when it finds none. Outside a window order is kept."""
    times, known = in_ticks(problem, order)
    model = _Model(problem, times, known)
    for spans in known.timeline:
        model.add_rank([s.action for s in spans], [window is None or window[0] <= s.start_s <= window[1] for s in spans])
    return model.solve(limit)


class _Model:
    """The problem of the module for one solve, in ticks. `known`: the order to improve."""

    def __init__(self, problem: Problem, times: Times, known: Timeline) -> None:
        self.problem, self.times = problem, times
        self.model = cp_model.CpModel()
        self.horizon = int(known.step_s)
        hints = {span.action: int(span.start_s) for spans in known.timeline for span in spans}
        self.starts = {a: self.model.new_int_var(0, self.horizon, str(a)) for a in hints}
        self.end = self.model.new_int_var(0, self.horizon, "end")
        self.model.minimize(self.end)
        self.model.add_hint(self.end, self.horizon)
        for action, variable in self.starts.items():
            self.model.add_hint(variable, hints[action])
            for source, delay in sources(replace(problem, times=times), action):
                self.model.add(variable >= self.starts[source] + self.length(source) + int(delay))
            self.model.add(self.end >= variable + self.length(action))

    def length(self, action: Action) -> int:
        """Ticks that an action takes."""
        return int(self.times.seconds(action, action.stage in self.problem.splits))

    def add_rank(self, actions: Sequence[Action], free: Sequence[bool]) -> None:
        """One action at a time: in the order given where not both of a pair are free."""
        intervals = {a: self.model.new_fixed_size_interval_var(self.starts[a], self.length(a), f"{a}") for a in actions}
        runs: list[list[Action]] = []
        for i, action in enumerate(actions):
            if i and free[i] and free[i - 1]:
                runs[-1].append(action)
            else:
                runs.append([action])
        for before, after in pairwise(runs):
            for first, second in product(before, after):
                self.model.add(self.starts[second] >= self.starts[first] + self.length(first))
        for run in runs:
            if len(run) > 1:
                self.model.add_no_overlap([intervals[a] for a in run])
                self.keep_micro_batches_in_order(run)
        self.add_room(actions)

    def keep_micro_batches_in_order(self, run: Sequence[Action]) -> None:
        latest: dict[tuple[int, Kind], Action] = {}
        for action in sorted(run, key=lambda a: a.micro_batch):
            key = (action.stage, action.kind)
            if key in latest:
                self.model.add(self.starts[action] >= self.starts[latest[key]] + self.length(latest[key]))
            latest[key] = action

    def add_room(self, actions: Sequence[Action]) -> None:
        """What is taken at a time fits: until a backward's end what its forward keeps, then what is put off; while an action runs what it
        takes beside."""
        rank = self.problem.ranks[actions[0].stage]
        stages = self.problem.stages_on(rank)
        room, splits = self.problem.room[rank], self.problem.splits
        most = sum(max(self.problem.needs[s].kept, self.problem.needs[s].put_off) for s in stages) * self.problem.micro_batches
        if most + max(map(self.problem.extra, actions)) <= room:
            return
        intervals: list[cp_model.IntervalVar] = []
        demands: list[int] = []

        def take(size: int, start: Time, until: Time) -> None:
            if not size:
                return
            length = self.model.new_int_var(0, self.horizon, f"length{len(demands)}")
            intervals.append(self.model.new_interval_var(start, length, until, f"take{len(demands)}"))
            demands.append(size)

        for action in actions:
            start, needs = self.starts[action], self.problem.needs[action.stage]
            end = start + self.length(action)
            take(self.problem.extra(action), start, end)
            if action.kind is Kind.F:
                lasts = Kind.W if action.stage in splits and needs.kept == needs.put_off else Kind.B
                take(needs.kept, start, self.end_of(action.stage, lasts, action.micro_batch))
            elif action.kind is Kind.B and action.stage in splits and needs.kept != needs.put_off:
                take(needs.put_off, end, self.end_of(action.stage, Kind.W, action.micro_batch))
        self.model.add_cumulative(intervals, demands, room)

    def end_of(self, stage: int, kind: Kind, micro_batch: int) -> Time:
        """When an action ends."""
        action = Action(stage, kind, micro_batch)
        return self.starts[action] + self.length(action)

    def solve(self, limit: float) -> Schedule | None:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = limit
        solver.parameters.linearization_level = 0
        solver.parameters.cp_model_probing_level = 0
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        found: list[list[Action]] = [[] for _ in self.problem.start]
        rank_order = {Kind.F: 0, Kind.B: 1, Kind.W: 2}
        for action in sorted(self.starts, key=lambda a: (solver.value(self.starts[a]), rank_order[a.kind], a.micro_batch, -a.stage)):
            found[self.problem.ranks[action.stage]].append(action)
        return tuple(map(tuple, found))
