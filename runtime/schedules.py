"""Pipeline schedules: lists of actions per pipeline rank, as data.

    generate   gpipe, one_f_one_b: (stages, micro-batches) -> the order of forwards and backwards (F, B) on each rank
    lower      insert_transfers: adds sends, receives and gradient reductions
    check      simulate: dry-runs all ranks; a ValueError prints the schedule and where each rank stands
    analyse    finished_sends: which earlier sends a completed receive proves to be done

Sends and receives are asynchronous: a SEND starts when its tensor exists, a RECV posts a buffer, and the compute action
that needs the tensor waits for it. Stage s is on rank s. SCHEDULES names the generators as plans do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from meshwright.runtime.actions import Action, Actions, Kind, Schedule, show

F, B = Kind.F, Kind.B
_MATCH = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}
"""By kind of receive: the kind of its send, and where the sending stage is."""


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965, section 2.3)."""
    order = [(kind, i) for kind in (F, B) for i in range(micro_batches)]
    return tuple(tuple(Action(stage, kind, i) for kind, i in order) for stage in range(stages))


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward in turn, after a warm-up of one forward per later stage (PipeDream-Flush:
    Narayanan et al., arXiv 2006.09503, section 2.2; as in arXiv 2104.04473, figure 4 top)."""
    return tuple(tuple(_one_f_one_b_rank(stage, stages, micro_batches)) for stage in range(stages))


def _one_f_one_b_rank(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    warmup = min(micro_batches, stages - stage - 1)
    yield from (Action(stage, F, i) for i in range(warmup))
    for i in range(micro_batches):
        if warmup + i < micro_batches:
            yield Action(stage, F, warmup + i)
        yield Action(stage, B, i)


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def build(name: str, stages: int, micro_batches: int) -> Schedule:
    """The complete, checked schedule of a plan; ValueError for a name that does not exist."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; the schedules are {', '.join(SCHEDULES)}")
    schedule = insert_transfers(SCHEDULES[name](stages, micro_batches), stages)
    simulate(schedule)
    return schedule


def insert_transfers(compute: Schedule, stages: int) -> Schedule:
    """Sends right after the compute that makes the tensor; receives posted one compute action ahead; REDUCE last."""
    return tuple(tuple(_with_transfers(actions, stages)) for actions in compute)


def _with_transfers(actions: Actions, stages: int) -> Iterator[Action]:
    if actions:
        yield from _receives(actions[0], stages)
    for i, action in enumerate(actions):
        if i + 1 < len(actions):
            yield from _receives(actions[i + 1], stages)
        yield action
        if action.kind is F and action.stage + 1 < stages:
            yield Action(action.stage, Kind.SEND_F, action.micro_batch)
        if action.kind is B and action.stage > 0:
            yield Action(action.stage, Kind.SEND_B, action.micro_batch)
    yield from (Action(stage, Kind.REDUCE) for stage in sorted({a.stage for a in actions}))


def _receives(action: Action, stages: int) -> Iterator[Action]:
    if action.kind is F and action.stage > 0:
        yield Action(action.stage, Kind.RECV_F, action.micro_batch)
    if action.kind is B and action.stage + 1 < stages:
        yield Action(action.stage, Kind.RECV_B, action.micro_batch)


def sender(receive: Action) -> Action:
    """The send that a receive matches."""
    kind, offset = _MATCH[receive.kind]
    return Action(receive.stage + offset, kind, receive.micro_batch)


def needed_receive(action: Action, stages: int) -> Action | None:
    """The receive that a compute action waits for."""
    return next(_receives(action, stages), None)


