"""Capture: a model in, the Graph IR out.

`capture` finds the model, builds it without weight memory, exports it on example inputs, and runs the passes of `simplify`
over the raw graph; the graph is checked after each.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PretrainedConfig, PreTrainedModel

from meshwright.compiler.capture.batch_terms import sync_batch_terms
from meshwright.compiler.capture.exporting import evaluation_note, flat_example
from meshwright.compiler.capture.functionalize import functionalize
from meshwright.compiler.capture.layers import find_segments
from meshwright.compiler.capture.loss import split_loss
from meshwright.compiler.capture.masks import fold_masks
from meshwright.compiler.capture.selections import select_by_position
from meshwright.compiler.capture.simplify import (
    RandomOpsError,
    assign_levels,
    drop_no_ops,
    drop_unused,
    mark_gradients,
    merge_equal,
    refuse_random,
    rename,
)
from meshwright.compiler.capture.skeleton import Built, build_model, build_skeleton, default_example, prepare_config
from meshwright.compiler.capture.source import (
    CUSTOM,
    ModelSource,
    find_configured,
    find_source,
    load_config,
    quiet,
    task_of,
    task_of_class,
)
from meshwright.compiler.capture.trace import Traced, dtype_name, trace
from meshwright.compiler.garbage import rare_collections
from meshwright.compiler.graph import Graph
from meshwright.plans.errors import InputError

__all__ = [
    "Captured",
    "ModelSource",
    "build_model",
    "build_skeleton",
    "capture",
    "find_source",
    "load_config",
]


@dataclass(frozen=True)
class Captured:
    """A captured model.

    graph        the computation of one micro-batch on one data-parallel rank
    buffers      real tensors of the graph's buffers, by model path
    source       where the model comes from
    config_json  the transformers configuration as text, if there is one
    signature    inputs, parameters, tied names, vocabulary size and unused parameters, as in model/signature.json
    """

    graph: Graph
    buffers: dict[str, torch.Tensor]
    source: ModelSource
    config_json: str | None
    signature: dict[str, object]


def capture(
    model: str | nn.Module,
    example: Mapping[str, object] | None = None,
    *,
    task: str | None = None,
    seq: int,
    micro_batch: int,
    attention: str = "sdpa",
    dtype: str = "float32",
) -> Captured:
    """Captures MODEL (see source.py) or an nn.Module for micro-batches of `micro_batch` sequences of `seq` tokens.

    A model that transformers builds is built in `dtype`, so that its own casts are in the graph; modules and factories keep their
    dtype, and so does a model that does not export in a 16-bit one. The signature says float32 in any case.
    """
    with quiet(), rare_collections():
        if isinstance(model, nn.Module):
            source, built = _given_module(model, task, attention)
            traced, graph = _captured(built, example, source, micro_batch, seq)
        else:
            source, config = find_configured(model, task, attention)
            built, traced, graph = _captured_in(dtype, source, config, example, micro_batch, seq)
    buffers = {path: traced.buffers[path].detach().clone().contiguous() for _, path in graph.buffers}
    return Captured(graph, buffers, source, _config_json(built), _signature(graph, built, dtype))


def _captured_in(
    dtype: str,
    source: ModelSource,
    config: PretrainedConfig | None,
    example: Mapping[str, object] | None,
    micro_batch: int,
    seq: int,
) -> tuple[Built, Traced, Graph]:
    """A model that is built here, in a 16-bit dtype if it exports in it."""
    note = ""
    if config is not None and dtype != "float32":
        try:
            built = build_skeleton(source, config, getattr(torch, dtype))
            return built, *_captured(built, example, source, micro_batch, seq)
        except InputError as error:
            note = f"captured in float32, for in {dtype} the model's code does not export: {str(error).splitlines()[0]}"
            config = load_config(source)
    built = build_skeleton(source, config)
    traced, graph = _captured(built, example, source, micro_batch, seq)
    return built, traced, replace(graph, notes=(*graph.notes, note)) if note else graph


def _captured(
    built: Built, example: Mapping[str, object] | None, source: ModelSource, micro_batch: int, seq: int
) -> tuple[Traced, Graph]:
    """A built model on example inputs of the asked sizes."""
    inputs = _example(built, example if example is not None else built.example, source, micro_batch, seq)
    return _captured_quietly(built.module, inputs)


def _captured_quietly(module: nn.Module, inputs: dict[str, object]) -> tuple[Traced, Graph]:
    """Traces and simplifies; modules that draw random numbers in training are captured as in evaluation, where they draw none."""
    traced = trace(module, inputs)
    try:
        return traced, simplify(traced)
    except RandomOpsError as error:
        noisy = error.modules
        if not any(module.get_submodule(path).training for path in noisy):
            raise
    traced = trace(module, inputs, noisy)
    graph = simplify(traced)
    note = f"{evaluation_note(sorted(noisy))}, for in training it draws random numbers"
    return traced, replace(graph, notes=(*graph.notes, note))


def simplify(traced: Traced) -> Graph:
    """The pass pipeline."""

    def pure(graph: Graph) -> Graph:
        return functionalize(graph, traced.aliases)

    def fold(graph: Graph) -> Graph:
        return select_by_position(fold_masks(graph, traced.buffers), traced.buffers)

    pipeline: tuple[Callable[[Graph], Graph], ...] = (
        mark_gradients,
        pure,
        mark_gradients,
        drop_no_ops,
        drop_unused,
        rename,
        refuse_random,
        assign_levels,
        merge_equal,
        fold,
        split_loss,
        sync_batch_terms,
        drop_unused,
        assign_levels,
        mark_gradients,
        merge_equal,
        rename,
        find_segments,
    )
    graph = traced.graph
    for step in pipeline:
        before, graph = graph, step(graph)
        if graph is not before:
            graph.check()
    return graph


def _given_module(module: nn.Module, task: str | None, attention: str) -> tuple[ModelSource, Built]:
    """An nn.Module object as a source. Its settings are its own, but for the caches and the experts' form."""
    kind = type(module)
    where = f"{kind.__module__}:{kind.__qualname__}"
    config = getattr(module, "config", None)
    if not isinstance(config, PretrainedConfig):
        return ModelSource(where, "module", task, attention, True), Built(module.train(), None, None)
    if not config.architectures:
        config.architectures = [kind.__name__]
    task = task_of(config, where, task) if task not in (None, CUSTOM) else task_of_class(config)
    prepare_config(config, where, task)
    if isinstance(module, PreTrainedModel):
        with contextlib.suppress(ValueError):  # a model without experts says that it has none
            module.set_experts_implementation("grouped_mm")
    return ModelSource(where, "module", task, attention, True), Built(module.train(), None, config)


