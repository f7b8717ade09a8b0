"""The check that no schedule can hang: what it says, and random mutations against a naive execution."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import pytest

from meshwright.plans.mesh import Mesh
from meshwright.plans.programs import StageFacts
from meshwright.runtime.actions import Action, Actions, Kind, parse, stage_ranks
from meshwright.runtime.orders import SCHEDULES
from meshwright.runtime.schedules import build
from meshwright.runtime.soundness import Ranks, UnsoundError, check_ranks, check_schedule

H = ("h", (1, 4, 8), "float32", True)


def facts(stages: int, *axes: str) -> tuple[StageFacts, ...]:
    return tuple(StageFacts((H,) if s else (), (H,) if s + 1 < stages else (), axes) for s in range(stages))


GOOD = (
    "rank 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE\n"
    "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE"
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1RECV_F1 ", "", r"rank 1 has no 1RECV_F1\nrank 0: .*\nrank 1: .* -> end"),
        ("0F1 0SEND_F1", "0F1", "rank 0 has no 0SEND_F1"),
        ("0F1 ", "0F1 0F1 ", r"0F1 comes twice\nrank 0: .* 0F1 -> 0F1"),
        ("0B0 0B1", "0B0 0B2", r"0B2 is not for this rank|rank 0 has no"),
        ("1F0 1RECV_F1 1B0", "1B0 1RECV_F1 1F0", "1B0 comes before 1F0"),
        ("0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0", "0F1 0SEND_F1 0RECV_B1 0B0 0RECV_B0", "0B0 comes before 0RECV_B0"),
        (
            "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1",
            "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0",
            "0SEND_F1 0SEND_F0 of rank 0 are received in another order",
        ),
        ("0B1 0REDUCE", "0REDUCE 0B1", "0REDUCE comes before 0B1"),
        ("1SEND_B1 1REDUCE", "1SEND_B1 1REDUCE 0F0", "stage 0 is on ranks 0 and 1"),
    ],
)  # fmt: skip
def test_what_cannot_run(old: str, new: str, message: str) -> None:
    check_schedule(parse(GOOD), facts(2))
    assert old in GOOD
    with pytest.raises(UnsoundError, match=message):
        check_schedule(parse(GOOD.replace(old, new)), facts(2))


def test_a_cycle_shows_where_every_rank_stands() -> None:
    text = (
        "rank 0: 0F0 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0F1 0SEND_F1 0B1 0REDUCE\n"
        "rank 1: 1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE"
    )
    with pytest.raises(UnsoundError) as caught:
        check_schedule(parse(text))
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "schedule cannot run: every rank has ended or waits for ever; rank 0 before 0B0, for 1SEND_B0 of rank 1"
    )
    assert "-> 0B0 0RECV_B1" in lines[1] and "1F0 -> 1F1" in lines[2]


def test_programs_must_agree_on_what_crosses() -> None:
    schedule = build("1f1b", 2, 2)
    first, second = facts(2)
    for other in (("h", (1, 2, 8), "float32", True), ("h", (1, 4, 8), "bfloat16", True), ("h", (1, 4, 8), "float32", False)):
        with pytest.raises(UnsoundError, match=r"stage_0.py SENDS and programs/stage_1.py RECEIVES differ"):
            check_schedule(schedule, (first, StageFacts((other,))))
    with pytest.raises(UnsoundError, match="found 1 and 2 tensors"):
        check_schedule(schedule, (first, StageFacts((H, H))))
    with pytest.raises(UnsoundError, match="it has 2 stages, there are 1 programs"):
        check_schedule(schedule, (second,))
    with pytest.raises(UnsoundError, match="it has 2 ranks, the mesh has pp=4"):
        check_schedule(schedule, facts(2), Mesh(pp=4))


def test_members_of_a_group_come_to_collectives_in_one_order() -> None:
    mesh = Mesh(pp=2, tp=2)
    schedule = build("gpipe", 2, 2)
    actions = [schedule[mesh.coordinates(rank)["pp"]] for rank in range(4)]
    check_ranks(Ranks(mesh, tuple(actions), (0, 1), facts(2, "tp")))
    b0, b1 = (next(i for i, a in enumerate(actions[3]) if str(a) == text) for text in ("1B0", "1B1"))
    swapped = list(actions[3])
    swapped[b0], swapped[b1] = swapped[b1], swapped[b0]
    swapped = [a for a in swapped if a.kind is not Kind.SEND_B]
    swapped[-1:] = [Action(1, Kind.SEND_B, 0), Action(1, Kind.SEND_B, 1), Action(1, Kind.REDUCE)]
    world = (*actions[:3], tuple(swapped))
    check_ranks(Ranks(mesh, world, (0, 1), facts(2)))
    with pytest.raises(UnsoundError, match="rank 2 in 1B0, whose collectives rank 3 does not come to"):
        check_ranks(Ranks(mesh, world, (0, 1), facts(2, "tp")))


@dataclass
class Naive:
    """Executes all ranks literally: queues per channel, one step of one rank at a time. `run` says whether it went well."""

    ranks: Ranks
    queues: dict[tuple[int, int, Kind, int], list[int]] = field(default_factory=dict)
    posted: dict[tuple[int, int, Kind, int], list[int]] = field(default_factory=dict)
    done: list[list[Action]] = field(default_factory=list)
    collectives: dict[tuple[int, ...], dict[int, list[Action]]] = field(default_factory=dict)

    def run(self, micro_batches: int) -> bool:
        actions = self.ranks.actions
        self.done = [[] for _ in actions]
        at = [0] * len(actions)
        moved = True
        try:
            while moved:
                moved = False
                for rank in range(len(actions)):
                    while at[rank] < len(actions[rank]) and self.step(rank, actions[rank][at[rank]]):
                        self.done[rank].append(actions[rank][at[rank]])
                        at[rank] += 1
                        moved = True
        except LookupError:
            return False
        ended = all(i == len(a) for i, a in zip(at, actions, strict=True))
        return ended and not any(self.queues.values()) and self.is_complete(micro_batches)

    def is_complete(self, micro_batches: int) -> bool:
        for rank, done in enumerate(self.done):
            stages = [s for s, r in enumerate(self.ranks.stage_ranks) if r == self.ranks.mesh.coordinates(rank)["pp"]]
            compute = [a for a in done if a.kind in (Kind.F, Kind.B)]
            wanted = {Action(s, k, i) for s in stages for k in (Kind.F, Kind.B) for i in range(micro_batches)}
            if len(compute) != len(wanted) or set(compute) != wanted:
                return False
            for stage in stages:
                own = [a for a in done if a.stage == stage]
                if sum(a.kind is Kind.REDUCE for a in own) != 1 or own[-1].kind is not Kind.REDUCE:
                    return False
            if any(self.posted.get(key) for key in self.posted if key[1] == rank):
                return False
        return True

    def peer(self, rank: int, stage: int) -> int:
        at = self.ranks.mesh.coordinates(rank)
        return self.ranks.mesh.rank(pp=self.ranks.stage_ranks[stage], dp=at["dp"], tp=at["tp"])

    def step(self, rank: int, action: Action) -> bool:
        """Whether it ran; LookupError when it never can or does harm."""
        done, stage, i = self.done[rank], action.stage, action.micro_batch
        at = self.ranks.mesh.coordinates(rank)["pp"]
        if not stage < len(self.ranks.stage_ranks) or self.ranks.stage_ranks[stage] != at:
            raise LookupError
        match action.kind:
            case Kind.SEND_F | Kind.SEND_B:
                forward = action.kind is Kind.SEND_F
                other = stage + (1 if forward else -1)
                if Action(stage, Kind.F if forward else Kind.B, i) not in done or not 0 <= other < len(self.ranks.stage_ranks):
                    raise LookupError
                self.queues.setdefault((rank, self.peer(rank, other), action.kind, stage), []).append(i)
                return True
            case Kind.RECV_F | Kind.RECV_B:
                kind, source = (Kind.SEND_F, stage - 1) if action.kind is Kind.RECV_F else (Kind.SEND_B, stage + 1)
                if not 0 <= source < len(self.ranks.stage_ranks):
                    raise LookupError
                self.posted.setdefault((self.peer(rank, source), rank, kind, source), []).append(i)
                return True
            case Kind.REDUCE:
                return self.meet(rank, action)
            case Kind.W:
                if Action(stage, Kind.B, i) not in done or action in done:
                    raise LookupError
                return True
        if action in done or (action.kind is Kind.B and Action(stage, Kind.F, i) not in done):
            raise LookupError
        source = stage + (-1 if action.kind is Kind.F else 1)
        if 0 <= source < len(self.ranks.stage_ranks):
            sender = self.peer(rank, source)
            key = (sender, rank, Kind.SEND_F if action.kind is Kind.F else Kind.SEND_B, source)
            if sender == rank:
                if Action(source, action.kind, i) not in done:
                    raise LookupError
            else:
                place = self.posted.get(key, []).index(i) if i in self.posted.get(key, []) else -1
                if place < 0:
                    raise LookupError
                queue = self.queues.get(key, [])
                if len(queue) <= place:
                    return False
                if queue[: place + 1] != self.posted[key][: place + 1]:
                    raise LookupError
                if not self.meet(rank, action):
                    return False
                del queue[place], self.posted[key][place]
                return True
        return self.meet(rank, action)

    def meet(self, rank: int, action: Action) -> bool:
        groups = self.ranks.meetings(rank, action)
        for group in groups:
            calls = self.collectives.setdefault(group, {member: [] for member in group})[rank]
            if action not in calls:
                calls.append(action)
        for group in groups:
            place = self.collectives[group][rank].index(action)
            for calls in self.collectives[group].values():
                if len(calls) <= place:
                    return False
                if calls[place] != action:
                    raise LookupError
        return True


def mutated(actions: Actions, rng: random.Random) -> Actions:
    """One random change."""
    found = list(actions)
    i, j = rng.randrange(len(found)), rng.randrange(len(found))
    match rng.choice(["drop", "double", "swap", "next", "move", "micro-batch", "kind", "stage"]):
        case "drop":
            del found[i]
        case "double":
            found.insert(j, found[i])
        case "swap":
            found[i], found[j] = found[j], found[i]
        case "next":
            found[i - 1], found[i] = found[i], found[i - 1]
        case "move":
            found.insert(j, found.pop(i))
        case "micro-batch" if found[i].kind is not Kind.REDUCE:
            found[i] = Action(found[i].stage, found[i].kind, rng.randrange(4))
        case "kind" if found[i].kind is not Kind.REDUCE:
            found[i] = Action(found[i].stage, rng.choice([k for k in Kind if k is not Kind.REDUCE]), found[i].micro_batch)
        case _:
            found[i] = Action(rng.randrange(4), found[i].kind, found[i].micro_batch)
    return tuple(found)


def test_the_check_agrees_with_a_naive_execution_on_random_mutations() -> None:
    """Every one of 500 mutations that goes wrong when it is run is refused, and what is refused does go wrong."""
    rng = random.Random(5)
    refused = sound = 0
    while refused < 500:
        name = rng.choice([n for n in SCHEDULES if n != "pipedream-2bw"])
        mesh = rng.choice([Mesh(pp=2), Mesh(pp=3), Mesh(pp=2, tp=2), Mesh(pp=2, dp=2)])
        schedule = build(name, mesh.pp, 4, SCHEDULES[name].chunks)
        where = stage_ranks(schedule)
        world = [schedule[mesh.coordinates(rank)["pp"]] for rank in range(mesh.world_size)]
        victim = rng.randrange(len(world))
        for _ in range(rng.choice([1, 1, 1, 2])):
            world[victim] = mutated(world[victim], rng)
        ranks = Ranks(mesh, tuple(world), where, facts(len(where), "tp"))
        goes_well = Naive(ranks).run(4)
        if goes_well:
            check_ranks(ranks)
            sound += 1
            continue
        with pytest.raises(UnsoundError, match=re.compile(r"^schedule cannot run: .*\nrank 0: ", re.DOTALL)):
            check_ranks(ranks)
        refused += 1
    assert sound > 20
