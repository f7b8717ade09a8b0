"""Schedules as data: text, order, transfers, and which sends are over."""

from __future__ import annotations

import pytest

from meshwright.plans.errors import InputError
from meshwright.runtime.actions import Action, Kind, Schedule, parse, show, stage_ranks
from meshwright.runtime.orders import SCHEDULES, one_f_one_b
from meshwright.runtime.schedules import build, finished_sends, insert_transfers, named_order, plan_order
from meshwright.runtime.soundness import check_schedule
from meshwright.tests.sample_plan import sample_document

SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (4, 8), (5, 3), (4, 5), (5, 12)]
CHUNKS = [(name, named.chunks) for name, named in SCHEDULES.items()] + [("interleaved", 3)]


def text_of(name: str, ranks: int, micro_batches: int) -> list[str]:
    order = named_order(name, ranks, SCHEDULES[name].chunks, micro_batches)
    return [" ".join(map(str, actions)) for actions in order]


def test_actions_print_and_parse() -> None:
    for action in (Action(2, Kind.F, 0), Action(3, Kind.W, 1), Action(11, Kind.SEND_B, 30), Action(0, Kind.REDUCE)):
        assert Action.parse(str(action)) == action
    assert str(Action(2, Kind.F, 0)) == "2F0"
    for text in ("F0", "2F", "2X0", "1NORM", "-1F0"):
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


def test_orders_with_weight_gradients_and_chunks() -> None:
    assert text_of("zb-h1", 2, 3) == ["0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2", "1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2"]
    assert text_of("interleaved", 2, 2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert text_of("zb-v", 2, 3) == [
        "0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2",
        "1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2",
    ]


@pytest.mark.parametrize(("name", "chunks"), CHUNKS)
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_every_schedule_is_complete_and_runs(name: str, chunks: int, ranks: int, micro_batches: int) -> None:
    schedule = build(name, ranks, micro_batches, chunks)
    check_schedule(schedule)
    assert stage_ranks(schedule) == SCHEDULES[name].stage_ranks(ranks, chunks)
    kinds = "FBW" if name.startswith("zb") else "FB"
    for actions in schedule:
        stages = {a.stage for a in actions}
        compute = [a for a in actions if a.kind.value in "FBW"]
        assert sorted(map(str, compute)) == sorted(f"{s}{k}{i}" for s in stages for k in kinds for i in range(micro_batches))
        assert set(actions[-len(stages) :]) == {Action(stage, Kind.REDUCE) for stage in stages}


def test_nothing_is_sent_between_stages_of_one_rank() -> None:
    sent = {a.stage for actions in build("zb-v", 4, 8, 2) for a in actions if a.kind is Kind.SEND_F}
    assert sent == {0, 1, 2, 4, 5, 6}
    assert not [a for actions in build("interleaved", 1, 2, 3) for a in actions if "SEND" in a.kind.value]


def test_1f1b_holds_few_micro_batches() -> None:
    for stage, actions in enumerate(one_f_one_b(4, 1, 8)):
        held = peak = 0
        for action in actions:
            held += 1 if action.kind is Kind.F else -1
            peak = max(peak, held)
        assert peak == 4 - stage


def test_finished_sends_are_received_before() -> None:
    """What a rank frees early, it names once and only when the peer has passed the compute that needed it."""
    for name, chunks in CHUNKS:
        schedule = build(name, 4, 6, chunks)
        for rank, actions in enumerate(schedule):
            freed = [send for sends in finished_sends(schedule, rank).values() for send in sends]
            assert len(freed) == len(set(freed))
            assert set(freed) <= {a for a in actions if a.kind in (Kind.SEND_F, Kind.SEND_B)}
            if rank < 3 and chunks == 1:
                assert {f"{rank}SEND_F{i}" for i in range(6)} <= set(map(str, freed))
    middle = finished_sends(build("1f1b", 3, 4), 1)
    assert list(map(str, middle[Action.parse("1RECV_B1")])) == ["1SEND_F1"]
    assert list(map(str, middle[Action.parse("1RECV_F3")])) == ["1SEND_B0"]


def test_a_stage_runs_on_one_rank() -> None:
    with pytest.raises(ValueError, match="stage 0 is on ranks 0 and 1"):
        stage_ranks(parse("rank 0: 0F0\nrank 1: 0B0"))
    with pytest.raises(ValueError, match="stage 1 is on no rank"):
        stage_ranks(parse("rank 0: 0F0 2F0"))


def test_what_does_not_exist() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'zigzag'; the schedules are gpipe, 1f1b"):
        build("zigzag", 2, 2)
    with pytest.raises(ValueError, match="zb-v has 2 chunks per rank, not 1"):
        build("zb-v", 2, 2)
    one: Schedule = one_f_one_b(1, 1, 2)
    assert insert_transfers(one) == parse("rank 0: 0F0 0B0 0F1 0B1 0REDUCE")


def test_actions_that_the_plan_contradicts_are_refused() -> None:
    order = [" ".join(map(str, actions)) for actions in one_f_one_b(2, 1, 4)]
    document = sample_document()
    assert document.mesh.pp == 2 and document.num_micro_batches != 5
    fewer = document.model_copy(update={"schedule": "synthesised", "actions": tuple(order), "global_batch": 5})
    with pytest.raises(InputError, match=r"actions: are for 4 micro-batches, the plan has \d+; leave actions out"):
        plan_order(fewer, 4)
    with pytest.raises(InputError, match="actions: are those of a synthesised schedule, found 1f1b"):
        plan_order(document.model_copy(update={"schedule": "1f1b", "actions": tuple(order)}), 4)
