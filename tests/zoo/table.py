"""The sweep as a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import torch
import transformers

from meshwright.tests.zoo.sweep import FAILS, FALLS_BACK, GOOD, MATCHES, PER_MICRO_BATCH, REFUSED, Outcome, Report

MARKS = {MATCHES: "matches", PER_MICRO_BATCH: "per micro-batch", FALLS_BACK: "falls back", REFUSED: "refused", FAILS: "**fails**"}
DECODERS = "causal:"
INTRODUCTION = """\
# The zoo

Every architecture below was built in a tiny form with random weights, captured once, planned for each mesh, and run on real ranks
(gloo, CPU) for {steps} AdamW steps. It is compared with the same model in one process: the first loss (2e-6), every gradient (1e-5
relative), the first gradient norm (5e-6) and the losses of all steps (2e-5).

Made on {date} by `{command}` with torch {torch} and transformers {transformers}.

- **matches**: all of it within the gates. With `~`: beyond a gate, but no further from an fp64 run than one process in fp32 is.
- **per micro-batch**: the model's loss mixes rows of a batch (batch-norm statistics, contrastive losses); it matches one process on the
  mean over the same micro-batches.
- **falls back**: matches, but tp leaves a part of the layers whole, its weights or its core (products of activations).
- **refused**: an error that says why. **fails**: anything else.
"""


def page(reports: Sequence[Report], meshes: Sequence[str], command: str, steps: int, num_listed: int) -> str:
    """docs/zoo.md; `num_listed` is the number of architectures in the zoo."""
    lines = [
        INTRODUCTION.format(
            date=datetime.now(UTC).date(), command=command, steps=steps, torch=torch.__version__, transformers=transformers.__version__
        ),
        "## Counts",
        "",
        f"{len(reports)} of the zoo's {num_listed} architectures were run.",
        "",
        *summary(reports, meshes),
        "",
        "## Results",
        "",
        f"| architecture | {' | '.join(meshes)} |",
        f"| --- |{' --- |' * len(meshes)}",
        *(f"| {r.arch} | {' | '.join(cell(r.outcomes.get(mesh)) for mesh in meshes)} |" for r in reports),
        "",
        *reasons(reports, meshes),
        *planless(reports),
    ]
    return "\n".join(lines) + "\n"


def summary(reports: Sequence[Report], meshes: Sequence[str]) -> list[str]:
    """Counts per mesh, and how many decoders are cut in all their parts."""
    verdicts = list(MARKS)
    lines = [f"| mesh | {' | '.join(verdicts)} | of |", f"| --- |{' ---: |' * (len(verdicts) + 1)}"]
    for mesh in meshes:
        found = [r.outcomes[mesh].verdict for r in reports if mesh in r.outcomes]
        lines.append(f"| {mesh} | {' | '.join(str(found.count(v)) for v in verdicts)} | {len(found)} |")
    decoders = [r for r in reports if r.arch.startswith(DECODERS) and "tp=2" in r.outcomes]
    cut = [r for r in decoders if r.outcomes["tp=2"].verdict in GOOD and not r.whole]
    if decoders:
        lines += ["", f"{len(cut)} of {len(decoders)} decoder LMs shard both attention and MLP at tp=2."]
    return lines


def cell(outcome: Outcome | None) -> str:
    return "" if outcome is None else MARKS[outcome.verdict] + (" ~" if outcome.rounding else "")


def reasons(reports: Sequence[Report], meshes: Sequence[str]) -> list[str]:
    """One line for each thing that is not a plain match; equal reasons of several meshes together."""
    lines = []
    for report in reports:
        by_reason: dict[str, list[str]] = {}
        for mesh in meshes:
            outcome = report.outcomes.get(mesh)
            if outcome is not None and outcome.verdict != MATCHES and outcome.reason:
                by_reason.setdefault(outcome.reason, []).append(f"`{mesh}`")
        lines += [f"- {report.arch}, {' '.join(found)}: {_plain(reason)}" for reason, found in by_reason.items()]
    return ["## What does not match or is not cut", "", *lines, ""] if lines else []


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("_", "\\_")


def planless(reports: Sequence[Report]) -> list[str]:
    """Models that transformers has no tensor-parallel plan for, and that are right on tp=2 here."""
    found = [r for r in reports if r.planless and "tp=2" in r.outcomes and r.outcomes["tp=2"].verdict in GOOD]
    if not found:
        return []
    cut = [r.arch for r in found if not r.whole]
    rest = [r.arch for r in found if r.whole]
    return [
        "## Models that transformers cannot parallelize at all",
        "",
        f"transformers has no tensor-parallel plan for these {len(found)} (`base_model_tp_plan` is empty). All are right on tp=2 here.",
        "",
        f"Cut in all their layers' parts ({len(cut)}): {', '.join(cut)}.",
        "",
        f"With a part whole on tp ({len(rest)}): {', '.join(rest)}." if rest else "",
    ]
