"""The graph of a model's segments: who reads whose values. What stages are cut from.

    segment_graph    a networkx DAG; an edge's `values` are the names that its reader reads
    topological      the segments in the one topological order that stages follow: the program's, which is among those that the DAG allows
    crossing         for each segment, the values made up to it that later ones read: what a cut behind it sends on. What an
                     encoder made crosses every later cut up to its last reader
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx

from meshwright.compiler.kinds import Kinds


def segment_graph(kinds: Kinds) -> networkx.DiGraph:
    """Segments by name, in program order."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(s.name for s in kinds.graph.segments)
    for segment in kinds.graph.segments:
        for value in kinds.result_values(segment):
            readers = dict.fromkeys(
                kinds.segment_of_op[j].name for j in kinds.graph.consumers.get(value.name, ()) if j in kinds.segment_of_op
            )
            for reader in readers:
                if reader != segment.name:
                    known = graph.get_edge_data(segment.name, reader, {"values": ()})["values"]
                    graph.add_edge(segment.name, reader, values=(*known, value.name))
    return graph


def topological(graph: networkx.DiGraph) -> tuple[str, ...]:
    """Segments in topological order, the program's where several may come next. ValueError when they read each other."""
    place = {name: i for i, name in enumerate(graph)}
    try:
        return tuple(networkx.lexicographical_topological_sort(graph, key=place.__getitem__))
    except networkx.NetworkXUnfeasible:
        around = " reads ".join(b for b, _ in reversed(networkx.find_cycle(graph)))
        raise ValueError(f"segments read each other: {around}; no stages can be cut between them") from None


def crossing(graph: networkx.DiGraph, order: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Values that cross behind each segment of an order."""
    place = {name: i for i, name in enumerate(order)}
    found: list[dict[str, None]] = [{} for _ in order]
    last: dict[str, tuple[int, int]] = {}
    for made, read, values in graph.edges(data="values"):
        for value in values:
            start, end = place[made], max(place[read], last.get(value, (0, 0))[1])
            last[value] = (start, end)
    for value, (start, end) in last.items():
        for cut in range(start, end):
            found[cut][value] = None
    return tuple(map(tuple, found))
