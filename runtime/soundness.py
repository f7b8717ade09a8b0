"""A proof, before anything runs, that no rank waits for ever: all ranks' actions and all stages' programs, checked together.

    check_schedule   the actions of the pipeline ranks, the same on every rank with a pp coordinate (how plans have them)
    check_ranks      actions of every rank of a mesh on its own

What is checked, each as an UnsoundError that prints the grid of actions with an arrow at the action to blame, or at the one that
each rank stands before:

    boundaries   what a stage SENDS is what the next RECEIVES: number, names, shapes, dtypes, which want gradients
    complete     every stage has a forward and a backward of every micro-batch, once, on its own rank; a W at most once; transfers
                 exactly where a result is read on another rank; one REDUCE, after all of them
    versions     where batches follow each other without a flush (runtime.endless): each has a REDUCE, NORM and UPDATE, in this order and
                 after its backwards; the UPDATE comes before the first forward of the batch after next, which reads its weights
    order        an action comes after what it reads on its own rank; messages of a stage in one direction are received in the order
                 in which they are sent
    no cycle     all ranks run at once, sends without waiting: each reaches its end. Actions whose program talks on an axis of the mesh,
                 and REDUCE over dp, meet: every member of the group must come to the same action, else its collectives would pair
                 with others. NORM waits for every rank's REDUCE of the batch, UPDATE for every rank's NORM
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.plans.mesh import Mesh
from meshwright.plans.programs import StageFacts
from meshwright.runtime.actions import COMPUTE, OF_BATCHES, Action, Actions, Kind, Schedule, StageRanks, stage_ranks
from meshwright.runtime.schedules import made_for, needed_receive, reads_from, sender

SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)
MEETS = frozenset({Kind.F, Kind.B})
"""Actions in which programs run collectives."""
REDUCE_AXES = ("dp", "cp", "tp")
AFTER_ALL = {Kind.NORM: Kind.REDUCE, Kind.UPDATE: Kind.NORM}
"""What waits for which action of the same batch on every rank."""


class UnsoundError(ValueError):
    """The message's first line says what is wrong, the others are the grid."""


@dataclass(frozen=True)
class Ranks:
    """What every rank of a mesh is told to do. `stages`: what each stage's program sends, receives and talks on; `batch`: micro-batches
    of each of several batches without a flush."""

    mesh: Mesh
    actions: tuple[Actions, ...]
    stage_ranks: StageRanks
    stages: tuple[StageFacts, ...]
    batch: int | None = None

    def fail(self, problem: str, at: Mapping[int, int]) -> UnsoundError:
        """The grid, with an arrow before action at[rank] of some ranks."""
        lines = []
        for rank, actions in enumerate(self.actions):
            words = [f"-> {a}" if at.get(rank) == i else str(a) for i, a in enumerate(actions)]
            words += ["-> end"] if at.get(rank) == len(actions) else []
            lines.append(f"rank {rank}: {' '.join(words)}")
        return UnsoundError("\n".join([f"schedule cannot run: {problem}", *lines]))

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        return self.mesh.group(rank, axis)

    def meetings(self, rank: int, action: Action) -> tuple[tuple[int, ...], ...]:
        """The groups that an action runs collectives in."""
        axes: Sequence[str] = ()
        if action.kind in MEETS:
            axes = self.stages[action.stage].axes
        elif action.kind is Kind.REDUCE:
            axes = REDUCE_AXES
        return tuple(g for g in (self.group(rank, axis) for axis in axes if axis != "pp") if len(g) > 1)


def check_schedule(
    schedule: Schedule, stages: Sequence[StageFacts] = (), mesh: Mesh | None = None, batch: int | None = None
) -> None:
    """Raises UnsoundError for a schedule that cannot run with these programs on this mesh.

    Ranks that differ in dp or tp alone have the same actions, so two of each stand for all. Without `stages`, programs that
    talk on no axis are taken. `batch`: micro-batches of each of several batches without a flush.
    """
    try:
        ranks = stage_ranks(schedule)
    except ValueError as error:
        raise UnsoundError("\n".join([f"schedule cannot run: {error}", *_lines(schedule)])) from None
    few = Mesh(pp=len(schedule)) if mesh is None else Mesh(pp=mesh.pp, dp=min(2, mesh.dp), tp=min(2, mesh.tp), ep=min(2, mesh.ep))
    if few.pp != len(schedule):
        raise UnsoundError(f"schedule cannot run: it has {len(schedule)} ranks, the mesh has pp={few.pp}")
    actions = tuple(schedule[few.coordinates(rank)["pp"]] for rank in range(few.world_size))
    check_ranks(Ranks(few, actions, ranks, tuple(stages) or (StageFacts(),) * len(ranks), batch))


