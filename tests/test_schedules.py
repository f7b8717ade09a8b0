"""Schedules as data: text, order, transfers, and the simulation that refuses what cannot run."""

from __future__ import annotations

import pytest

from meshwright.runtime.actions import Action, Kind, parse, show
from meshwright.runtime.schedules import SCHEDULES, build, finished_sends, insert_transfers, one_f_one_b, simulate

SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (4, 8), (5, 3)]


def text_of(name: str, stages: int, micro_batches: int) -> list[str]:
    return [" ".join(map(str, actions)) for actions in SCHEDULES[name](stages, micro_batches)]


def test_actions_print_and_parse() -> None:
    for action in (Action(2, Kind.F, 0), Action(11, Kind.SEND_B, 30), Action(0, Kind.REDUCE)):
        assert Action.parse(str(action)) == action
    assert str(Action(2, Kind.F, 0)) == "2F0"
    for text in ("F0", "2F", "2X0", "1REDUCE0", "-1F0"):
        with pytest.raises(ValueError, match="is not STAGE KIND MICRO_BATCH"):
            Action.parse(text)
    with pytest.raises(ValueError, match="no such action"):
        Action(0, Kind.F)
    schedule = build("1f1b", 3, 4)
    assert parse(show(schedule)) == schedule


def test_orders() -> None:
    assert text_of("gpipe", 2, 2) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert text_of("1f1b", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert show(build("1f1b", 2, 2)) == (
        "rank 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE\n"
        "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE"
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_schedule_is_complete_and_runs(name: str, stages: int, micro_batches: int) -> None:
    schedule = build(name, stages, micro_batches)
    for stage, actions in enumerate(schedule):
        compute = [a for a in actions if a.kind in (Kind.F, Kind.B)]
        assert sorted(map(str, compute)) == sorted(f"{stage}{k}{i}" for k in "FB" for i in range(micro_batches))
        assert actions[-1] == Action(stage, Kind.REDUCE)


def test_1f1b_holds_few_micro_batches() -> None:
    for stage, actions in enumerate(one_f_one_b(4, 8)):
        held = peak = 0
        for action in actions:
            held += 1 if action.kind is Kind.F else -1
            peak = max(peak, held)
        assert peak == 4 - stage


def test_finished_sends_are_received_before() -> None:
    """What a rank frees early, it names once and only when the peer has passed the compute that needed it."""
    for name in SCHEDULES:
        schedule = build(name, 4, 6)
        for rank, actions in enumerate(schedule):
            freed = [send for sends in finished_sends(schedule, rank).values() for send in sends]
            assert len(freed) == len(set(freed))
            assert set(freed) <= {a for a in actions if a.kind in (Kind.SEND_F, Kind.SEND_B)}
            if rank < 3:
                assert {f"{rank}SEND_F{i}" for i in range(6)} <= set(map(str, freed))
    middle = finished_sends(build("1f1b", 3, 4), 1)
    assert list(map(str, middle[Action.parse("1RECV_B1")])) == ["1SEND_F1"]
    assert list(map(str, middle[Action.parse("1RECV_F3")])) == ["1SEND_B0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0 0SEND_F0 0RECV_B0 0B0\nrank 1: 1F0 1B0 1SEND_B0", r"waits for ever\nrank 0: .*-> 0B0\nrank 1: -> 1F0"),
        ("rank 0: 0F0 0SEND_F0 0B0 0RECV_B0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0", "rank 0: 0F0 0SEND_F0 -> 0B0"),
        ("rank 0: 0F0 0F0 0B0", "0F0 comes twice"),
        ("rank 0: 0B0 0F0", "-> 0B0"),
        (
            "rank 0: 0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0RECV_B1 0B0 0B1\n"
            "rank 1: 1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
            "0SEND_F1 0SEND_F0 are received in another order",
        ),
        ("rank 0: 0F0 0SEND_F0 0SEND_F1 0RECV_B0 0B0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0", "-> 0SEND_F1"),
        (
            "rank 0: 0F0 0SEND_F0 0RECV_B0 0B0\nrank 1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0",
            "send 0SEND_F1 is awaited and never made",
        ),
    ],
)
def test_schedules_that_cannot_run(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(parse(text))


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'zigzag'; the schedules are gpipe, 1f1b"):
        build("zigzag", 2, 2)
    assert insert_transfers(one_f_one_b(1, 2), 1) == parse("rank 0: 0F0 0B0 0F1 0B1 0REDUCE")
