"""The partition solver against brute force, stage choice, and schedules in time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import combinations

import pytest

from meshwright.compiler.hardware import Link
from meshwright.passes.choose_stages import SegmentCost, StageChoice, choose_stages
from meshwright.passes.simulate import simulate
from meshwright.passes.solver import Chain, Cuts, Infeasible, Item, solve_partition
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
            activation_bytes=rng.randint(0, 5),
            shared_bytes={rng.choice(["tied", f"own{i}"]): 5 for _ in range(2)},
        )
        for i in range(size)
    )
    in_flight = tuple(min(micro_batches, stages - stage) for stage in range(stages))
    pinned = {0: rng.randint(1, size - stages + 1)} if stages > 1 and rng.random() < 0.2 else {}
    return Chain(items, in_flight, micro_batches, rng.choice([None, 40, 60, 90]), pinned)


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
            + kept * sum(item.activation_bytes for item in part)
            for part, kept in zip(parts, chain.in_flight, strict=True)
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
    layers = [Item(3e-3, 1e-4, 100, {f"layer{i}": 1000}) for i in range(126)]
    items = (Item(1e-4, 1e-4, 50, {"table": 5000}), *layers, Item(8e-3, 0.0, 500, {"table": 5000}))
    in_flight = tuple(16 - stage for stage in range(16))
    start = time.perf_counter()
    cuts = solve_partition(Chain(items, in_flight, 64))
    tight = solve_partition(Chain(items, in_flight, 64, limit_bytes=18000))
    assert time.perf_counter() - start < 4
    assert [j - i for i, j in zip((0, *cuts[:-1]), cuts, strict=True)] == [9, *[8] * 14, 7]
    sizes = [j - i for i, j in zip((0, *tight[:-1]), tight, strict=True)]
    assert sizes[0] < 8 < max(sizes), "early stages keep more micro-batches and so get fewer layers"
    assert solve_partition(Chain(items, in_flight, 64)) == cuts


def test_pins_that_leave_a_stage_empty_are_refused() -> None:
    items = tuple(Item(1.0, 0.0, 0) for _ in range(4))
    with pytest.raises(ValueError, match="without items"):
        solve_partition(Chain(items, (1, 1), 1, pinned={0: 4}))
    with pytest.raises(ValueError, match="cannot fill 5 stages"):
        Chain(items, (1,) * 5, 1)


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
        ([["embedding"]], r"stages: found 1 stages, expected pp=2"),
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


# schedules in time


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (4, 2), (4, 8), (8, 32)])
def test_equal_stages_have_the_known_bubble(schedule: str, stages: int, micro_batches: int) -> None:
    found = simulate(
        schedule, stages=stages, micro_batches=micro_batches, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0
    )
    assert found.step_s == pytest.approx(3 * (micro_batches + stages - 1))
    assert found.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    assert found.idle_s == pytest.approx([3 * (stages - 1)] * stages)
    kept = [micro_batches if schedule == "gpipe" else min(micro_batches, stages - s) for s in range(stages)]
    assert list(found.in_flight) == kept


def test_uneven_stages_and_transfers() -> None:
    found = simulate("1f1b", stages=2, micro_batches=2, forward_s=[1.0, 3.0], backward_input_s=[2.0, 4.0], transfer_s=0.5)
    # stage 1: F0 1.5-4.5, B0 4.5-8.5, F1 8.5-11.5, B1 11.5-15.5; stage 0: B0 9-11, B1 16-18
    assert found.step_s == pytest.approx(18)
    assert found.idle_s == pytest.approx([18 - 6, 18 - 14])
    assert found.bubble == pytest.approx((12 + 4) / 36)


def test_numbers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="found 'pipedream', expected gpipe or 1f1b"):
        simulate("pipedream", stages=2, micro_batches=2, forward_s=1.0, backward_input_s=1.0)
    with pytest.raises(InputError, match="forward_s: found 3 numbers, expected one, or 2"):
        simulate("1f1b", stages=2, micro_batches=2, forward_s=[1.0] * 3, backward_input_s=1.0)
    with pytest.raises(InputError, match="1 or more"):
        simulate("1f1b", stages=0, micro_batches=2, forward_s=1.0, backward_input_s=1.0)