def _lines(schedule: Schedule) -> list[str]:
    return [f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(schedule)]


def check_ranks(ranks: Ranks) -> None:
    """Raises UnsoundError for ranks that cannot all reach their end; see the module."""
    if len(ranks.stages) != len(ranks.stage_ranks):
        raise UnsoundError(f"schedule cannot run: it has {len(ranks.stage_ranks)} stages, there are {len(ranks.stages)} programs")
    _check_boundaries(ranks.stages)
    micro_batches = 1 + max((a.micro_batch for actions in ranks.actions for a in actions if a.kind not in OF_BATCHES), default=-1)
    for rank in range(len(ranks.actions)):
        _check_complete(ranks, rank, micro_batches)
    _check_messages(ranks)
    _Race(ranks).run()


def _check_boundaries(stages: Sequence[StageFacts]) -> None:
    """What is sent is what is received."""
    for stage, (before, after) in enumerate(pairwise(stages)):
        if before.sends == after.receives:
            continue
        where = f"programs/stage_{stage}.py SENDS and programs/stage_{stage + 1}.py RECEIVES"
        pairs = zip(before.sends, after.receives, strict=False)
        odd = next(((a, b) for a, b in pairs if a != b), None)
        found = f"{odd[0]} and {odd[1]}" if odd else f"{len(before.sends)} and {len(after.receives)} tensors"
        raise UnsoundError(f"schedule cannot run: {where} differ: found {found}")
    if stages and (stages[0].receives or stages[-1].sends):
        raise UnsoundError("schedule cannot run: the first stage receives, or the last one sends")


def _check_complete(ranks: Ranks, rank: int, micro_batches: int) -> None:
    """Everything that a rank must do is done once, and nothing else; transfers and what they carry in order."""
    coordinate = ranks.mesh.coordinates(rank)["pp"]
    stages = [stage for stage, at in enumerate(ranks.stage_ranks) if at == coordinate]
    wanted = {Action(s, kind, i) for s in stages for kind in (Kind.F, Kind.B) for i in range(micro_batches)}
    sends = {send for a in wanted if (send := made_for(a, ranks.stage_ranks)) is not None}
    receives = {receive for a in wanted if (receive := needed_receive(a, ranks.stage_ranks)) is not None}
    wanted |= sends | receives | set(_once_for_a_batch(ranks, stages, micro_batches))
    place: dict[Action, int] = {}
    for i, action in enumerate(ranks.actions[rank]):
        if action in place:
            raise ranks.fail(f"{action} comes twice", {rank: i})
        if action not in wanted and not (action.kind is Kind.W and Action(action.stage, Kind.B, action.micro_batch) in wanted):
            raise ranks.fail(f"{action} is not for this rank to do", {rank: i})
        place[action] = i
    if missing := sorted(map(str, wanted - place.keys())):
        raise ranks.fail(f"rank {rank} has no {missing[0]}", {rank: len(ranks.actions[rank])})
    for action, i in place.items():
        if (before := _missing_before(ranks, action, place, i)) is not None:
            raise ranks.fail(f"{action} comes before {before}", {rank: i})


