"""A small model with a hand-written plan, for tests of the engine without the compiler.

The model: embedding (tied with the head), LAYERS of h + down(relu(up(norm(h)))), final norm, head, mean cross-entropy. The
embedding's output is also added before the final norm, so that it passes through all stages; `ids == 0` masks that
sum and crosses the stages as a bool. `scale` is frozen, `extra` is unused.

`write_plan` writes weights and a plan directory for a mesh; with tp > 1 hidden states are sharded along the sequence
(so norms are R), `up` by column, `down` by row, the embedding by vocabulary. `reference` is the same in plain torch.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from meshwright.plans.document import PlanDocument
from meshwright.plans.mesh import Mesh
from meshwright.plans.reading import read_plan
from meshwright.plans.save import save_plan_dir
from meshwright.plans.signature import InputSpec, ParameterSpec, Signature
from meshwright.runtime.orders import SCHEDULES

VOCABULARY, HIDDEN, INNER, LAYERS, SEQ = 32, 8, 24, 4, 6


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed.weight": (VOCABULARY, HIDDEN), "scale": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        found |= {
            f"layers.{i}.norm.weight": (HIDDEN,),
            f"layers.{i}.up.weight": (INNER, HIDDEN),
            f"layers.{i}.up.bias": (INNER,),
            f"layers.{i}.down.weight": (HIDDEN, INNER),
        }
    return found


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes().items()}
    return found | {"extra": torch.arange(3.0)}


def batch(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Ids, and labels with -100 spread unevenly (all of row 1)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, SEQ), generator=generator)
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[1] = -100
    return {"input_ids": ids, "labels": labels}


def reference_loss(w: dict[str, Tensor], data: dict[str, Tensor]) -> Tensor:
    ids = data["input_ids"]
    first = h = F.embedding(ids, w["embed.weight"])
    for i in range(LAYERS):
        x = F.layer_norm(h, (HIDDEN,), w[f"layers.{i}.norm.weight"])
        x = F.relu(F.linear(x, w[f"layers.{i}.up.weight"], w[f"layers.{i}.up.bias"]))
        h = h + F.linear(x, w[f"layers.{i}.down.weight"])
    h = h * w["scale"] + first.masked_fill((ids == 0).unsqueeze(-1), 0)
    logits = F.linear(F.layer_norm(h, (HIDDEN,), w["norm.weight"]), w["embed.weight"])
    return F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten(), ignore_index=-100, reduction="mean")


def layout(name: str, mesh: Mesh) -> str:
    if mesh.tp == 1:
        return "I"
    if "norm" in name or name == "scale":
        return "R@tp"
    return "S(1)@tp" if "down" in name else "S(0)@tp"


def stage_text(stage: int, mesh: Mesh, stages: int, recompute: str = "none") -> str:
    per_stage = LAYERS // stages
    layers = range(stage * per_stage, (stage + 1) * per_stage)
    first, last = stage == 0, stage == stages - 1
    names = ["embed.weight"] if first or last else []
    if last:
        names += ["scale", "norm.weight"]
    names += [n for n in shapes() if any(n.startswith(f"layers.{i}.") for i in layers)]
    hidden = (1, SEQ // mesh.tp, HIDDEN)
    boundary = (("h", hidden, "float32", True), ("first", hidden, "float32", True), ("pad", hidden[:2], "bool", False))
    seq = "S(1)" if mesh.tp > 1 else "I"
    call = "layer" if recompute == "none" else "recomputed_layer"
    inputs = (("input_ids",) if first else ()) + (("labels",) if last else ())
    lines = [
        f'"""Stage {stage}."""',
        "import torch",
        "from meshwright.runtime import ops",
        f"PARAMETERS = {tuple(names)!r}",
        f"RECEIVES = {() if first else boundary!r}",
        f"SENDS = {() if last else boundary!r}",
        f"INPUTS = {inputs!r}",
        "BUFFERS = ()",
        "def constants(rt, buffers):",
        "    return {}",
        "def counts(rt, constants, inputs):",
        "    return ((inputs['labels'] != -100).sum(),)" if last else "    return ()",
        "def layer(rt, w, h):",
        "    tp = rt.axis('tp')",
        f"    x = torch.nn.functional.layer_norm(h, ({HIDDEN},), w['norm.weight'])",
        f"    (x,) = ops.column_linear(x, tp, [w['up.weight']], [w['up.bias']], '{seq} -> R')",
        "    x = ops.linear(torch.relu(x), w['down.weight'])",
        f"    return h + ops.convert(x, tp, 'P -> {seq}')",
        "def forward(rt, w, constants, inputs, received, denominators):",
        "    tp = rt.axis('tp')",
    ]
    if first:
        lines += [
            "    ids = inputs['input_ids']",
            f"    first = h = ops.convert(ops.vocab_embedding(ids, w['embed.weight'], tp), tp, 'P -> {seq}')",
            f"    pad = ops.convert(ids == 0, tp, 'I -> {seq}')",
        ]
    else:
        lines += ["    h, first, pad = received"]
    lines += [f"    for i in range({layers.start}, {layers.stop}):", f"        h = rt.{call}(layer, w.at(f'layers.{{i}}.'), h)"]
    if last:
        lines += [
            "    h = h * w['scale'] + first.masked_fill(pad.unsqueeze(-1), 0)",
            f"    h = torch.nn.functional.layer_norm(h, ({HIDDEN},), w['norm.weight'])",
            f"    (logits,) = ops.column_linear(h, tp, [w['embed.weight']], [None], '{seq} -> R')",
            "    labels = inputs['labels'].flatten()",
            "    total = ops.vocab_cross_entropy_sum(logits.flatten(0, 1), labels, tp, -100, 0.0)",
            "    return (ops.token_mean(total, denominators[0]),)",
        ]
    else:
        lines += ["    return h, first, pad"]
    return "\n".join(lines) + "\n"


def document(source: Path, mesh: Mesh, schedule: str, recompute: str, zero: int = 0) -> PlanDocument:
    named = SCHEDULES[schedule]
    per_stage = LAYERS // (mesh.pp * named.chunks)
    zeros = {"parameters": 0, "gradients": 0, "optimizer": 0, "activations": 0}
    stages = [[f"layers.{i}" for i in range(s * per_stage, (s + 1) * per_stage)] for s in range(mesh.pp * named.chunks)]
    stages[0].insert(0, "embedding")
    stages[-1].append("head")
    kinds = {"embedding": ["embedding"], "layer": ["layers.{0..3}"], "head": ["head"]}
    return read_plan(
        {
            "schema": 1,
            "model": {"source": str(source), "kind": "directory", "parameters": 1},
            "task": "causal-lm", "attention": "sdpa", "seed": 0, "mesh": dict(mesh.sizes()), "hardware": "cpu",
            "seq": SEQ, "micro_batch": 1, "global_batch": 8, "precision": "fp32", "reduce_dtype": "fp32", "zero": zero,
            "recompute": recompute, "schedule": schedule, "chunks": named.chunks,
            "stage_ranks": list(named.stage_ranks(mesh.pp, named.chunks)), "sequence_parallel": "auto",
            "stages": [{"layers": s, "forward_s": 0.0, "backward_s": 0.0, "memory": zeros} for s in stages],
            "parameters": {name: layout(name, mesh) for name in shapes()},
            "kinds": {kind: {"segments": segments, "layouts": {}} for kind, segments in kinds.items()},
            "predicted": {"step_s": 0.0, "tokens_per_s": 0.0, "bubble": 0.0},
        }
    )  # fmt: skip


def signature() -> Signature:
    ids = [InputSpec(name=name, shape=(1, SEQ), dtype="int64") for name in ("input_ids", "labels")]
    specs = {n: ParameterSpec(shape=s, dtype="float32", trainable=n != "scale") for n, s in shapes().items()}
    unused = {"extra": ParameterSpec(shape=(3,), dtype="float32")}
    tied = {"head.weight": "embed.weight"}
    return Signature(inputs=tuple(ids), parameters=specs, tied=tied, vocab_size=VOCABULARY, unused=unused)


def write_weights(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights(), directory / "model.safetensors")
    return directory


def write_plan(directory: Path, mesh: Mesh, schedule: str = "1f1b", recompute: str = "none", zero: int = 0) -> Path:
    """A plan directory; its weights are beside it, in `weights`."""
    source = write_weights(directory.parent / "weights")
    stages = mesh.pp * SCHEDULES[schedule].chunks
    programs = {f"stage_{stage}.py": stage_text(stage, mesh, stages, recompute) for stage in range(stages)}
    files = {"signature.json": signature().to_json().encode(), "config.json": json.dumps({}).encode()}
    save_plan_dir(directory, document(source, mesh, schedule, recompute, zero), programs, files)
    return directory


class Reference:
    """The single process: parameters, and torch's own optimizer and clipping."""

    def __init__(self, optimizer: dict[str, object]) -> None:
        self.weights = weights()
        self.trained = {n: w.requires_grad_() for n, w in self.weights.items() if n not in ("scale", "extra")}
        options = dict(optimizer)
        kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[str(options.pop("name"))]
        self.clip = options.pop("clip", None)
        self.optimizer = kind(list(self.trained.values()), **options)

    def forward_backward(self, data: dict[str, Tensor]) -> tuple[float, float]:
        self.optimizer.zero_grad()
        loss = reference_loss(self.weights, data)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self.trained.values()), float("inf"))
        return loss.item(), norm.item()

    def train_step(self, data: dict[str, Tensor]) -> tuple[float, float]:
        found = self.forward_backward(data)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.trained.values()), float(str(self.clip)))
        self.optimizer.step()
        return found
