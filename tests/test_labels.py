"""What the meaning of dims forbids: on graphs of real models and of one whose heads are in a list, as layers are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.compiler.assignment import legal_strategies
from meshwright.compiler.capture import capture
from meshwright.compiler.graph import Graph
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.labels import added_products
from meshwright.plans.layout import P
from meshwright.tests.parity import build

T = torch.Tensor


class Heads(nn.Module):
    """A loss over the logits of several heads, which are handed on like layers' results."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 32, bias=False) for _ in range(4))

    def forward(self, ids: T, labels: T) -> T:
        h = self.embed(ids)
        logits = torch.stack([head(h) for head in self.heads], 1)
        return F.cross_entropy(logits.reshape(-1, 32), labels.reshape(-1))


def graph_of(name: str) -> Graph:
    tiny = build(name, layers=2)
    ids = torch.zeros(2, tiny.seq, dtype=torch.long)
    return capture(tiny.load(), {"input_ids": ids, "labels": ids.clone()}, seq=tiny.seq, micro_batch=2).graph


def test_products_that_are_added_to_the_residual_stream_are_known() -> None:
    kinds = Kinds(graph_of("llama"))
    modules = {kinds.op(*op_class).module.rpartition(".")[2] for op_class in added_products(kinds)}
    assert modules == {"o_proj", "down_proj"}


def test_norms_do_not_sum_over_slices_of_the_hidden_size() -> None:
    kinds = Kinds(graph_of("llama"))
    legal = legal_strategies(kinds, "tp", 2, True)
    means = [c for c in legal.strategies if kinds.op(*c).target == "aten.mean.dim"]
    assert means and not any(s.operands[0].kind == "S" and s.results[0] == P for c in means for s in legal.strategies[c])


def test_a_loss_over_handed_on_logits_is_sharded_by_vocabulary() -> None:
    ids = torch.zeros(2, 6, dtype=torch.long)
    graph = capture(Heads(), {"ids": ids, "labels": torch.zeros(2, 4, 6, dtype=torch.long)}, seq=6, micro_batch=2).graph
    kinds = Kinds(graph)
    legal = legal_strategies(kinds, "tp", 2, True)
    assert all(legal.strategies.values())
    (loss,) = (c for c in legal.strategies if "cross_entropy" in kinds.op(*c).target)
    assert {s.lowering for s in legal.strategies[loss]} >= {"vocabulary"}
