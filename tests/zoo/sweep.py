"""One architecture on several meshes: captured once, planned for each mesh, run on real ranks, compared with one process."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from meshwright.compiler.capture import Captured, capture
from meshwright.driver import CompiledPlan, plan_captured
from meshwright.plans.errors import InputError
from meshwright.plans.reading import read_declaration
from meshwright.plans.signature import Signature
from meshwright.setting import settle
from meshwright.tests.parity import Trace
from meshwright.tests.ranks import run_ranks
from meshwright.tests.zoo.models import MICRO_BATCH, ROWS, Tiny, batches, chunks_of, tiny
from meshwright.tests.zoo.ranks import run_engine
from meshwright.tests.zoo.sharding import parts_of
from meshwright.tests.zoo.single import distance, is_rounding, run_single

MATCHES, PER_MICRO_BATCH, FALLS_BACK, REFUSED, FAILS = "matches", "matches per micro-batch", "falls back", "refused", "fails"
GOOD = (MATCHES, PER_MICRO_BATCH, FALLS_BACK)
RANKS_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Outcome:
    """One architecture on one mesh. `seconds` are of planning and of running; `rounding`: beyond a gate, as fp32 itself is."""

    verdict: str
    reason: str = ""
    plan_s: float = 0.0
    run_s: float = 0.0
    rounding: bool = False


@dataclass
class Report:
    """One architecture. `whole` are parts of layers that tp does not cut; `planless`: transformers has no tensor-parallel plan."""

    arch: str
    parameters: int = 0
    capture_s: float = 0.0
    num_ops: int = 0
    planless: bool = False
    notes: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, object]) -> Report:
        outcomes = content.pop("outcomes")
        assert isinstance(outcomes, dict)
        report = cls(**content)  # type: ignore[arg-type]
        report.outcomes = {mesh: Outcome(**fields) for mesh, fields in outcomes.items()}
        return report


@dataclass(frozen=True)
class Subject:
    """A captured model with the data it is tried on."""

    model: Tiny
    captured: Captured
    steps: int
    singles: dict[tuple[str, int, torch.dtype], Trace] = field(default_factory=dict)

    def data(self, kind: str) -> list[dict[str, object]]:
        """Global batches. Labels are uneven where whole batches are compared: else chunks would weigh as much as they have labels."""
        return batches(self.model, self.steps, uneven=kind == "whole")

    def single(self, kind: str, dp: int, dtype: torch.dtype = torch.float32) -> Trace:
        """What one process makes of `data(kind)` in chunks of a kind (models.chunks_of)."""
        key = kind, 1 if kind == "whole" else dp, dtype
        if key not in self.singles:
            self.singles[key] = run_single(self.model.module, self.data(kind), chunks_of(kind, dp), dtype)
        return self.singles[key]


def sweep_arch(arch: str, meshes: list[str], steps: int, tell: Callable[[Report], None]) -> Report:
    """All meshes of one architecture; `tell` is called after each."""
    report = Report(arch)
    start = time.monotonic()
    try:
        model = tiny(arch)
        report.parameters = sum(p.numel() for p in model.module.parameters())
        report.planless = lacks_plan(model.module)
        captured = capture(model.module, model.example, seq=model.seq, micro_batch=MICRO_BATCH)
    except BaseException as error:  # noqa: BLE001 - whatever a model does goes into the report
        report.outcomes = dict.fromkeys(meshes, refusal("capture: ", error))
        tell(report)
        return report
    report.capture_s = round(time.monotonic() - start, 1)
    report.num_ops = len(captured.graph.ops)
    subject = Subject(model, captured, steps)
    for mesh in meshes:
        report.outcomes[mesh] = try_mesh(subject, mesh, report)
        tell(report)
    return report


def lacks_plan(module: torch.nn.Module) -> bool:
    """Whether transformers has no tensor-parallel plan for the layers of this model."""
    config = next((m.config for m in module.modules() if isinstance(m, PreTrainedModel)), None)
    configs = [config, config.get_text_config()] if config is not None else []
    return not any(getattr(c, "base_model_tp_plan", None) for c in configs)


def refusal(where: str, error: BaseException) -> Outcome:
    """A failure in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    if isinstance(error, InputError):
        return Outcome(REFUSED, where + lines[0])
    return Outcome(FAILS, f"{where}{type(error).__name__}: {lines[0]}")


