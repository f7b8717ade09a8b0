"""A small plan, as text and as values, for tests of plans and of the command line: no model, no torch."""

from __future__ import annotations

from pathlib import Path

from meshwright.plans.document import PlanDocument
from meshwright.plans.reading import read_plan
from meshwright.plans.save import save_plan_dir
from meshwright.plans.signature import Signature
from meshwright.plans.yaml_io import parse

TEXT = """
schema: 1
model: {source: /models/tiny, kind: directory, parameters: 4736}
task: causal-lm
attention: sdpa
seed: 0
mesh: {pp: 2, dp: 1, cp: 1, tp: 2, ep: 1}
hardware: cpu
memory_limit: null
seq: 16
micro_batch: 1
global_batch: 4
precision: fp32
reduce_dtype: fp32
zero: 0
recompute: none
schedule: 1f1b
chunks: 1
sequence_parallel: auto
stages:
- layers: [embedding, 'model.layers.{0..1}']
  forward_s: 0.01
  backward_s: 0.02
  memory: {parameters: 4096, gradients: 4096, optimizer: 8192, activations: 1024}
- layers: ['model.layers.{2..3}', head]
  forward_s: 0.012
  backward_s: 0.024
  memory: {parameters: 2048, gradients: 2048, optimizer: 4096, activations: 512}
parameters:
  model.embed_tokens.weight: S(0)@tp
  model.layers.{0..3}.mlp.up_proj.weight: S(0)@tp
  model.layers.{0..3}.mlp.down_proj.weight: S(1)@tp
  model.layers.{0..3}.norm.weight: R@tp
kinds:
  embedding:
    segments: [embedding]
    layouts: {model.embed_tokens: P@tp}
  layer:
    segments: ['model.layers.{0..3}']
    layouts:
      norm: S(1)@tp
      mlp.up_proj: S(2)@tp
      mlp: {mul: S(2)@tp, mul.1: I}
  head:
    segments: [head]
    layouts: {lm_head: S(2)@tp}
notes:
- 'model.layers.{0..3}.self_attn: 9 heads do not divide by tp=2: computed on every tp rank'
predicted:
  step_s: 0.2
  tokens_per_s: 320.0
  bubble: 0.2
  collectives: {tp all-reduce: 0.001}
"""

HELD = {0: "'model.embed_tokens.weight', 'model.layers.{0..1}.mlp.up_proj.weight'", 1: "'model.layers.{2..3}.norm.weight',"}
PROGRAMS = {f"stage_{k}.py": f'"""Stage {k}."""\nPARAMETERS = ({names})\n' for k, names in HELD.items()}


def sample_document() -> PlanDocument:
    """The plan without digests."""
    return read_plan(parse(TEXT))


def sample_signature() -> Signature:
    """What its model looks like."""
    shapes = {"mlp.up_proj.weight": [16, 8], "mlp.down_proj.weight": [8, 16], "norm.weight": [8]}
    layers = {f"model.layers.{i}.{name}": shape for i in range(4) for name, shape in shapes.items()}
    shapes = {"model.embed_tokens.weight": [64, 8], **layers}
    return Signature.model_validate({
        "inputs": [{"name": "input_ids", "shape": [1, 16], "dtype": "int64"}],
        "parameters": {name: {"shape": shape, "dtype": "float32"} for name, shape in shapes.items()},
        "tied": {"lm_head.weight": "model.embed_tokens.weight"},
        "vocab_size": 64,
    })


def save_sample(directory: Path, document: PlanDocument | None = None) -> PlanDocument:
    """Writes it as a plan directory."""
    files = {"signature.json": sample_signature().to_json().encode(), "config.json": b"{}"}
    return save_plan_dir(directory, document or sample_document(), PROGRAMS, files)
