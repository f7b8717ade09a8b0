"""What commands load when they need it: torch, transformers and the solver take seconds that `show` and `--help` need not wait for.

Each part is a Protocol of what commands call of a module, and a function that imports it. Tests put others in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from meshwright.plans.document import Declaration, PlanDocument


class Compiled(Protocol):
    """What the driver makes of a model."""

    @property
    def document(self) -> PlanDocument: ...
    @property
    def search(self) -> Sequence[str]: ...
    def save(self, directory: Path) -> object: ...
    def summary(self) -> str: ...


class Report(Protocol):
    """What a dry run found."""

    def lines(self) -> Sequence[str]: ...


class Reasons(Protocol):
    """Why a decision is as it is."""

    def lines(self) -> Sequence[str]: ...
    def facts(self) -> Mapping[str, object]: ...


class Explain(Protocol):
    """The part of meshwright.explain that commands call."""

    def explain_plan(self, plan_dir: Path, name: str, progress: Callable[[str], None]) -> Reasons: ...


class Profiling(Protocol):
    """The part of meshwright.profiling that commands call."""

    def profile(self, output: Path, ranks: int, progress: Callable[[str], None]) -> Mapping[str, object]: ...


class Driver(Protocol):
    """The part of meshwright.driver that commands call."""

    def compile_plan(self, model: str, *, declaration: Declaration, progress: Callable[[str], None]) -> Compiled: ...
    def check_pipeline(self, document: PlanDocument, programs: Mapping[str, str]) -> object: ...


def load_driver() -> Driver:
    """The driver, with torch, transformers and the solver: seconds that `show` and `--help` need not wait for."""
    return cast(Driver, import_module("meshwright.driver"))


class DryRuns(Protocol):
    """What meshwright.dry has."""

    def dry_run_rank(self, plan_dir: Path, rank: int) -> Sequence[Report]: ...


def load_dry_runs() -> DryRuns:
    """Dry runs, with torch."""
    return cast(DryRuns, import_module("meshwright.dry"))


def load_search() -> Driver:
    """The search of --devices, which makes a plan as the driver does."""
    return cast(Driver, import_module("meshwright.searching"))


class Exporter(Protocol):
    """What meshwright.export has."""

    def export(self, checkpoint: Path, target: Path) -> int: ...


def load_export() -> Exporter:
    """The export, with torch."""
    return cast(Exporter, import_module("meshwright.export"))


def load_explain() -> Explain:
    """Explanations, with torch and the solver."""
    return cast(Explain, import_module("meshwright.explain"))


def load_profiling() -> Profiling:
    """Measuring, with torch."""
    return cast(Profiling, import_module("meshwright.profiling"))
