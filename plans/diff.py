"""What differs between two plans, decision by decision.

Layouts and stages are compared by name, not by how the file writes them: two plans that split their patterns
differently are identical. Predictions are compared too; digests are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from meshwright.plans.document import PlanDocument
from meshwright.plans.layout import Layout
from meshwright.plans.patterns import compress, expand_all
from meshwright.plans.show_memory import regions_text
from meshwright.plans.units import format_bytes, format_seconds

KEYS = (
    "task",
    "attention",
    "seed",
    "hardware",
    "seq",
    "micro_batch",
    "global_batch",
    "precision",
    "reduce_dtype",
    "zero",
    "recompute",
    "schedule",
    "chunks",
    "stage_ranks",
    "actions",
    "sequence_parallel",
)
"""Keys whose values are compared as they are."""


@dataclass(frozen=True)
class Difference:
    """One line of the diff: `section` of the plan, what, and the values on both sides ("-" for none)."""

    section: str
    name: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new}"


def diff(old: PlanDocument, new: PlanDocument) -> tuple[Difference, ...]:
    """Differences in the plan's order; () when the plans are identical."""
    return (
        *_options(old, new),
        *_by_name("stages", _stages(old), _stages(new)),
        *_by_name("parameters", _parameters(old), _parameters(new)),
        *_results(old, new),
        *_by_name("recomputed", _recomputed(old), _recomputed(new)),
        *_notes(old, new),
        *_predicted(old, new),
    )


def diff_lines(differences: Iterable[Difference]) -> list[str]:
    """The differences under a heading per section."""
    lines: list[str] = []
    section = ""
    for difference in differences:
        if difference.section != section:
            section = difference.section
            lines.append(section)
        lines.append(f"  {difference}")
    return lines or ["identical"]


def _options(old: PlanDocument, new: PlanDocument) -> Iterable[Difference]:
    pairs = [
        ("model", old.model.source, new.model.source),
        ("model.parameters", f"{old.model.parameters:,}", f"{new.model.parameters:,}"),
        ("mesh", str(old.mesh), str(new.mesh)),
        ("memory_limit", _limit(old), _limit(new)),
        *((key, str(getattr(old, key)), str(getattr(new, key))) for key in KEYS),
    ]
    return (Difference("options", key, a, b) for key, a, b in pairs if a != b)


def _limit(document: PlanDocument) -> str:
    return "-" if document.memory_limit is None else format_bytes(document.memory_limit)


def _stages(document: PlanDocument) -> Mapping[str, str]:
    return {name: f"stage {stage}" for name, stage in document.stage_of.items()}


def _parameters(document: PlanDocument) -> Mapping[str, str]:
    return {name: str(layout) for name, layout in document.parameter_layouts.items()}


def _recomputed(document: PlanDocument) -> Mapping[str, str]:
    """What of each segment runs again."""
    return {name: regions_text(entry.regions) for entry in document.recomputed for name in expand_all(entry.segments)}


def _results(old: PlanDocument, new: PlanDocument) -> Iterable[Difference]:
    """Layouts of op results: one line per op and group of segments."""
    ops: dict[str, dict[str, tuple[str, str]]] = {}
    before, after = (_segment_results(document) for document in (old, new))
    for segment in _merged(before, after):
        layouts = before.get(segment, {}), after.get(segment, {})
        for op in _merged(*layouts):
            ops.setdefault(op, {})[segment] = (layouts[0].get(op, "-"), layouts[1].get(op, "-"))
    for op, changes in ops.items():
        for names, (a, b) in _grouped({segment: c for segment, c in changes.items() if c[0] != c[1]}):
            yield Difference("results", f"{names} {op}", a, b)


def _segment_results(document: PlanDocument) -> Mapping[str, Mapping[str, str]]:
    """{segment: {"module op": layout}}."""
    by_kind: dict[str, dict[str, str]] = {}
    for kind, declared in document.kinds.items():
        results = by_kind.setdefault(kind, {})
        for module, layouts in declared.layouts.items():
            if isinstance(layouts, Layout):
                results[module] = str(layouts)
            else:
                results.update({f"{module} {op}".strip(): str(layout) for op, layout in layouts.items()})
    return {segment: by_kind[kind] for segment, kind in document.kind_of.items()}


def _by_name(section: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterable[Difference]:
    changes = {n: (old.get(n, "-"), new.get(n, "-")) for n in _merged(old, new) if old.get(n) != new.get(n)}
    return (Difference(section, names, a, b) for names, (a, b) in _grouped(changes))


def _grouped(changes: Mapping[str, tuple[str, str]]) -> Iterable[tuple[str, tuple[str, str]]]:
    """Names with equal changes as patterns, in order."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, change in changes.items():
        groups.setdefault(change, []).append(name)
    for names in groups.values():
        for pattern in compress(names):
            yield pattern, changes[names[0]]


def _merged(old: Iterable[str], new: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*old, *new]))


def _notes(old: PlanDocument, new: PlanDocument) -> Iterable[Difference]:
    gone = (Difference("notes", note, "given", "-") for note in old.notes if note not in new.notes)
    return (*gone, *(Difference("notes", note, "-", "given") for note in new.notes if note not in old.notes))


def _predicted(old: PlanDocument, new: PlanDocument) -> Iterable[Difference]:
    rows = [
        _amount("step", old.predicted.step_s, new.predicted.step_s, format_seconds),
        _amount("tokens/s", old.predicted.tokens_per_s, new.predicted.tokens_per_s, "{:,.0f}".format),
        _amount("bubble", old.predicted.bubble, new.predicted.bubble, "{:.1%}".format),
        _amount("fullest rank", _fullest(old), _fullest(new), format_bytes),
    ]
    if len(old.stages) == len(new.stages):
        for number, (a, b) in enumerate(zip(old.stages, new.stages, strict=True)):
            times = a.forward_s + a.backward_s, b.forward_s + b.backward_s
            rows.append(_amount(f"stage {number} micro-batch", *times, format_seconds))
            rows.append(_amount(f"stage {number} memory", a.memory.total, b.memory.total, format_bytes))
    return (row for row in rows if row is not None)


def _fullest(document: PlanDocument) -> int:
    return max(stage.memory.total for stage in document.stages)


def _amount(name: str, old: float, new: float, show: Callable[[float], str]) -> Difference | None:
    """A predicted amount with its change in percent; None when both read alike."""
    texts = show(old), show(new)
    if texts[0] == texts[1]:
        return None
    change = f" ({new / old - 1:+.1%})" if old else ""
    return Difference("predicted", name, texts[0], texts[1] + change)
