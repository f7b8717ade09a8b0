"""Segments and kinds: which runs of ops are one layer, and which layers are the same program.

Segment  a layer is all COMPUTE ops below the outermost integer component of their module path (`model.layers.3`,
         `encoder.block.0`, `transformer.h.7`). What is computed before the first layer is `embedding`, after the last `head`,
         between layers `bridge`, `bridge.1` ...; ops between two runs of one layer join it; ops between two layers of one container
         that read no parameter join the layer before them, and so do the same ops after the last layer.
Order    layers whose ops interleave are put in order of their first op, where dependencies allow it.
Kind     `canonical` writes a segment as text: targets, literals, shapes, dtypes, local numbering of values, parameter names
         relative to the segment, and which results are read outside. Equal text is one kind; its segments match op by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.compiler.graph import Graph, Level, Ref, Segment, Value, map_refs

LEVELS = (Level.CONSTANT, Level.INPUT, Level.COMPUTE)
EMBEDDING, HEAD, BRIDGE = "embedding", "head", "bridge"


def layer_prefix(module: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj`; "" outside layers."""
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def container(prefix: str) -> str:
    """`model.layers` of `model.layers.3`."""
    return prefix.rpartition(".")[0]


def find_segments(graph: Graph) -> Graph:
    """The graph with ops in the order CONSTANT, INPUT, segment by segment, and `segments` filled in. Needs levels."""
    labels = _labels(graph)
    rank = {label: position for position, label in enumerate(dict.fromkeys(labels.values()))}
    if not _can_sort(graph, labels, rank):
        labels = _split(labels)
        rank = {label: position for position, label in enumerate(dict.fromkeys(labels.values()))}

    def position(index: int) -> tuple[int, int, int]:
        return LEVELS.index(graph.ops[index].level), rank.get(labels.get(index, ""), 0), index

    order = sorted(range(len(graph.ops)), key=position)
    graph = replace(graph, ops=tuple(graph.ops[i] for i in order))
    members: dict[str, list[int]] = {}
    for index, old in enumerate(order):
        if old in labels:
            members.setdefault(labels[old], []).append(index)
    texts = {label: canonical(graph, members[label], _prefix_of(label)) for label in members}
    kinds = _kind_names(texts)
    segments = tuple(Segment(label, _prefix_of(label), kinds[label], tuple(indices)) for label, indices in members.items())
    return replace(graph, segments=segments)


def _prefix_of(label: str) -> str:
    is_outside = label in (EMBEDDING, HEAD) or label.split(".")[0] == BRIDGE
    return "" if is_outside else label.split("@")[0]


def _labels(graph: Graph) -> dict[int, str]:
    """Segment name of every COMPUTE op, by index."""
    compute = [i for i, op in enumerate(graph.ops) if op.level is Level.COMPUTE]
    prefixes = [layer_prefix(graph.ops[i].module) for i in compute]
    in_layers = [position for position, prefix in enumerate(prefixes) if prefix]
    if not in_layers:
        return dict.fromkeys(compute, HEAD)
    labels = dict(zip(compute, prefixes, strict=True))
    labels.update(dict.fromkeys(compute[: in_layers[0]], EMBEDDING))
    joined: dict[str, list[str]] = {}
    bridges = 0
    for before, after in pairwise([*in_layers, len(compute)]):
        run = compute[before + 1 : after]
        prefix = prefixes[before]
        is_last = after == len(compute)
        if not is_last and prefix == prefixes[after]:
            labels.update(dict.fromkeys(run, prefix))
            continue
        if not is_last and container(prefix) == container(prefixes[after]) and not _reads_parameters(graph, run):
            labels.update(dict.fromkeys(run, prefix))
            joined[container(prefix)] = [graph.ops[i].target for i in run]
            continue
        tail = joined.get(container(prefix), [])
        if tail and [graph.ops[i].target for i in run[: len(tail)]] == tail and not _reads_parameters(graph, run[: len(tail)]):
            labels.update(dict.fromkeys(run[: len(tail)], prefix))
            run = run[len(tail) :]
        if run and not is_last:
            labels.update(dict.fromkeys(run, f"{BRIDGE}.{bridges}" if bridges else BRIDGE))
            bridges += 1
        elif run:
            labels.update(dict.fromkeys(run, HEAD))
    return labels


