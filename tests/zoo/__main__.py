"""`python -m meshwright.tests.zoo`: sweeps the zoo and prints what matches, falls back, is refused or fails, and why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.tests.zoo.jobs import load, pending_jobs, run_all
from meshwright.tests.zoo.models import absent, listed
from meshwright.tests.zoo.sweep import GOOD
from meshwright.tests.zoo.table import page, summary

MESHES = ("tp=2", "pp=2", "dp=2", "pp=2,tp=2")
EXPERT_MESHES = ("dp=2,ep=2",)


def command(
    archs: Annotated[str, typer.Option(help="comma-separated, or parts of names; all when left out")] = "",
    meshes: Annotated[str, typer.Option(help="separated by spaces; an ep mesh is for models with experts")] = " ".join(
        (*MESHES, *EXPERT_MESHES)
    ),
    jobs: Annotated[int, typer.Option(min=1, help="architectures at a time")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="AdamW steps")] = 3,
    folder: Annotated[Path, typer.Option("--results", help="where results are kept")] = Path("/tmp/meshwright-zoo"),
    again: Annotated[str, typer.Option(help="what to run that has a result: none, failed or all")] = "none",
    timeout: Annotated[float, typer.Option(help="seconds for an architecture")] = 900.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="all results in one file")] = None,
    docs: Annotated[Path | None, typer.Option(help="the page to write")] = None,
) -> None:
    """Compares many architectures on many meshes with one process."""
    if problem := absent():
        print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(2)
    every, experts = listed()
    wanted = [a for a in every if not archs or any(a == w or (":" not in w and w in a) for w in archs.split(","))]
    asked = {arch: [m for m in meshes.split() if "ep=" not in m or arch in experts] for arch in wanted}
    folder.mkdir(parents=True, exist_ok=True)
    run_all(pending_jobs(asked, folder, steps, again), jobs, timeout)
    reports = [load(folder, arch) for arch in wanted]
    if json_file is not None:
        json_file.write_text(json.dumps([r.to_json() for r in reports], indent=1) + "\n")
    if docs is not None:
        docs.write_text(page(reports, meshes.split(), "python -m meshwright.tests.zoo --docs docs/zoo.md", steps, len(every)))
    print("\n".join(summary(reports, meshes.split())))
    good = all(o.verdict in GOOD for r in reports for m, o in r.outcomes.items() if m in asked[r.arch])
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(command)
