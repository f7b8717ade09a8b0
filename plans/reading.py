"""Data to documents: what pydantic finds wrong, as one line that names the file and the key path.

    plan.yaml: stages[1].layers: found 3, expected a list of segment names such as 'model.layers.{0..15}'
    plan.yaml: micro_bacth: unknown key; did you mean micro_batch?
    --precision: bf16 is not in this version, which has fp32

EXPECTED says what would be right, by key path without indices; the JSON Schema takes its descriptions from it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar, get_args

from pydantic import BaseModel, ValidationError

from meshwright.plans.consistency import Conflict
from meshwright.plans.document import Declaration, PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.signature import Signature

M = TypeVar("M", bound=BaseModel)

EXPECTED: Mapping[str, str] = {
    "schema": "1, the version of this format",
    "model": "a path, hub id or package.module:factory, or its source, kind and parameters",
    "model.source": "an absolute path, hub id or package.module:factory",
    "model.kind": "directory, config, gguf, factory or hub",
    "model.parameters": "the model's number of parameters",
    "task": "a task such as causal-lm, masked-lm or seq2seq-lm",
    "attention": "sdpa or eager",
    "seed": "a whole number of 0 or more",
    "mesh": "sizes by axis such as {pp: 2, tp: 2}",
    "devices": "a whole number of 1 or more: how many devices to find a mesh for",
    "hardware": "a name such as a100-80gb, h100, h200 or cpu, or a file that profile wrote",
    "memory_limit": "bytes or an amount such as 40GiB, or null",
    "seq": "a whole number of 1 or more: tokens per sequence",
    "micro_batch": "a whole number of 1 or more: sequences per dp rank and micro-batch",
    "global_batch": "a whole number of 1 or more: sequences per step over all ranks",
    "precision": "fp32, bf16 or fp16",
    "precision_ops": "compute, fp32, inside, widest or given by op (pow), module (model.layers.*.mlp) or MODULE:OP, with a reason",
    "reduce_dtype": "fp32 or bf16",
    "zero": "0, 1, 2 or 3",
    "recompute": "none, selective, full or auto",
    "schedule": "gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, pipedream-2bw, synthesised or auto",
    "chunks": "a whole number of 1 or more: model chunks per rank",
    "stage_ranks": "the pp rank of every stage, such as [0, 1, 1, 0]",
    "actions": "a line of F, B and W actions for every pp rank, such as '0F0 0F1 0B0 0W0 0B1 0W1'",
    "sequence_parallel": "auto, on or off",
    "stages": "a list of stages, each with its layers",
    "stages.layers": "a list of segment names such as 'model.layers.{0..15}'",
    "stages.forward_s": "predicted seconds of a micro-batch's forward, 0 or more",
    "stages.backward_s": "predicted seconds of a micro-batch's backward, 0 or more",
    "stages.backward_weight_s": "predicted seconds of its weight gradients, which are part of backward_s",
    "stages.memory": "predicted bytes: parameters, gradients, optimizer and activations",
    "stages.memory.parameters": "bytes, 0 or more",
    "stages.memory.gradients": "bytes, 0 or more",
    "stages.memory.optimizer": "bytes, 0 or more",
    "stages.memory.activations": "bytes, 0 or more",
    "stages.memory.buffers": "bytes, 0 or more",
    "stages.memory.transient": "bytes, 0 or more",
    "stages.memory.communication": "bytes, 0 or more",
    "parameters": "layouts by parameter name such as model.layers.{0..15}.mlp.up_proj.weight: S(0)@tp",
    "kinds": "segments and layouts by kind of segment",
    "kinds.segments": "a list of segment names such as 'model.layers.{0..15}'",
    "kinds.layouts": "layouts by module such as mlp.up_proj: S(2)@tp, or by op below the module",
    "recomputed": "a list of segments, each with the regions of ops that are recomputed",
    "recomputed.segments": "a list of segment names such as 'model.layers.{0..15}'",
    "recomputed.regions": "all, or a list of regions, each a list of ops such as [self_attn.matmul, self_attn.softmax]",
    "recomputed.frees": "predicted bytes of one segment and micro-batch",
    "recomputed.costs_s": "predicted seconds of one segment and micro-batch, 0 or more",
    "pinned": "names of decisions that were given: stages, parameters.NAME or kinds.KIND.layouts.MODULE",
    "notes": "a list of sentences",
    "predicted": "step_s, tokens_per_s, bubble, collectives and activations",
    "predicted.step_s": "seconds, 0 or more",
    "predicted.tokens_per_s": "a number of 0 or more",
    "predicted.bubble": "a share of time, 0 or more",
    "predicted.collectives": "seconds by collective",
    "predicted.activations": "bytes by segment",
    "decisions": "the digest that compile wrote",
    "programs": "digests by file name, as compile wrote them",
}


def read_plan(data: object, where: str = "plan.yaml") -> PlanDocument:
    """The plan that `data` (from YAML) is; InputError in one line when it is not one."""
    if not isinstance(data, Mapping):
        raise InputError(_not_keys(data, where))
    return _read(PlanDocument, data, where, ())


def read_declaration(data: object, options: Mapping[str, object], where: str) -> Declaration:
    """The declaration of a file's `data`, command-line `options` laid over it; errors name `where` or the option.
    Another `recompute` chooses anew what is recomputed."""
    if not isinstance(data, Mapping):
        raise InputError(_not_keys(data, where))
    anew = options.get("recompute", data.get("recompute")) != data.get("recompute")
    kept = {key: value for key, value in data.items() if not (anew and key == "recomputed")}
    return _read(Declaration, {**kept, **options}, where, tuple(options))


def read_signature(data: object, where: str) -> Signature:
    """The signature that `data` (from JSON) is."""
    return _read(Signature, data, where, ())


def _not_keys(data: object, where: str) -> str:
    return f"{where}: found {_found(data)}, expected keys of a plan such as mesh and stages"


def _read(model: type[M], data: object, where: str, options: Sequence[str]) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # A mistyped key is also a missing key: name the typo first.
        problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        location, message = _explain(model, problems[0]["loc"], problems[0])
    if not location:
        raise InputError(f"{where}: {message}")
    key, dot, rest = location.partition(".")
    if key in options:
        raise InputError(f"{_option(key)}: {rest}{': ' if dot else ''}{message}")
    raise InputError(f"{where}: {location}: {message}")


def _explain(model: type[BaseModel], loc: tuple[int | str, ...], problem: Mapping[str, object]) -> tuple[str, str]:
    """(key path, what is wrong and what would be right)."""
    context = problem.get("ctx")
    cause = context.get("error") if isinstance(context, Mapping) else None
    if isinstance(cause, Conflict):
        return cause.path, str(cause)
    path = _path(loc)
    if isinstance(cause, ValueError):
        return path, str(cause)
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(str(loc[-1]), keys := _keys(model, loc[:-1]), n=1)
        return path, "unknown key; " + (f"did you mean {near[0]}?" if near else f"the keys are {', '.join(keys)}")
    expected = _expected(loc) or _plain(str(problem["msg"]))
    if problem["type"] == "missing":
        return path, f"missing; expected {expected}"
    return path, f"found {_found(problem['input'])}, expected {expected}"


def _option(key: str) -> str:
    return "MODEL" if key == "model" else "--" + key.replace("_", "-")


def _path(loc: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if part != "[key]")
    return text.removeprefix(".")


def _expected(loc: Sequence[int | str]) -> str | None:
    """EXPECTED of the longest known prefix of the path, the names of a mapping left out."""
    known: str | None = None
    prefix = ""
    for part in loc:
        longer = f"{prefix}.{part}".removeprefix(".")
        if longer in EXPECTED:
            known, prefix = EXPECTED[longer], longer
    return known


def _keys(model: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    """Keys that exist at a path of a model."""
    for part in loc:
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        if isinstance(part, str) and part in fields:
            model = _inner_model(fields[part].annotation) or model
    return [field.alias or name for name, field in model.model_fields.items()]


def _inner_model(annotation: object) -> type[BaseModel] | None:
    """The model inside an annotation such as tuple[Stage, ...] | None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _inner_model(inner))), None)


def _plain(message: str) -> str:
    return message.removeprefix("Input should be ").removeprefix("Field ")


def _found(value: object) -> str:
    """A wrong value in few words."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return f"keys {', '.join(map(str, list(value)[:3]))}" if value else "no keys"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
