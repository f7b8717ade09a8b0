"""plan.yaml as text.

`load` reads safe YAML only: no tags, no aliases, no duplicate keys; `true` and `false` are the only booleans (`on` and
`off` are words) and `1e-3` is a number. What is wrong is one line of InputError with the line number.

`dump` writes sections in the document's order, each under a short comment, small mappings on one line, and predicted
numbers to four significant digits.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path

import yaml

from meshwright.plans.document import PlanDocument
from meshwright.plans.errors import InputError

COMMENTS: Mapping[str, str] = {
    "schema": "meshwright plan; change a decision here and run: meshwright compile --from plan.yaml -o NEW_PLAN",
    "mesh": "ranks by axis",
    "seq": "batch: tokens per sequence, sequences per micro-batch and per step",
    "precision": "how a step runs",
    "precision_ops": "what ops compute in: compute (the precision), fp32, inside (FP32 in the kernel); else the widest of their operands",
    "stages": "pipeline stages: segments in order, predicted seconds per micro-batch and bytes per rank",
    "parameters": "parameter storage: S(d) slice of dim d, I same everywhere, R same with partial gradients",
    "kinds": "layouts of results by module, or by op of a module; P partial sums; alike in all segments of a kind",
    "recomputed": "ops that run again in the backward pass, what one segment and micro-batch frees and what that costs",
    "pinned": "decisions that were given, not chosen",
    "notes": "what could not be done as one would wish",
    "predicted": "predicted cost of a step",
    "decisions": "digests, checked before anything runs",
}
"""Comment above a section, by its first key."""

_WIDTH = 118
_OMITTED_WHEN_NONE = ("devices", "decisions", "stage_ranks", "actions")
_OMITTED_WHEN_EMPTY = ("recomputed", "precision_ops")


def load(path: Path, name: str | None = None) -> object:
    """Data of a YAML file; errors call it `name`."""
    where = name or str(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text, at byte {error.start}") from None
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error.strerror}") from None
    return parse(text, where)


def parse(text: str, where: str = "plan.yaml") -> object:
    """Data of YAML text."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = error.problem or error.context or "not YAML"
        raise InputError(f"{where}: {at}{' '.join(reason.split())}") from None
    except yaml.reader.ReaderError as error:
        raise InputError(f"{where}: character {error.position + 1} cannot be in YAML") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


def dump(document: PlanDocument) -> str:
    """Text of plan.yaml."""
    lines: list[str] = []
    for key, value in document.model_dump(mode="json", by_alias=True).items():
        if (value is None and key in _OMITTED_WHEN_NONE) or (not value and key in _OMITTED_WHEN_EMPTY):
            continue
        if key in COMMENTS:
            lines += ["", f"# {COMMENTS[key]}"] if lines else [f"# {COMMENTS[key]}"]
        section = {key: _styled(value)}
        lines.append(yaml.dump(section, Dumper=_Dumper, width=_WIDTH, sort_keys=False, allow_unicode=True).rstrip())
    return "\n".join(lines) + "\n"


class _Flow(dict[str, object]):
    """A mapping written on one line."""


class _FlowList(list[object]):
    """A list written on one line."""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that knows the two styles, and lists indented below their key."""


_Dumper.add_representer(_Flow, lambda d, v: d.represent_mapping("tag:yaml.org,2002:map", v.items(), flow_style=True))
_Dumper.add_representer(_FlowList, lambda d, v: d.represent_sequence("tag:yaml.org,2002:seq", v, flow_style=True))


def _styled(value: object) -> object:
    """The value with numbers rounded, and what fits a line marked as flow."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        items = {key: _styled(item) for key, item in value.items()}
        return _Flow(items) if _fits(items.values()) and len(str(items)) < _WIDTH - 20 else items
    if isinstance(value, list):
        entries = [_styled(item) for item in value]
        return _FlowList(entries) if _fits(entries) else entries
    return value


def _fits(values: Iterable[object]) -> bool:
    """Whether the values are single words and numbers."""
    return all(not isinstance(v, (Mapping, list)) and not (isinstance(v, str) and len(v.split()) > 2) for v in values)


class _Loader(yaml.SafeLoader):
    """SafeLoader with fewer surprises."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias and node is not None:
            reason = "aliases of this are not read; write it again in each place"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


def _refuse_tag(_: _Loader, node: yaml.Node) -> object:
    raise yaml.constructor.ConstructorError(None, None, f"tag {node.tag} is not read", node.start_mark)


_Loader.add_constructor(None, _refuse_tag)

_RESOLVERS = (
    ("bool", r"true|false|True|False|TRUE|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]{1,300}", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", "~nN"),
)
"""(tag, text, first characters) of plain words that are not strings, as in YAML 1.2."""

_Loader.yaml_implicit_resolvers = {}
for _tag, _text, _firsts in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_text})$"), [*_firsts, ""])