def _example(
    built: Built, example: Mapping[str, object] | None, source: ModelSource, micro_batch: int, seq: int
) -> dict[str, object]:
    """Example keyword arguments of the asked batch and sequence sizes."""
    if example is None:
        task = source.task or (task_of_class(built.config) if built.config is not None else None)
        if task is None or built.config is None:
            raise InputError(f"{source.source}: a model of no task that is known here: example inputs are needed, with labels")
        return default_example(task, built.config, micro_batch, seq)
    tensors = {name: item for name, item in flat_example(example).items() if isinstance(item, torch.Tensor) and item.dim() > 0}
    ids = next((t for t in tensors.values() if t.dim() > 1 and not t.is_floating_point()), None)
    old_batch = _batch_of(tensors)
    resize = partial(_resized, old_batch, ids.shape[1] if ids is not None else -1, micro_batch, seq)
    return tree_map(resize, dict(example))  # type: ignore[no-any-return]


def _batch_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Rows of an example: those of its labels, else of most of its tensors. An input may have several entries for each row."""
    sizes = [t.shape[0] for t in tensors.values()]
    batch = tensors["labels"].shape[0] if "labels" in tensors else max(sizes, key=sizes.count, default=1)
    for name, item in tensors.items():
        if item.shape[0] % batch:
            raise InputError(f"example input {name} has {item.shape[0]} rows, which are no multiple of the batch's {batch}")
    return batch


def _resized(old_batch: int, old_seq: int, micro_batch: int, seq: int, item: object) -> object:
    """Zeros of an input's shape for the asked sizes; what is no tensor, or has no dims, as it is."""
    if not isinstance(item, torch.Tensor) or item.dim() == 0:
        return item
    shape = [item.shape[0] // old_batch * micro_batch, *item.shape[1:]]
    if len(shape) > 1 and shape[1] == old_seq and not item.is_floating_point():
        shape[1] = seq
    return torch.zeros(shape, dtype=item.dtype)


def _config_json(built: Built) -> str | None:
    if built.config is None:
        return None
    content = built.config.to_dict()
    if not content.get("architectures"):
        content["architectures"] = [type(built.module).__name__]
    return json.dumps(content, indent=2, sort_keys=True, default=str) + "\n"


def _signature(graph: Graph, built: Built, dtype: str) -> dict[str, object]:
    """model/signature.json. Parameters that were built in `dtype` are FP32: that is what is loaded, updated and saved."""
    named = dict(built.module.named_parameters())
    used = {parameter.path for parameter in graph.parameters}
    entries = {
        path: {
            "shape": list(p.shape),
            "dtype": "float32" if dtype_name(p.dtype) == dtype else dtype_name(p.dtype),
            "trainable": p.requires_grad,
        }
        for path, p in named.items()
    }
    first = {id(p): path for path, p in named.items()}
    every = built.module.named_parameters(remove_duplicate=False)
    vocabulary = getattr(built.config.get_text_config(), "vocab_size", None) if built.config is not None else None
    return {
        "inputs": [{"name": v.name, "shape": list(v.shape), "dtype": v.dtype} for v in graph.inputs],
        "parameters": {path: entry for path, entry in entries.items() if path in used},
        "tied": {path: first[id(p)] for path, p in every if first[id(p)] != path},
        "vocab_size": vocabulary,
        "unused": {path: entry for path, entry in entries.items() if path not in used},
    }
