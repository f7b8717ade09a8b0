"""The partition solver against brute force, and stage choice."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from meshwright.compiler.hardware import Link
from meshwright.passes.choose_stages import SegmentCost, StageChoice, choose_stages
from meshwright.passes.solver import Chain, Cuts, Infeasible, Item, solve_partition
from meshwright.passes.stage_memory import Option, in_flight
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh

# the solver


def random_chain(rng: random.Random) -> Chain:
    """Up to 9 items on up to 4 stages; equal and unequal times, tied parameters, memory limits that may be too small."""
    size = rng.randint(1, 9)
    stages = rng.randint(1, min(4, size))
    micro_batches = rng.choice([1, 2, 4, 8])
    items = tuple(
        Item(
            seconds=rng.choice([1.0, 2.0, rng.random()]),
            cut_s=rng.choice([0.0, 0.1, rng.random()]),
            activations=Option(rng.randint(0, 5)),
            shared_bytes={rng.choice(["tied", f"own{i}"]): 5 for _ in range(2)},
        )
        for i in range(size)
    )
    kept = tuple(in_flight(min(micro_batches, stages - stage)) for stage in range(stages))
    pinned = {0: rng.randint(1, size - stages + 1)} if stages > 1 and rng.random() < 0.2 else {}
    return Chain(items, kept, micro_batches, rng.choice([None, 40, 60, 90]), pinned)


def partitions(chain: Chain, limit: int | None) -> Iterator[Cuts]:
    """Every partition that fits, without the solver's own arithmetic."""
    size = len(chain.items)
    for inner in combinations(range(1, size), chain.stages - 1):
        cuts = (*inner, size)
        if any(cuts[stage] != end for stage, end in chain.pinned.items()):
            continue
        parts = [chain.items[i:j] for i, j in zip((0, *inner), cuts, strict=True)]
        used = [
            sum({name: n for item in part for name, n in item.shared_bytes.items()}.values())
            + (at.kept + 1) * sum(item.activations.own_bytes for item in part)
            for part, (at,) in zip(parts, chain.moments, strict=True)
        ]
        if limit is None or max(used) <= limit:
            yield cuts


def step_s(chain: Chain, cuts: Cuts) -> float:
    """The objective as the solver's docstring writes it."""
    times = [sum(item.seconds for item in chain.items[i:j]) for i, j in zip((0, *cuts[:-1]), cuts, strict=True)]
    return max(1, chain.micro_batches - 1) * max(times) + sum(times) + sum(chain.items[j - 1].cut_s for j in cuts[:-1])


def test_the_solver_equals_brute_force_on_200_chains() -> None:
    rng = random.Random(7)
    too_small = 0
    for _ in range(200):
        chain = random_chain(rng)
        best = min((step_s(chain, cuts) for cuts in partitions(chain, chain.limit_bytes)), default=None)
        try:
            cuts = solve_partition(chain)
        except Infeasible as error:
            too_small += 1
            assert best is None
            assert error.cuts in set(partitions(chain, error.least_bytes))
            assert not list(partitions(chain, error.least_bytes - 1))
            continue
        assert best is not None and cuts in set(partitions(chain, chain.limit_bytes))
        assert step_s(chain, cuts) == pytest.approx(best, rel=1e-6)
    assert 5 < too_small < 100


def test_a_large_chain_takes_no_time_and_comes_out_even() -> None:
    layers = [Item(3e-3, 1e-4, Option(100), {f"layer{i}": 1000}) for i in range(126)]
    items = (Item(1e-4, 1e-4, Option(50), {"table": 5000}), *layers, Item(8e-3, 0.0, Option(500), {"table": 5000}))
    kept = tuple(in_flight(16 - stage) for stage in range(16))
    start = time.perf_counter()
    cuts = solve_partition(Chain(items, kept, 64))
    tight = solve_partition(Chain(items, kept, 64, limit_bytes=18000))
    assert time.perf_counter() - start < 4
    assert [j - i for i, j in zip((0, *cuts[:-1]), cuts, strict=True)] == [9, *[8] * 14, 7]
    sizes = [j - i for i, j in zip((0, *tight[:-1]), tight, strict=True)]
    assert sizes[0] < 8 < max(sizes), "early stages keep more micro-batches and so get fewer layers"
    assert solve_partition(Chain(items, kept, 64)) == cuts


def test_pins_that_leave_a_stage_empty_are_refused() -> None:
    items = tuple(Item(1.0, 0.0, Option(0)) for _ in range(4))
    with pytest.raises(ValueError, match="without items"):
        solve_partition(Chain(items, (in_flight(1),) * 2, 1, pinned={0: 4}))
    with pytest.raises(ValueError, match="cannot fill 5 stages"):
        Chain(items, (in_flight(1),) * 5, 1)


# the choice


def model(layers: int = 6) -> tuple[SegmentCost, ...]:
    """An embedding, equal layers and a head that is tied to the embedding and takes as long as two layers."""
    table = {"embed.weight": 1000}
    middle = (SegmentCost(f"layers.{i}", 1.0, 2.0, {f"layers.{i}.weight": 100}, 10, 8) for i in range(layers))
    return (
        SegmentCost("embedding", 0.0, 0.0, table, 8, 8),
        *middle,
        SegmentCost("head", 2.0, 4.0, {**table, "norm": 4}, 30, 0),
    )


def choose(stages: int, micro_batches: int = 4, schedule: str = "1f1b", **options: object) -> StageChoice:
    return choose_stages(model(), Mesh(pp=stages), schedule=schedule, micro_batches=micro_batches, **options)  # type: ignore[arg-type]