def _reads_parameters(graph: Graph, run: Sequence[int]) -> bool:
    return any(name in graph.parameter_of for i in run for name in graph.ops[i].operands)


def _can_sort(graph: Graph, labels: dict[int, str], rank: dict[str, int]) -> bool:
    """Whether every COMPUTE op reads only from its own segment and earlier ones."""
    for index, label in labels.items():
        for name in graph.ops[index].operands:
            producer = graph.producers.get(name, -1)
            if producer in labels and rank[labels[producer]] > rank[label]:
                return False
    return True


def _split(labels: dict[int, str]) -> dict[int, str]:
    """A segment that is entered again gets a name of its own: `name@1`, `name@2` ..."""
    found: dict[int, str] = {}
    visits: dict[str, int] = {}
    before = ""
    for index, label in labels.items():
        if label != before:
            visits[label] = visits.get(label, -1) + 1
            before = label
        found[index] = f"{label}@{visits[label]}" if visits[label] else label
    return found


def canonical(graph: Graph, members: Sequence[int], prefix: str) -> str:
    """A segment as text that is equal for segments that are the same program."""
    inside = set(members)
    numbers: dict[str, str] = {}
    lines: list[str] = []

    def number(ref: Ref) -> Ref:
        if ref.name not in numbers:
            numbers[ref.name] = f"external{len(numbers)}"
            lines.append(f"{numbers[ref.name]}: {_external(graph, graph.values[ref.name], prefix)}")
        return Ref(numbers[ref.name])

    for index in members:
        op = graph.ops[index]
        args = map_refs((op.args, tuple(item for _, item in op.kwargs)), number)
        names = [name for name, _ in op.kwargs]
        for result in op.results:
            numbers[result.name] = f"value{len(numbers)}"
        results = [_result(graph, result, numbers[result.name], inside) for result in op.results]
        lines.append(f"{relative(op.module, prefix)}| {', '.join(results)} = {op.target} {args!r} {names}")
    return "\n".join(lines)


def relative(path: str, prefix: str) -> str:
    """A module or parameter path relative to a segment's prefix."""
    if not prefix or not (path + ".").startswith(prefix + "."):
        return path
    return path[len(prefix) + 1 :]


def _external(graph: Graph, value: Value, prefix: str) -> str:
    kind = f"{value.dtype}{list(value.shape)} {value.requires_grad}"
    parameter = graph.parameter_of.get(value.name)
    if parameter is not None:
        return f"parameter {relative(parameter.path, prefix)} {kind}"
    producer = graph.producers.get(value.name)
    level = graph.ops[producer].level.value if producer is not None else "given"
    return f"{level} {kind}"


def _result(graph: Graph, value: Value, number: str, inside: set[int]) -> str:
    leaves = value.name == graph.loss or any(i not in inside for i in graph.consumers.get(value.name, ()))
    return f"{number}:{value.dtype}{list(value.shape)} {value.requires_grad}{' out' if leaves else ''}"


def _kind_names(texts: dict[str, str]) -> dict[str, str]:
    """Kind of every segment: `layer` when all layers are one kind, else named after their container, with letters."""
    layers = {label: text for label, text in texts.items() if _prefix_of(label)}
    one_kind = len(set(layers.values())) == 1
    names: dict[str, str] = {}
    by_text: dict[tuple[str, str], str] = {}
    for label, text in texts.items():
        layer_stem = "layer" if one_kind else container(_prefix_of(label)) or "layer"
        stem = layer_stem if label in layers else label.split(".")[0].split("@")[0]
        if (stem, text) not in by_text:
            count = sum(1 for known, _ in by_text if known == stem)
            by_text[stem, text] = stem if count == 0 else f"{stem}.{_letters(count)}"
        names[label] = by_text[stem, text]
    return names


def _letters(index: int) -> str:
    """1 -> b, 25 -> z, 26 -> aa."""
    text = ""
    index += 1
    while index:
        index, digit = divmod(index - 1, 26)
        text = chr(ord("a") + digit) + text
    return text
