"""Pipeline schedules: lists of actions per pipeline rank, as data.

    order      runtime.orders: the forwards, backwards and weight gradients (F, B, W) of each rank, in order
    lower      insert_transfers: adds sends, receives and gradient reductions
    check      runtime.soundness: dry-runs all ranks; an error prints the schedule and where each rank stands
    analyse    finished_sends: which earlier sends a completed receive proves to be done

Sends and receives are asynchronous: a SEND starts when its tensor exists, a RECV posts a buffer, and the compute action
that needs the tensor waits for it. Between two stages of one rank nothing is sent: the tensor is handed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError
from meshwright.runtime.actions import COMPUTE, Action, Actions, Kind, Schedule, StageRanks, stage_ranks
from meshwright.runtime.orders import SCHEDULES

_MATCH = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}
"""By kind of receive: the kind of its send, and where the sending stage is."""
STAND_IN = {1: "zb-h1", 2: "zb-v"}
"""By chunks: what runs in place of a synthesised order for another number of micro-batches."""


def named_order(name: str, ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """The order of compute of a schedule that has a name; ValueError for one that does not exist or cannot have the chunks."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; the schedules are {', '.join(SCHEDULES)}")
    if not SCHEDULES[name].allows(chunks):
        raise ValueError(f"{name} has {SCHEDULES[name].chunks} chunks per rank, not {chunks}")
    return SCHEDULES[name].order(ranks, chunks, micro_batches)


