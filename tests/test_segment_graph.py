"""The DAG of segments: its order, and what crosses a cut."""

from __future__ import annotations

import networkx
import pytest

from meshwright.compiler.capture import capture
from meshwright.compiler.kinds import Kinds
from meshwright.passes.segment_graph import crossing, segment_graph, topological
from meshwright.plan import compile
from meshwright.tests.parity import build


def test_an_encoder_decoder_is_in_topological_order_and_its_encoder_crosses() -> None:
    source = build("t5", layers=2)
    kinds = Kinds(capture(source.directory, None, task=None, seq=32, micro_batch=2, attention="sdpa").graph)
    dag = segment_graph(kinds)
    order = [s.name for s in kinds.graph.segments]
    assert networkx.is_directed_acyclic_graph(dag)
    assert list(topological(dag)) == order
    decoders = [name for name in order if name.startswith("decoder.block")]
    encoder = {name for name in order if name.startswith("encoder")}
    assert all(networkx.ancestors(dag, name) >= encoder for name in decoders)
    cuts = crossing(dag, order)
    first, last = order.index(decoders[0]), order.index(decoders[-1])
    made = set(cuts[first - 1])
    assert all(made & set(cuts[i]) for i in range(first, last)), "what the encoder made goes on to the last decoder"
    assert cuts[-1] == ()
    plan = compile(source.directory, None, mesh="pp=3", seq=32, micro_batch=2)
    assert [name for names in plan.document.stage_segments for name in names] == order


def test_segments_that_read_each_other_have_no_order() -> None:
    dag = networkx.DiGraph()
    dag.add_edge("a", "b", values=("x",))
    dag.add_edge("b", "a", values=("y",))
    with pytest.raises(ValueError, match="segments read each other"):
        topological(dag)


def test_a_value_crosses_up_to_its_last_reader() -> None:
    dag = networkx.DiGraph()
    dag.add_nodes_from("abcd")
    dag.add_edge("a", "b", values=("x",))
    dag.add_edge("a", "d", values=("x", "y"))
    dag.add_edge("b", "c", values=("z",))
    assert crossing(dag, "abcd") == (("x", "y"), ("x", "y", "z"), ("x", "y"), ())