def test_embedding_and_head_take_part_in_the_balance() -> None:
    first, second = choose(2).stages
    assert first.segments == ("embedding", "layers.0", "layers.1", "layers.2", "layers.3")
    assert second.segments == ("layers.4", "layers.5", "head")
    assert (first.forward_s, first.backward_s, second.forward_s, second.backward_s) == (4, 8, 4, 8)


def test_memory_counts_tied_parameters_on_both_stages_and_once_on_one() -> None:
    first, second = choose(2).stages
    assert first.memory.parameters == first.memory.gradients == 1000 + 4 * 100
    assert second.memory.parameters == 1000 + 2 * 100 + 4
    assert second.memory.optimizer == 2 * second.memory.parameters
    assert first.memory.activations == 2 * (8 + 4 * 10)
    assert second.memory.activations == 2 * 10 + 30
    (whole,) = choose(1).stages
    assert whole.memory.parameters == 1000 + 600 + 4


def test_gpipe_keeps_every_micro_batch() -> None:
    choice = choose(2, micro_batches=5, schedule="gpipe")
    assert choice.in_flight == (5, 5)
    assert choice.stages[0].memory.activations == 5 * (8 + 4 * 10)


def test_step_time_and_bubble_are_those_of_the_schedule() -> None:
    choice = choose(2)
    assert choice.step_s == pytest.approx((4 + 2 - 1) * 12)
    assert choice.bubble == pytest.approx((2 - 1) / (4 + 2 - 1))
    assert choose(1).bubble == 0


def test_chunks_are_stages_and_share_the_memory_limit() -> None:
    choice = choose(2, schedule="interleaved", chunks=2)
    assert len(choice.stages) == 4
    assert choice.step_s < choose(2).step_s
    with pytest.raises(InputError, match=r"pp=3 with 3 chunks asks for as many stages, the model has 8 segments .* use pp=2"):
        choose(3, schedule="interleaved", chunks=3)
    with pytest.raises(InputError, match=r"allow \d+ bytes") as caught:
        choose(2, schedule="interleaved", chunks=2, memory_limit=1000)
    least = int(str(caught.value).split("allow ")[1].split(" bytes")[0])
    found = choose(2, schedule="interleaved", chunks=2, memory_limit=least)
    for rank in range(2):
        assert sum(found.stages[stage].memory.total for stage in (rank, rank + 2)) <= least


def test_two_weight_versions_take_memory() -> None:
    stale, flushed = (choose(2, schedule=name).stages[1].memory for name in ("pipedream-2bw", "1f1b"))
    assert (stale.parameters, stale.gradients, stale.optimizer) == (2 * flushed.parameters, 2 * flushed.gradients, flushed.optimizer)
    assert choose(2, schedule="pipedream-2bw").bubble == pytest.approx(0)


def test_transfers_are_charged_with_a_link() -> None:
    link = Link(latency_s=0.5, bandwidth_bytes_per_s=16.0)
    assert choose(2, link=link).step_s > choose(2).step_s


def test_pinned_stages_are_kept() -> None:
    names = [s.name for s in model()]
    choice = choose(2, pinned=[names[:2], names[2:]])
    assert [s.segments for s in choice.stages] == [tuple(names[:2]), tuple(names[2:])]
    assert choice.step_s > choose(2).step_s


@pytest.mark.parametrize(
    ("pinned", "message"),
    [
        ([["embedding"]], r"stages: found 1 stages, expected pp \* chunks = 2"),
        ([["embedding"], []], r"stages\[1\].layers: found no segment"),
        ([["embedding", "layers.1"], ["head"]], r"stages\[0\].layers: found layers.1, expected layers.0; .*consecutive"),
        ([["embedding", "layers.9"], ["head"]], r"stages\[0\].layers: found layers.9, .* no segment layers.9"),
        ([["embedding"], [f"layers.{i}" for i in range(6)]], r"stages\[1\].layers: head is in no stage"),
    ],
)
def test_pins_that_are_no_partition_are_named(pinned: list[list[str]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose(2, pinned=pinned)


def test_what_does_not_fit_says_what_would() -> None:
    fits = 4 * 1100 + 2 * 8 + 2 * 10
    with pytest.raises(InputError) as caught:
        choose(2, memory_limit=1000)
    message = str(caught.value)
    assert "of the best 2 stages" in message and "the limit is 1000 B" in message and "\n" not in message
    least = int(message.split("allow ")[1].split(" bytes")[0])
    assert least >= fits
    choose(2, memory_limit=least)
    with pytest.raises(InputError, match=f"allow {least} bytes"):
        choose(2, memory_limit=least - 1)
    names = [s.name for s in model()]
    with pytest.raises(InputError, match=r"stages\[0\] as given .* leave stages out"):
        choose(2, memory_limit=least, pinned=[names[:7], names[7:]])


def test_more_stages_than_segments_is_an_input_error() -> None:
    with pytest.raises(InputError, match="pp=9 asks for as many stages, the model has 8 segments"):
        choose(9)


def test_ranks_that_wait_lend_their_share_of_a_core() -> None:
    """Two stages on two cores, or on one: twice as slow by themselves, and the second waits while the first works."""
    segments = [SegmentCost(f"s{i}", 1.0, 2.0, {}, 0, 0) for i in range(2)]
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1e12)
    alone = choose_stages(segments, Mesh(pp=2), schedule="1f1b", micro_batches=4, link=link)
    slowed = [replace(s, forward_s=2.0, backward_s=4.0) for s in segments]
    shared = choose_stages(slowed, Mesh(pp=2), schedule="1f1b", micro_batches=4, link=replace(link, ranks_per_core=2.0))
    assert alone.step_s == pytest.approx(15.0) and shared.bubble == pytest.approx(0.2)
    assert shared.step_s == pytest.approx(24.0), "the work of both ranks, one after the other"