def try_mesh(subject: Subject, mesh: str, report: Report) -> Outcome:
    """Plans, runs, compares."""
    start = time.monotonic()
    try:
        compiled = plan_for(subject, mesh)
    except BaseException as error:  # noqa: BLE001
        return replace(refusal("plan: ", error), plan_s=round(time.monotonic() - start, 1))
    plan_s = round(time.monotonic() - start, 1)
    if mesh == "tp=2":
        report.notes = list(compiled.document.notes)
        parts = parts_of(subject.captured.graph, compiled.document)
        report.whole = {name: part.falls_back for name, part in parts.items() if part.falls_back}
    start = time.monotonic()
    try:
        outcome = compare(subject, compiled)
    except BaseException as error:  # noqa: BLE001
        outcome = refusal("run: ", error) if not isinstance(error, AssertionError) else Outcome(FAILS, "run: " + last_error(str(error)))
    if outcome.verdict == MATCHES and "tp=2" in mesh and report.whole:
        reason = "; ".join(f"{name} ({what})" for name, what in report.whole.items())
        outcome = replace(outcome, verdict=FALLS_BACK, reason=f"{reason} whole on tp. {outcome.reason}".strip())
    return replace(outcome, plan_s=plan_s, run_s=round(time.monotonic() - start, 1))


def plan_for(subject: Subject, mesh: str) -> CompiledPlan:
    """The plan of a mesh, with the model's weights beside it."""
    options = {"mesh": mesh, "seq": subject.model.seq, "micro_batch": MICRO_BATCH, "global_batch": ROWS}
    compiled = plan_captured(subject.captured, settle(read_declaration({}, options, "zoo")), lambda text: None)
    signature = Signature.model_validate(subject.captured.signature)
    named = dict(subject.model.module.named_parameters(remove_duplicate=False))
    return replace(compiled, weights={path: named[path] for path in (*signature.parameters, *signature.unused)})


def compare(subject: Subject, compiled: CompiledPlan) -> Outcome:
    """Runs the ranks, and compares with one process on whole batches; where that differs, on the mean over the micro-batches."""
    dp = compiled.document.mesh.dp
    reason = ""
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        compiled.save(Path(folder) / "plan")
        for kinds in (("whole",), ("ranks", "statistics")):
            found = run(compiled, str(Path(folder) / "plan"), subject.data(kinds[0]))
            if isinstance(found, str):
                return Outcome(FAILS, found)
            for kind in kinds[:1] if dp == 1 else kinds:
                apart = distance(found, subject.single(kind, dp))
                verdict = MATCHES if kind == "whole" else PER_MICRO_BATCH
                if apart.ok:
                    return Outcome(verdict, per_micro_batch_note(compiled) if verdict == PER_MICRO_BATCH else "")
                reason = reason or str(apart)
                if within_rounding(subject, found, kind, dp):
                    return Outcome(verdict, f"fp32 rounding: {apart}", rounding=True)
    return Outcome(FAILS, reason)


def run(compiled: CompiledPlan, plan_dir: str, data: list[dict[str, object]]) -> Trace | str:
    """What the ranks compute, or what is wrong with it."""
    ranks = run_ranks(compiled.document.mesh.world_size, run_engine, plan_dir, data, timeout=RANKS_TIMEOUT_S)
    found = [Trace(**fields) for fields in ranks]  # type: ignore[arg-type]
    if any(other.losses != found[0].losses or other.norms != found[0].norms for other in found[1:]):
        return "ranks report different metrics"
    return found[0]


def within_rounding(subject: Subject, found: Trace, kind: str, dp: int) -> bool:
    """Whether the ranks are about as far from fp64 as one process is. Not known of a model whose code is for fp32 alone."""
    try:
        exact = subject.single(kind, dp, torch.float64)
    except (RuntimeError, TypeError, ValueError):
        return False
    return is_rounding(found, subject.single(kind, dp), exact)


def per_micro_batch_note(compiled: CompiledPlan) -> str:
    """What the plan itself says about rows that meet."""
    signs = ("averaged over micro-batches", "may mix rows")
    return next((note for note in compiled.document.notes if any(sign in note for sign in signs)), "the plan has no note of it")


def last_error(text: str) -> str:
    """The line that says what went wrong in the output of ranks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line.split(":")[0] and "peer" not in line]
    return (telling or lines or [""])[0][:300]


def save_report(report: Report, path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report.to_json(), indent=1))
    partial.rename(path)