def _once_for_a_batch(ranks: Ranks, stages: Sequence[int], micro_batches: int) -> Iterator[Action]:
    if ranks.batch is None:
        yield from (Action(stage, Kind.REDUCE) for stage in stages)
    else:
        yield from (Action(s, kind, b) for s in stages for kind in OF_BATCHES for b in range(micro_batches // ranks.batch))


def _missing_before(ranks: Ranks, action: Action, place: Mapping[Action, int], at: int) -> Action | None:
    """What an action needs on its own rank that does not come before it."""
    needs = []
    stage, i = action.stage, action.micro_batch
    match action.kind:
        case Kind.F | Kind.B:
            source = needed_receive(action, ranks.stage_ranks) or reads_from(action, len(ranks.stage_ranks))
            needs = [] if source is None else [source]
            needs += [Action(stage, Kind.F, i)] if action.kind is Kind.B else _versions_read(ranks, action)
        case Kind.W:
            needs = [Action(stage, Kind.B, i)]
        case Kind.SEND_F:
            needs = [Action(stage, Kind.F, i)]
        case Kind.SEND_B:
            needs = [Action(stage, Kind.B, i)]
        case Kind.REDUCE if ranks.batch is None:
            needs = [a for a in place if a.stage == stage and a.kind is not Kind.REDUCE]
        case Kind.REDUCE:
            needs = [a for a in place if a.kind in COMPUTE and a.micro_batch // (ranks.batch or 1) == i]
        case Kind.NORM:
            needs = [Action(stage, Kind.REDUCE, i)]
        case Kind.UPDATE:
            needs = [Action(stage, Kind.NORM, i)]
    return next((need for need in needs if place[need] > at), None)


def _versions_read(ranks: Ranks, forward: Action) -> list[Action]:
    """The update that makes the weights of a forward."""
    batch = 0 if ranks.batch is None else forward.micro_batch // ranks.batch
    return [Action(forward.stage, Kind.UPDATE, batch - 2)] if batch >= 2 else []


def _check_messages(ranks: Ranks) -> None:
    """On each channel (a stage and a direction) receives are posted in the order of the sends."""
    for receiver, actions in enumerate(ranks.actions):
        posted: dict[tuple[int, Kind], list[Action]] = {}
        for action in actions:
            if action.kind in RECEIVES:
                send = sender(action)
                posted.setdefault((send.stage, send.kind), []).append(send)
        for (stage, kind), expected in posted.items():
            peer = _peer(ranks, receiver, stage)
            sent = [a for a in ranks.actions[peer] if (a.stage, a.kind) == (stage, kind)]
            if sent != expected:
                first = next((i for i, (a, b) in enumerate(zip(sent, expected, strict=False)) if a != b), len(sent) - 1)
                at = {peer: ranks.actions[peer].index(sent[first])} if sent else {}
                words = " ".join(map(str, sent))
                raise ranks.fail(f"{words} of rank {peer} are received in another order on rank {receiver}", at)


def _peer(ranks: Ranks, rank: int, stage: int) -> int:
    """The rank with a stage that has a rank's other coordinates."""
    at = ranks.mesh.coordinates(rank)
    return ranks.mesh.rank(pp=ranks.stage_ranks[stage], dp=at["dp"], cp=at["cp"], tp=at["tp"])


class _Race:
    """All ranks at once."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.at = [0] * len(ranks.actions)
        self.done: set[tuple[int, Action]] = set()
        self.arrived: dict[tuple[tuple[int, ...], Action], set[int]] = {}

    def run(self) -> None:
        moved = True
        while moved:
            moved = any([self.advance(rank) for rank in range(len(self.at))])
        if any(i < len(actions) for i, actions in zip(self.at, self.ranks.actions, strict=True)):
            raise self.ranks.fail(self.why(), dict(enumerate(self.at)))

    def advance(self, rank: int) -> bool:
        """Runs a rank as far as it gets; whether anything changed."""
        actions, start, news = self.ranks.actions[rank], self.at[rank], False
        while self.at[rank] < len(actions):
            action = actions[self.at[rank]]
            if not self.has_arrived(rank, action):
                break
            groups = self.ranks.meetings(rank, action)
            for group in groups:
                here = self.arrived.setdefault((group, action), set())
                news |= rank not in here
                here.add(rank)
            if any(self.arrived[group, action] != set(group) for group in groups):
                break
            self.done.add((rank, action))
            self.at[rank] += 1
        return news or self.at[rank] > start

    def has_arrived(self, rank: int, action: Action) -> bool:
        """Whether the message that an action waits for has been sent, or what other ranks add to it."""
        if action.kind in AFTER_ALL and self.ranks.batch is not None:
            before = AFTER_ALL[action.kind]
            return all(
                (other, Action(stage, before, action.micro_batch)) in self.done
                for other in range(len(self.at))
                for stage, at in enumerate(self.ranks.stage_ranks)
                if at == self.ranks.mesh.coordinates(other)["pp"]
            )
        receive = needed_receive(action, self.ranks.stage_ranks) if action.kind in COMPUTE else None
        if receive is None:
            return True
        send = sender(receive)
        return (_peer(self.ranks, rank, send.stage), send) in self.done

    def why(self) -> str:
        """What a rank that stands still waits for: a collective if there is one, since that may be what messages wait for."""
        standing = {r: a[i] for r, (a, i) in enumerate(zip(self.ranks.actions, self.at, strict=True)) if i < len(a)}
        for rank, action in standing.items():
            for group in self.ranks.meetings(rank, action) if self.has_arrived(rank, action) else ():
                for other in group:
                    if self.has_arrived(other, standing.get(other, action)) and other not in self.arrived[group, action]:
                        return f"rank {rank} in {action}, whose collectives rank {other} does not come to in this order"
        rank, action = min(((r, a) for r, a in standing.items() if not self.has_arrived(r, a)), key=lambda at: at[1].kind in AFTER_ALL)
        if action.kind in AFTER_ALL:
            return f"every rank has ended or waits for ever; rank {rank} before {action}, for {AFTER_ALL[action.kind].value} of all ranks"
        receive = needed_receive(action, self.ranks.stage_ranks)
        assert receive is not None
        send = sender(receive)
        peer = _peer(self.ranks, rank, send.stage)
        return f"every rank has ended or waits for ever; rank {rank} before {action}, for {send} of rank {peer}"