def build(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The complete schedule of a name."""
    return insert_transfers(named_order(name, ranks, chunks, micro_batches))


def plan_order(plan: PlanDocument, micro_batches: int) -> Schedule:
    """The order of compute of a plan: its own actions, or those of its schedule's name.

    A synthesised order is of the plan's own number of micro-batches; for another the zero-bubble schedule of as many chunks stands in.
    InputError for actions that are of another schedule or number of micro-batches, or not on the plan's ranks, and for a schedule that
    deals stages otherwise.
    """
    if plan.actions is not None:
        check_actions(plan)
    if plan.actions is not None and micro_batches == plan.num_micro_batches:
        where, order = "actions", read_actions(plan.actions)
    else:
        name = plan.schedule if plan.schedule in SCHEDULES else STAND_IN[min(plan.chunks, 2)]
        if not SCHEDULES[name].allows(plan.chunks):
            raise InputError(f"plan.yaml: chunks: found {plan.chunks}, {name} has {SCHEDULES[name].chunks}")
        where, order = "schedule", SCHEDULES[name].order(plan.mesh.pp, plan.chunks, micro_batches)
    try:
        found = stage_ranks(order)
    except ValueError as error:
        raise InputError(f"plan.yaml: {where}: {error}") from None
    if found != plan.ranks_of_stages or len(order) != plan.mesh.pp:
        raise InputError(
            f"plan.yaml: stage_ranks: found {' '.join(map(str, plan.ranks_of_stages))}, {plan.schedule} has {' '.join(map(str, found))}"
        )
    return order


def check_actions(plan: PlanDocument) -> None:
    """InputError for actions that the plan's other keys contradict."""
    if plan.schedule in SCHEDULES:
        raise InputError(f"plan.yaml: actions: are those of a synthesised schedule, found {plan.schedule}; leave actions out")
    count = 1 + max((a.micro_batch for row in read_actions(plan.actions or ()) for a in row), default=-1)
    if count != plan.num_micro_batches:
        raise InputError(f"plan.yaml: actions: are for {count} micro-batches, the plan has {plan.num_micro_batches}; leave actions out")


def plan_schedule(plan: PlanDocument, micro_batches: int) -> Schedule:
    """The complete schedule of a plan."""
    return insert_transfers(plan_order(plan, micro_batches))


def read_actions(lines: Sequence[str]) -> Schedule:
    """Order of compute from a plan's actions; InputError for what is none."""
    try:
        order = tuple(tuple(map(Action.parse, line.split())) for line in lines)
    except ValueError as error:
        raise InputError(f"plan.yaml: actions: {error}") from None
    if odd := next((a for actions in order for a in actions if a.kind not in COMPUTE), None):
        raise InputError(f"plan.yaml: actions: found {odd}, expected F, B and W; transfers are added")
    return order


def insert_transfers(order: Schedule) -> Schedule:
    """Sends right after the compute that makes the tensor; receives posted one compute action ahead; REDUCE last."""
    ranks = stage_ranks(order)
    ends = (tuple(Action(stage, Kind.REDUCE) for stage in sorted({a.stage for a in actions})) for actions in order)
    return tuple(with_transfers(actions, ranks) + end for actions, end in zip(order, ends, strict=True))


def with_transfers(actions: Actions, ranks: StageRanks) -> Actions:
    """The actions of a rank with its sends and receives."""
    return tuple(_with_transfers(actions, ranks))


def _with_transfers(actions: Actions, ranks: StageRanks) -> Iterator[Action]:
    if actions:
        yield from _receives(actions[0], ranks)
    for i, action in enumerate(actions):
        if i + 1 < len(actions):
            yield from _receives(actions[i + 1], ranks)
        yield action
        if (send := made_for(action, ranks)) is not None:
            yield send


def _receives(action: Action, ranks: StageRanks) -> Iterator[Action]:
    """The receive that a compute action waits for, if there is one."""
    source = reads_from(action, len(ranks))
    if source is not None and ranks[source.stage] != ranks[action.stage]:
        yield Action(action.stage, Kind.RECV_F if action.kind is Kind.F else Kind.RECV_B, action.micro_batch)


def reads_from(action: Action, num_stages: int) -> Action | None:
    """The compute action of another stage whose result an action takes."""
    if action.kind is Kind.F and action.stage > 0:
        return Action(action.stage - 1, Kind.F, action.micro_batch)
    if action.kind is Kind.B and action.stage + 1 < num_stages:
        return Action(action.stage + 1, Kind.B, action.micro_batch)
    return None


def read_by(action: Action, num_stages: int) -> Action | None:
    """The compute action of another stage that takes an action's result."""
    if action.kind is Kind.F and action.stage + 1 < num_stages:
        return Action(action.stage + 1, Kind.F, action.micro_batch)
    if action.kind is Kind.B and action.stage > 0:
        return Action(action.stage - 1, Kind.B, action.micro_batch)
    return None


def made_for(action: Action, ranks: StageRanks) -> Action | None:
    """The send of a compute action's result; None when nobody on another rank takes it."""
    reader = read_by(action, len(ranks))
    if reader is None or ranks[reader.stage] == ranks[action.stage]:
        return None
    return Action(action.stage, Kind.SEND_F if action.kind is Kind.F else Kind.SEND_B, action.micro_batch)


def sender(receive: Action) -> Action:
    """The send that a receive matches."""
    kind, offset = _MATCH[receive.kind]
    return Action(receive.stage + offset, kind, receive.micro_batch)


def needed_receive(action: Action, ranks: StageRanks) -> Action | None:
    """The receive that a compute action waits for."""
    return next(_receives(action, ranks), None)


def finished_sends(schedule: Schedule, rank: int) -> dict[Action, Actions]:
    """For each receive of a rank, its sends that are certain to be done once that receive is, each named once.

    The peer has waited for a tensor before it ran the compute that needs it, and has run that compute before what it
    sends later. So memory of a sent tensor can be freed without asking whether the send is over.
    """
    ranks = stage_ranks(schedule)
    place = {a: (r, i) for r, actions in enumerate(schedule) for i, a in enumerate(actions)}
    found: dict[Action, Actions] = {}
    looked = dict.fromkeys(range(len(schedule)), 0)
    for receive in (a for a in _in_wait_order(schedule[rank], ranks)):
        peer, end = place[sender(receive)]
        awaited = (needed_receive(a, ranks) for a in schedule[peer][looked[peer] : end] if a.kind in COMPUTE)
        found[receive] = tuple(s for r in awaited if r is not None and place[s := sender(r)][0] == rank)
        looked[peer] = max(looked[peer], end)
    return found


def _in_wait_order(actions: Actions, ranks: StageRanks) -> Iterator[Action]:
    """Receives in the order in which the rank waits for them."""
    for action in actions:
        if action.kind in COMPUTE and (receive := needed_receive(action, ranks)) is not None:
            yield receive
