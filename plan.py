"""The plan as Python callers have it: compile, save, load, summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.driver import CompiledPlan
from meshwright.plans.reading import read_declaration
from meshwright.plans.save import load_checked, load_programs
from meshwright.searching import compile_plan


@dataclass(frozen=True)
class Plan(CompiledPlan):
    """A plan in memory. `document` has every decision; `save` and `load` move it to and from a directory."""

    @classmethod
    def load(cls, directory: str | Path) -> Plan:
        """The plan of a directory. InputError for one that is not whole, or was edited and not compiled again."""
        document, _ = load_checked(directory)
        files = {p.name: p.read_bytes() for p in sorted((Path(directory) / "model").iterdir()) if p.is_file()}
        return cls(document, load_programs(directory, document), files)


def compile(
    model: str | Path | torch.nn.Module,
    example: Mapping[str, object] | None = None,
    **options: object,
) -> Plan:
    """Captures a model and plans it.

    model    a MODEL as on the command line (directory, config.json, .gguf, hub id, package.module:factory) or an nn.Module
    example  keyword arguments of the module's forward for one micro-batch, for modules that transformers' tasks do not describe
    options  keys of the plan: mesh={"pp": 2, "tp": 2}, seq=128, micro_batch=1, global_batch=8, schedule="1f1b", ...

    Raises InputError for what cannot be had, in one line.
    """
    declaration = read_declaration({}, options, "compile")
    source = model if isinstance(model, torch.nn.Module) else str(model)
    compiled = compile_plan(source, example=example, declaration=declaration)
    return Plan(compiled.document, compiled.programs, compiled.model_files, compiled.weights, compiled.search)
