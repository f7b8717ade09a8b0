"""ZeRO 0 to 3 on the toy models against one process: parity, what a rank holds, checkpoints between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.runtime import buckets
from meshwright.runtime.axes import Axis, Pending
from meshwright.runtime.engine import Engine
from meshwright.runtime.metrics import NonFiniteError
from meshwright.tests import test_engine, test_engine_experts, toy, toy_experts
from meshwright.tests.ranks import run_ranks

ADAMW, SGD = test_engine.ADAMW, test_engine.SGD


@pytest.fixture(autouse=True)
def leave_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


Case = tuple[Mesh, int, str, dict[str, object]]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, [(Mesh(dp=2), 1, "none", SGD), (Mesh(dp=2), 2, "full", ADAMW), (Mesh(dp=2), 3, "none", ADAMW)]),
        (
            4,
            [
                (Mesh(dp=4), 1, "none", ADAMW),
                (Mesh(dp=4), 3, "full", SGD),
                (Mesh(dp=2, tp=2), 2, "none", ADAMW),
                (Mesh(dp=2, tp=2), 3, "full", ADAMW),
                (Mesh(pp=2, dp=2), 1, "none", ADAMW),
                (Mesh(pp=2, dp=2), 3, "none", ADAMW),
            ],
        ),
    ],
)
def test_parity(tmp_path: Path, ranks: int, cases: list[Case]) -> None:
    plans = {
        str(toy.write_plan(tmp_path / f"{mesh}-{zero}", mesh, "1f1b", recompute, zero)): optimizer
        for mesh, zero, recompute, optimizer in cases
    }
    results = run_ranks(ranks, test_engine.run_all, plans)
    for plan, optimizer in plans.items():
        test_engine.check_against_reference([result[plan] for result in results], optimizer)


def test_parity_of_experts(tmp_path: Path) -> None:
    cases = [(Mesh(dp=4, ep=2), 1), (Mesh(dp=4, ep=2), 3), (Mesh(dp=2, tp=2, ep=2), 2)]
    plans = [str(toy_experts.write_plan(tmp_path / f"{m}-{z}", m, "1f1b", "full", z)) for m, z in cases]
    results = run_ranks(4, test_engine_experts.run_all, plans)
    for plan in plans:
        test_engine_experts.check_against_reference([result[plan] for result in results])


def memory(plans: list[str], rows: int) -> list[dict[str, dict[str, int]]]:
    found = []
    for plan in plans:
        engine = Engine(plan, ADAMW)
        for step in range(2):
            engine.train_step(toy.batch(rows, step))
        found.append(engine.memory())
    return found


def test_a_rank_holds_what_zero_promises(tmp_path: Path) -> None:
    """The embedding has 256 elements, the final norm 16 (8 and padding), each of four layers 16 + 192 + 32 + 192; `scale`, 8, is
    frozen. Buckets are padded to 32 (two shards of 16)."""
    plans = [str(toy.write_plan(tmp_path / str(zero), Mesh(dp=2), zero=zero)) for zero in range(4)]
    embedding, layer, frozen = 4 * 256, 4 * 448, 4 * 8
    whole = {0: 4 * 2016, 1: 4 * 2016, 2: 4 * 2016, 3: embedding + 4 * 32 + 4 * layer}
    for zero, found in enumerate(run_ranks(2, memory, plans, 2)[0]):
        now, peak, size = found["now"], found["peak"], whole[zero]
        assert now["parameters"] == frozen + (size // 2 if zero == 3 else size), zero
        assert now["gradients"] == (size // 2 if zero >= 2 else size), zero
        assert now["optimizer"] == 2 * (size // 2 if zero else size), zero
        if zero < 2:
            assert peak == {**now, "activations": peak["activations"], "transient": peak["transient"]}
        if zero == 3:  # the embedding is tied; a layer and the next one
            assert peak["parameters"] - now["parameters"] == embedding + 2 * layer
            assert peak["gradients"] - now["gradients"] == embedding + 2 * layer


GROUPS = [{"match": ["*.bias", "*norm*"], "weight_decay": 0.0}, {"match": "embed.*", "lr_scale": 0.25}]


def train_in_groups(plans: list[str]) -> list[object]:
    """Weights after three steps of each plan; then what a step after a ruinous learning rate says."""
    found: list[object] = []
    for plan in plans:
        engine = Engine(plan, {**ADAMW, "groups": GROUPS})
        for step in range(3):
            engine.train_step(toy.batch(8, step))
        found.append(engine.state_dict())
    engine.learning_rate = 1e38
    engine.train_step(toy.batch(8, 3))
    with pytest.raises(NonFiniteError) as error:
        engine.train_step(toy.batch(8, 4))
    return [*found, str(error.value), engine.step]


def test_groups_and_non_finite_gradients(tmp_path: Path) -> None:
    plans = [str(toy.write_plan(tmp_path / str(zero), Mesh(pp=2, dp=2), zero=zero)) for zero in (0, 1, 3)]
    results = run_ranks(4, train_in_groups, plans)
    reference = toy.Reference(ADAMW)
    free = [w for n, w in reference.trained.items() if n.endswith(".bias") or "norm" in n]
    rest = [w for n, w in reference.trained.items() if n != "embed.weight" and not (n.endswith(".bias") or "norm" in n)]
    groups = [{"params": rest}, {"params": free, "weight_decay": 0.0}, {"params": [reference.trained["embed.weight"]], "lr": 2.5e-3}]
    reference.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        reference.train_step(toy.batch(8, step))
    *weights, message, step = results[0]
    for found in weights:
        assert isinstance(found, dict)
        assert max(test_engine.relative(found[name], w.detach()) for name, w in reference.trained.items()) < 1e-5
    assert step == 4 and all(other[-2:] == [message, step] for other in results)
    assert str(message).startswith("step 4: loss nan, gradient norm nan; rank 0 has one in the gradient of "), message
    with pytest.raises(InputError, match=r"optimizer.groups\[0\].match: 'nothing.\*' matches no parameter"):
        Engine(toy.write_plan(tmp_path / "plan", Mesh()), {**ADAMW, "groups": [{"match": "nothing.*"}]})


class Log:
    """What a rank sends over dp, and when gradients are complete, in order: (what, bytes)."""

    def __init__(self, engine: Engine) -> None:
        self.events: list[tuple[str, int]] = []
        axis = engine._parameters.buckets[0].axis
        self._watch(axis, "start_all_reduce", lambda x: 2 * x.nbytes)
        self._watch(axis, "start_reduce_scatter", lambda x: x.nbytes)
        self._watch(axis, "start_gather_into", lambda out: out.nbytes)
        for bucket in engine._parameters.buckets:
            for leaf in bucket.leaves.values():
                leaf.register_hook(lambda _: self.events.append(("gradient", 0)))

    def _watch(self, axis: Axis, name: str, moved: Callable[[torch.Tensor], int]) -> None:
        start = getattr(axis, name)

        def logged(x: torch.Tensor, *args: object, **options: object) -> Pending:
            self.events.append((name, moved(x) * (axis.size - 1) // axis.size))
            return start(x, *args, **options)  # type: ignore[no-any-return]

        setattr(axis, name, logged)


def logs(plans: list[str]) -> list[tuple[list[tuple[str, int]], int]]:
    """Events of one step of two micro-batches, after a first step; and the bytes of all buckets."""
    buckets.BUCKET_BYTES = 1500
    found = []
    for plan in plans:
        engine = Engine(plan, ADAMW)
        engine.train_step(toy.batch(8, 0))
        engine._parameters.residency.settle()
        log = Log(engine)
        engine.train_step(toy.batch(8, 1))
        engine._parameters.residency.settle()
        found.append((log.events, sum(4 * b.spec.size for b in engine._parameters.buckets)))
    return found


def test_bytes_sent_are_the_formulas_and_sums_overlap_the_last_backward(tmp_path: Path) -> None:
    plans = [str(toy.write_plan(tmp_path / str(zero), Mesh(dp=4), zero=zero)) for zero in range(4)]
    for zero, (events, size) in enumerate(run_ranks(4, logs, plans)[1]):
        sums = [i for i, (what, _) in enumerate(events) if what in ("start_all_reduce", "start_reduce_scatter")]
        ends = [i for i, (what, _) in enumerate(events) if what == "gradient"]
        moved = sum(num_bytes for _, num_bytes in events)
        assert len(sums) >= 4 * (2 if zero == 3 else 1)
        if zero < 3:
            assert moved == 2 * size * 3 // 4, "2 Psi (N-1)/N"
            half = ends[len(ends) // 2]
            assert half < sums[0] < ends[-1], "no sum in the first micro-batch; in the second they begin before it ends"
        else:  # two micro-batches; what is used outside of segments (embedding, final norm) is gathered once in each direction too
            assert moved == 2 * 3 * size * 3 // 4, "3 Psi (N-1)/N for each micro-batch"
