"""A small model with experts and a hand-written plan, as tests/toy.py has one without.

The model: embedding (tied with the head), toy.LAYERS layers, final norm, head, mean cross-entropy. A layer is h + the weighted sum of
its token's TOP experts of norm(h); an expert is down(relu(up(gain * x) + bias)). The loss adds Z_WEIGHT times the mean over
tokens of each router's squared log-partition.

`write_plan` writes weights and a plan directory for a mesh: experts over ep, their inner dim over tp (so `gain`, which
lies before the cut, is R on tp), everything else whole. `reference_loss` is the same in plain torch, expert by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from meshwright.plans.layout import Layout
from meshwright.plans.mesh import Mesh
from meshwright.plans.save import save_plan_dir
from meshwright.plans.signature import ParameterSpec, Signature
from meshwright.tests import toy
from meshwright.tests.toy import HIDDEN, LAYERS, SEQ, VOCABULARY

EXPERTS, TOP, INNER, Z_WEIGHT = 4, 2, 6, 0.01
LAYOUTS = {"gain": "R@tp S(0)@ep", "up": "S(2)@tp S(0)@ep", "bias": "S(1)@tp S(0)@ep", "down": "S(1)@tp S(0)@ep"}


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed.weight": (VOCABULARY, HIDDEN), "norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        found |= {
            f"layers.{i}.norm.weight": (HIDDEN,),
            f"layers.{i}.router": (EXPERTS, HIDDEN),
            f"layers.{i}.gain": (EXPERTS, HIDDEN),
            f"layers.{i}.up": (EXPERTS, HIDDEN, INNER),
            f"layers.{i}.bias": (EXPERTS, INNER),
            f"layers.{i}.down": (EXPERTS, INNER, HIDDEN),
        }
    return found


def weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) * 0.7 for name, shape in shapes().items()}


def layout(name: str) -> str:
    return LAYOUTS.get(name.rpartition(".")[2], "I")


def reference_loss(w: Mapping[str, Tensor], data: Mapping[str, Tensor]) -> Tensor:
    h = F.embedding(data["input_ids"], w["embed.weight"]).flatten(0, 1)
    z = torch.zeros(())
    for i in range(LAYERS):
        at = f"layers.{i}."
        x = F.layer_norm(h, (HIDDEN,), w[at + "norm.weight"])
        logits = x @ w[at + "router"].t()
        z = z + logits.logsumexp(-1).square().mean()
        top, ids = logits.softmax(-1).topk(TOP)
        for e in range(EXPERTS):
            weight = (top * (ids == e)).sum(-1, keepdim=True)
            inner = torch.relu((x * w[at + "gain"][e]) @ w[at + "up"][e] + w[at + "bias"][e])
            h = h + weight * (inner @ w[at + "down"][e])
    logits = F.linear(F.layer_norm(h, (HIDDEN,), w["norm.weight"]), w["embed.weight"])
    return F.cross_entropy(logits, data["labels"].flatten(), ignore_index=-100) + Z_WEIGHT * z


LAYER = f'''
def layer(rt, w, h, z):
    tp, ep = rt.axis("tp"), rt.axis("ep")
    x = torch.nn.functional.layer_norm(h, ({HIDDEN},), w["norm.weight"]).flatten(0, 1)
    logits = ops.linear(x, w["router"])
    z = z + logits.logsumexp(-1).square().sum()
    top, ids = logits.softmax(-1).topk({TOP})
    ids, order = ids.flatten().sort(stable=True)
    offsets = (ids[:, None] == torch.arange({EXPERTS})).sum(0).cumsum(0).to(torch.int32)
    rows = order // {TOP}
    route = ops.route(offsets, ep, {SEQ * TOP})
    local = ops.local_experts(ops.dispatch(ids, route), ep, {EXPERTS})
    x = ops.convert(ops.dispatch(x[rows], route), tp, "I -> R") * w["gain"][local]
    x = torch.relu(ops.grouped_mm(x, w["up"], route.offsets) + w["bias"][local])
    x = ops.convert(ops.grouped_mm(x, w["down"], route.offsets), tp, "P -> I")
    x = ops.combine(x, route) * top.flatten()[order].unsqueeze(1)
    return h + h.new_zeros({SEQ}, {HIDDEN}).index_add(0, rows, x).view_as(h), z
'''


def stage_text(stage: int, mesh: Mesh, recompute: str = "none") -> str:
    per_stage = LAYERS // mesh.pp
    layers = range(stage * per_stage, (stage + 1) * per_stage)
    first, last = stage == 0, stage == mesh.pp - 1
    names = ["embed.weight"] if first or last else []
    names += ["norm.weight"] if last else []
    names += [n for n in shapes() if any(n.startswith(f"layers.{i}.") for i in layers)]
    boundary = (("h", (1, SEQ, HIDDEN), "float32", True), ("z", (), "float32", True))
    inputs = (("input_ids",) if first else ()) + (("labels",) if last else ())
    call = "layer" if recompute == "none" else "recomputed_layer"
    lines = [
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
        "    return ((inputs['labels'] != -100).sum(), torch.tensor(inputs['labels'].numel()))" if last else "    return ()",
        LAYER,
        "def forward(rt, w, constants, inputs, received, denominators):",
        "    h, z = ops.embedding(inputs['input_ids'], w['embed.weight']), torch.zeros(())" if first else "    h, z = received",
        f"    for i in range({layers.start}, {layers.stop}):",
        f"        h, z = rt.{call}(layer, w.at(f'layers.{{i}}.'), h, z)",
    ]
    if last:
        lines += [
            f"    h = torch.nn.functional.layer_norm(h, ({HIDDEN},), w['norm.weight'])",
            "    logits = ops.linear(h, w['embed.weight']).flatten(0, 1)",
            "    total = ops.cross_entropy_sum(logits, inputs['labels'].flatten())",
            f"    return (ops.token_mean(total, denominators[0]) + {Z_WEIGHT} * ops.token_mean(z, denominators[1]),)",
        ]
    else:
        lines += ["    return h, z"]
    return "\n".join(lines) + "\n"


def signature() -> Signature:
    specs = {n: ParameterSpec(shape=s, dtype="float32") for n, s in shapes().items()}
    return toy.signature().model_copy(update={"parameters": specs, "unused": {}})


def write_plan(directory: Path, mesh: Mesh, schedule: str = "1f1b", recompute: str = "none", zero: int = 0) -> Path:
    """A plan directory; its weights are beside it, in `weights`."""
    source = directory.parent / "weights"
    source.mkdir(parents=True, exist_ok=True)
    save_file(weights(), source / "model.safetensors")
    parameters = {name: Layout.parse(layout(name)) for name in shapes()}
    document = toy.document(source, mesh, schedule, recompute, zero).model_copy(update={"parameters": parameters})
    programs = {f"stage_{stage}.py": stage_text(stage, mesh, recompute) for stage in range(mesh.pp)}
    save_plan_dir(directory, document, programs, {"signature.json": signature().to_json().encode()})
    return directory
