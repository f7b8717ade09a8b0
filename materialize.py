"""`python -m meshwright.materialize PLAN_DIR OUT_DIR`: the plan's start weights as safetensors.

A rank reads its slices from safetensors and never builds the model. Where the source has none (a configuration or a
factory: initialised from the plan's seed; a .gguf file: quantised), this writes them once, in one process: fp32, every
parameter of model/signature.json by its own name, tied ones once, in files of at most SHARD with an index when they are
several. OUT_DIR appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file

from meshwright.compiler.capture import build_model, find_source
from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.save import load_plan, load_signature
from meshwright.plans.signature import Signature
from meshwright.runtime.weight_copy import BESIDE_PLAN

SHARD = "4GB"


def build_plan_model(document: PlanDocument, plan_dir: Path) -> torch.nn.Module:
    """The single-process model that a plan was made from, with the plan's start weights, in fp32 on the CPU."""
    with progress_on_terminals_only():
        if document.model.kind == "module":
            return rebuild_module(document, plan_dir / "model")
        source = find_source(document.model.source, document.task, document.attention)
        return build_model(source, seed=document.seed)


def rebuild_module(document: PlanDocument, files: Path) -> torch.nn.Module:
    """A model that was compiled as an object: from its configuration, and the weights that lie beside the plan."""
    if not (files / "config.json").is_file():
        raise InputError(
            f"{files.parent}: compiled from a {document.model.source} object without a transformers configuration, so it cannot be "
            "built again in one process; compile it as package.module:factory instead"
        )
    model = build_model(find_source(str(files / "config.json"), document.task, document.attention), seed=document.seed)
    model.load_state_dict(load_file(files / BESIDE_PLAN), strict=False)
    return model


@contextmanager
def progress_on_terminals_only() -> Iterator[None]:
    """The bars that transformers draws on stderr while it loads weights are not for a log file."""
    if sys.stderr.isatty():
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        yield


def start_weights(model: torch.nn.Module, signature: Signature) -> dict[str, torch.Tensor]:
    """The model's parameters by the names of the signature, each its own memory."""
    have = dict(model.named_parameters(remove_duplicate=False))
    names = [*signature.parameters, *signature.unused]
    if missing := [name for name in names if name not in have]:
        raise InputError(
            f"the model has no parameter {missing[0]}, which the plan was compiled with; it changed since: compile it again"
        )
    return {name: have[name].detach().float().contiguous() for name in names}


def materialize(plan_dir: Path, out_dir: Path) -> None:
    """Writes the start weights of a plan directory; nothing to do when `out_dir` is there already."""
    if out_dir.exists():
        return
    document, signature = load_plan(plan_dir), load_signature(plan_dir)
    weights = start_weights(build_plan_model(document, plan_dir), signature)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        save_torch_state_dict(weights, work, max_shard_size=SHARD)
        work.chmod(0o755)
        publish(work, out_dir)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def publish(work: Path, out_dir: Path) -> None:
    """Renames `work`; another process may have been faster with the same."""
    try:
        work.rename(out_dir)
    except OSError:
        if not out_dir.is_dir():
            raise


def command(
    plan_dir: Annotated[Path, typer.Argument(help="the directory that compile wrote")],
    out_dir: Annotated[Path, typer.Argument(help="where model.safetensors goes")],
) -> None:
    """Writes a plan's start weights as safetensors."""
    try:
        materialize(plan_dir, out_dir)
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(command)
