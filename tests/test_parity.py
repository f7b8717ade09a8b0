"""Whole way, real ranks: the parallel run computes what one process computes (gates in tests/parity.py)."""

from __future__ import annotations

import os

import pytest

from meshwright.plan import compile
from meshwright.tests.parity import Trace, batches, build, compare, single
from meshwright.tests.ranks import run_ranks

CASES = [
    ("llama", {"layers": 3}, "tp=2", {}),
    ("llama", {}, "tp=4", {"sequence_parallel": "on"}),  # 2 kv heads on 4 ranks
    ("llama", {"layers": 5}, "pp=2,dp=2,tp=2", {"micro_batch": 2, "rows": 16}),
    ("llama", {"tie_word_embeddings": True}, "pp=4", {"schedule": "gpipe", "recompute": "full"}),
    ("llama", {"layers": 2}, "dp=2", {"micro_batch": 2}),
    ("nine-heads", {"layers": 5}, "pp=2,tp=2", {}),
    ("nine-heads", {"layers": 2}, "tp=3", {"sequence_parallel": "off"}),
    ("gpt2", {"layers": 3}, "pp=2,tp=2", {"micro_batch": 2}),  # packed q/k/v, tied, a vocabulary of 257
    ("bert", {"layers": 3}, "dp=2,tp=2", {"micro_batch": 2}),
    ("t5", {"layers": 2}, "pp=2,tp=2", {"micro_batch": 2}),
    ("t5", {"layers": 3}, "pp=4", {"micro_batch": 2}),
    ("llama", {"layers": 5}, "pp=2", {"schedule": "zb-h1", "rows": 3}),
    ("llama", {"layers": 8, "tie_word_embeddings": True}, "pp=4", {"schedule": "interleaved", "rows": 7}),
    ("llama", {"layers": 5}, "pp=2", {"schedule": "synthesised", "rows": 8, "recompute": "full"}),
    ("gpt2", {"layers": 5}, "pp=2,tp=2", {"schedule": "zb-v", "rows": 3}),
    ("t5", {"layers": 3}, "pp=4", {"schedule": "zb-v", "rows": 4}),
    ("mixtral", {"layers": 5}, "pp=2,dp=2", {"schedule": "zb-h2", "rows": 8}),
    ("mixtral", {"layers": 2}, "pp=2,tp=2", {"micro_batch": 4}),
    ("mixtral", {"layers": 2, "output_router_logits": True}, "dp=2,ep=2,tp=2", {"micro_batch": 4}),  # router loss over both dp ranks
    ("mixtral", {"layers": 2}, "pp=2,dp=2,ep=2", {"micro_batch": 2}),
    ("llama", {"layers": 3, "tie_word_embeddings": True}, "pp=2,dp=2,tp=2", {"zero": 3, "recompute": "full", "sequence_parallel": "on"}),
    ("gpt2", {"layers": 2}, "dp=2,tp=2", {"zero": 2, "micro_batch": 2}),
    ("mixtral", {"layers": 2}, "dp=4,ep=2", {"zero": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "mesh", "options"), CASES, ids=["-".join((c[0], c[2], *c[3])) for c in CASES])
def test_parity(name: str, changes: dict[str, int], mesh: str, options: dict[str, object]) -> None:
    compare(build(name, **{"layers": 4, **changes}), mesh, **options)  # type: ignore[arg-type]


def losses_with_dropout(plan_dir: str, data: list[dict[str, object]]) -> dict[str, object]:
    """One rank: losses of one batch at two steps and norms; the seed is the plan's."""
    from meshwright.runtime.engine import Engine

    engine = Engine(plan_dir, optimizer={"name": "sgd", "lr": 0.0})
    found = [engine.train_step(data[0]) for _ in range(2)]
    return {"losses": [m.loss for m in found], "norms": [m.grad_norm for m in found]}


def test_dropout_agrees_where_it_must_and_recomputation_repeats_it(tmp_path: os.PathLike[str]) -> None:
    """The same loss with and without recomputation, another loss at the next step, and one loss on all ranks."""
    tiny = build("gpt2", layers=2, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    data = batches(4, tiny.seq, 1)
    seen = []
    for recompute in ("none", "full"):
        folder = os.path.join(tmp_path, recompute)
        compile(tiny.directory, mesh="dp=2,tp=2", seq=tiny.seq, global_batch=4, recompute=recompute).save(folder)
        ranks = run_ranks(4, losses_with_dropout, folder, data)
        assert all(rank == ranks[0] for rank in ranks)
        seen.append(ranks[0])
    assert seen[0] == seen[1]
    assert abs(seen[0]["losses"][0] - seen[0]["losses"][1]) > 1e-4
    off: Trace = single(build("gpt2", layers=2), data)
    assert abs(off.losses[0] - seen[0]["losses"][0]) < 0.5


def test_a_router_loss_is_exact_with_one_row_on_each_rank() -> None:
    compare(build("mixtral", layers=2, output_router_logits=True), "dp=2", rows=2, micro_batch=1, steps=2)
