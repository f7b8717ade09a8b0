"""What can be known of an emitted program without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from meshwright.plans.errors import InputError
from meshwright.plans.patterns import expand_all


@dataclass(frozen=True)
class StageFacts:
    """What a program says of its messages (name, local shape, dtype, whether a gradient comes back), and the mesh axes it talks on."""

    receives: tuple[tuple[object, ...], ...] = ()
    sends: tuple[tuple[object, ...], ...] = ()
    axes: tuple[str, ...] = ()


def program_name(stage: int) -> str:
    """File name of a stage's program."""
    return f"stage_{stage}.py"


def stage_parameters(text: str, path: Path) -> tuple[str, ...]:
    """Names of the parameters that a program holds."""
    return expand_all(map(str, _literal(ast.parse(text, str(path)), "PARAMETERS", path)))


def stage_facts(text: str, path: Path) -> StageFacts:
    """Facts of a program's text. An axis counts when `rt.axis` names it anywhere."""
    tree = ast.parse(text, str(path))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "rt.axis")
    axes = {str(argument.value) for call in calls for argument in call.args if isinstance(argument, ast.Constant)}
    receives, sends = (tuple(map(_boundary, _literal(tree, name, path))) for name in ("RECEIVES", "SENDS"))
    return StageFacts(receives, sends, tuple(sorted(axes)))


def _boundary(row: object) -> tuple[object, ...]:
    return tuple(row) if isinstance(row, tuple) else (row,)


def _literal(tree: ast.Module, name: str, path: Path) -> tuple[object, ...]:
    """The value of a module-level table."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return tuple(ast.literal_eval(node.value))
    raise InputError(f"{path}: defines no {name}; compile again with --from")
