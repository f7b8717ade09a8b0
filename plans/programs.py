"""What can be known of an emitted program without running it."""

from __future__ import annotations

import ast
from pathlib import Path

from meshwright.plans.errors import InputError
from meshwright.plans.patterns import expand_all


def program_name(stage: int) -> str:
    """File name of a stage's program."""
    return f"stage_{stage}.py"


def stage_parameters(text: str, path: Path) -> tuple[str, ...]:
    """Names of the parameters that a program holds."""
    for node in ast.parse(text, str(path)).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["PARAMETERS"]:
            return expand_all(ast.literal_eval(node.value))
    raise InputError(f"{path}: defines no PARAMETERS; compile again with --from")