def simulate(schedule: Schedule) -> None:
    """Runs all ranks at once with asynchronous sends.

    Raises ValueError when a rank waits for ever, an action comes twice or before what it needs, a send has no receive
    or the other way round, or messages between two ranks arrive in another order than they are expected.
    """
    stages = 1 + max((a.stage for actions in schedule for a in actions), default=0)
    done: set[Action] = set()
    at = [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions) and _is_ready(actions[at[rank]], done, stages):
                if actions[at[rank]] in done:
                    raise ValueError(_standing(schedule, at, f"{actions[at[rank]]} comes twice"))
                done.add(actions[at[rank]])
                at[rank] += 1
                moved = True
    if any(i < len(actions) for i, actions in zip(at, schedule, strict=True)):
        raise ValueError(_standing(schedule, at, "every rank has ended or waits for ever"))
    _check_messages(schedule, done)


def _is_ready(action: Action, done: set[Action], stages: int) -> bool:
    """Whether a rank can get past an action."""
    stage, i = action.stage, action.micro_batch
    match action.kind:
        case Kind.F | Kind.B:
            receive = needed_receive(action, stages)
            arrived = receive is None or (receive in done and sender(receive) in done)
            return arrived and (action.kind is F or Action(stage, F, i) in done)
        case Kind.SEND_F:
            return Action(stage, F, i) in done
        case Kind.SEND_B:
            return Action(stage, B, i) in done
        case Kind.RECV_F | Kind.RECV_B:
            return True
        case Kind.REDUCE:
            return all(Action(stage, B, a.micro_batch) in done for a in done if a.stage == stage and a.kind is F)


def _check_messages(schedule: Schedule, done: set[Action]) -> None:
    sends: dict[tuple[int, Kind], list[Action]] = {}
    receives: dict[tuple[int, Kind], list[Action]] = {}
    for action in (a for actions in schedule for a in actions):
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            sends.setdefault((action.stage, action.kind), []).append(action)
        elif action.kind in _MATCH:
            send = sender(action)
            receives.setdefault((send.stage, send.kind), []).append(send)
    for channel in sends.keys() | receives.keys():
        sent, expected = sends.get(channel, []), receives.get(channel, [])
        if odd := set(sent) ^ set(expected):
            problem = "is never received" if odd & done else "is awaited and never made"
            raise ValueError(f"send {min(map(str, odd))} {problem}:\n{show(schedule)}")
        if sent != expected:
            raise ValueError(f"{' '.join(map(str, sent))} are received in another order:\n{show(schedule)}")


def _standing(schedule: Schedule, at: list[int], problem: str) -> str:
    """The schedule with an arrow at the action that each rank stands before."""
    lines = []
    for rank, (i, actions) in enumerate(zip(at, schedule, strict=True)):
        words = [f"-> {a}" if j == i else str(a) for j, a in enumerate(actions)]
        lines.append(f"rank {rank}: {' '.join(words)}")
    return "\n".join([f"schedule cannot run: {problem}", *lines])


def finished_sends(schedule: Schedule, rank: int) -> dict[Action, Actions]:
    """For each receive of a rank, its sends that are certain to be done once that receive is, each named once.

    The peer has waited for a tensor before it ran the compute that needs it, and has run that compute before what it
    sends later. So memory of a sent tensor can be freed without asking whether the send is over.
    """
    stages = 1 + max(a.stage for actions in schedule for a in actions)
    place = {a: (r, i) for r, actions in enumerate(schedule) for i, a in enumerate(actions)}
    found: dict[Action, Actions] = {}
    seen: set[Action] = set()
    for receive in (a for a in _in_wait_order(schedule[rank], stages)):
        peer, end = place[sender(receive)]
        awaited = (needed_receive(a, stages) for a in schedule[peer][:end] if a.kind in (F, B))
        over = [s for r in awaited if r is not None and place[s := sender(r)][0] == rank and s not in seen]
        seen.update(over)
        found[receive] = tuple(over)
    return found


def _in_wait_order(actions: Actions, stages: int) -> Iterator[Action]:
    """Receives in the order in which the rank waits for them."""
    for action in actions:
        if action.kind in (F, B) and (receive := needed_receive(action, stages)) is not None:
            yield receive
