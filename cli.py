"""The command line: `meshwright compile | show | explain | profile | diff | check`.

Exit status: 0 done; 1 ran and found a difference or a failed check; 2 bad input. An error is one line on stderr that
starts with `error:` (after its traceback, with --debug). Results go to stdout, progress to stderr and only to a terminal.
Options of `compile` are keys of the plan: they are laid over the file of --from, and what they say is checked with it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from typer.exceptions import TyperException

from meshwright.late import (
    load_driver,
    load_dry_runs,
    load_explain,
    load_export,
    load_profiling,
    load_search,
)
from meshwright.plans.diff import diff as compare
from meshwright.plans.diff import diff_lines
from meshwright.plans.document import Declaration, PlanDocument
from meshwright.plans.errors import InputError
from meshwright.plans.programs import program_name, stage_parameters
from meshwright.plans.reading import EXPECTED, read_declaration
from meshwright.plans.save import PLAN_FILE, check_free, load_checked, load_plan, load_program, load_programs, load_signature
from meshwright.plans.show import WIDTH, plain, show_layer, show_plan, show_rank
from meshwright.plans.show_memory import show_memory
from meshwright.plans.yaml_io import load
from meshwright.runtime.schedules import plan_order
from meshwright.runtime.soundness import UnsoundError

MODEL_FORMS = "a model directory, a config.json, a .gguf file, a hub id or package.module:factory"
DEBUG = "--debug"
BAD_INPUT = 2
DIFFERENT = 1
INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="An unmodified PyTorch Transformer in; a readable parallelization plan and per-rank programs out.",
)


class CheckFailedError(Exception):
    """A check that ran and failed."""


PlanDir = Annotated[Path, typer.Argument(metavar="PLAN_DIR", help="the directory that compile wrote")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Debug = Annotated[bool, typer.Option(DEBUG, help="show the traceback of an error")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and gives the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(words, prog_name="meshwright", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except (InputError, TyperException, CheckFailedError, UnsoundError) as error:
        if DEBUG in words:
            traceback.print_exc()
        message = error.format_message() if isinstance(error, TyperException) else str(error)
        grid = message if isinstance(error, (CheckFailedError, UnsoundError)) else " ".join(message.split())
        print("error:", grid or "see meshwright --help", file=sys.stderr)
        return DIFFERENT if isinstance(error, CheckFailedError) else BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; stdout is flushed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DIFFERENT


def _help(key: str) -> str:
    """What a key holds, without its number format."""
    return EXPECTED[key].partition("more: ")[2] or EXPECTED[key]


@app.command("compile")
def compile_command(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="PLAN_DIR", help="where the plan goes")],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_FORMS)] = None,
    from_file: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="a plan, or any subset of its keys, to compile from")
    ] = None,
    mesh: Annotated[str | None, typer.Option(help="sizes by axis such as pp=2,dp=2,tp=2")] = None,
    devices: Annotated[str | None, typer.Option(metavar="N", help=_help("devices"))] = None,
    hardware: Annotated[str | None, typer.Option(help=_help("hardware"))] = None,
    memory_limit: Annotated[str | None, typer.Option(help="an amount such as 40GiB")] = None,
    seq: Annotated[str | None, typer.Option(metavar="N", help=_help("seq"))] = None,
    micro_batch: Annotated[str | None, typer.Option(metavar="N", help=_help("micro_batch"))] = None,
    global_batch: Annotated[str | None, typer.Option(metavar="N", help=_help("global_batch"))] = None,
    precision: Annotated[str | None, typer.Option(help=_help("precision"))] = None,
    reduce_dtype: Annotated[str | None, typer.Option(help=_help("reduce_dtype"))] = None,
    zero: Annotated[str | None, typer.Option(metavar="N", help=_help("zero"))] = None,
    recompute: Annotated[str | None, typer.Option(help=_help("recompute"))] = None,
    schedule: Annotated[str | None, typer.Option(help=_help("schedule"))] = None,
    chunks: Annotated[str | None, typer.Option(metavar="N", help=_help("chunks"))] = None,
    sequence_parallel: Annotated[str | None, typer.Option(help=_help("sequence_parallel"))] = None,
    task: Annotated[str | None, typer.Option(help=_help("task"))] = None,
    attention: Annotated[str | None, typer.Option(help=_help("attention"))] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help=_help("seed"))] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Capture a model, choose how it is parallelised, and write the plan and its programs."""
    options: dict[str, object] = {
        "model": model,
        "mesh": mesh,
        "devices": _number(devices),
        "hardware": hardware,
        "memory_limit": memory_limit,
        "seq": _number(seq),
        "micro_batch": _number(micro_batch),
        "global_batch": _number(global_batch),
        "precision": precision,
        "reduce_dtype": reduce_dtype,
        "zero": _number(zero),
        "recompute": recompute,
        "schedule": schedule,
        "chunks": _number(chunks),
        "sequence_parallel": sequence_parallel,
        "task": task,
        "attention": attention,
        "seed": _number(seed),
    }
    declaration = _declaration(from_file, {key: value for key, value in options.items() if value is not None})
    if declaration.model is None:
        raise InputError("MODEL: missing; expected " + MODEL_FORMS)
    check_free(output)
    with _progress() as progress:
        progress("loading torch")
        planner = load_search() if declaration.devices is not None else load_driver()
        plan = planner.compile_plan(declaration.model.source, declaration=declaration, progress=progress)
        plan.save(output)
    if as_json:
        print(json.dumps({"plan": str(output), **_facts(plan.document), **({"search": plan.search} if plan.search else {})}))
    else:
        print(plan.summary())
        print(f"written to {output}")


@app.command("show")
def show_command(
    plan_dir: PlanDir,
    layer: Annotated[
        str | None, typer.Option(metavar="K", help="layouts inside layer K, or a segment such as embedding")
    ] = None,
    rank: Annotated[str | None, typer.Option(metavar="R", help="what rank R holds and whom it talks to")] = None,
    programs: Annotated[bool, typer.Option("--programs", help="print the emitted programs")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="bytes by stage, kind of tensor and layer, and what is recomputed")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a plan: stages, schedule, layouts, predictions."""
    document = load_plan(plan_dir)
    if as_json:
        print(json.dumps({"plan": str(plan_dir), **document.model_dump(mode="json", by_alias=True)}))
        return
    parts: list[RenderableType] = []
    if layer is not None:
        parts.append(show_layer(document, layer, load_signature(plan_dir)))
    if rank is not None:
        signature = load_checked(plan_dir)[1]
        parts.append(show_rank(document, _rank(rank, document), signature, _stage_parameters(plan_dir, document)))
    if memory:
        parts.append(show_memory(document, load_checked(plan_dir)[1]))
    if not parts and not programs:
        parts.append(show_plan(document, _schedule(document)))
    for part in parts:
        _print(part)
    if programs:
        for name, text in load_programs(plan_dir, document).items():
            print(f"# {plan_dir / 'programs' / name}\n{text}")


@app.command("explain")
def explain_command(
    plan_dir: PlanDir,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a parameter, an op, a layer or other segment, or stage_K")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Why something is laid out so: its cost split, and what every alternative would cost or why it is illegal."""
    load_checked(plan_dir)
    with _progress() as progress:
        progress("loading torch")
        found = load_explain().explain_plan(plan_dir, name, progress)
    print(json.dumps({"plan": str(plan_dir), **found.facts()}) if as_json else "\n".join(found.lines()))


@app.command("profile")
def profile_command(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="where the hardware file goes")],
    ranks: Annotated[int, typer.Option(min=1, help="ranks to measure collectives on; torchrun's own where it started this")] = 2,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine: matmuls, memory, overhead of an op, collectives; writes a file for --hardware."""
    with _progress() as progress:
        progress("loading torch")
        data = load_profiling().profile(output, ranks, progress)
    if data:
        print(json.dumps(data) if as_json else f"written to {output}")


@app.command("diff")
def diff_command(
    plan_a: Annotated[Path, typer.Argument(metavar="PLAN_A", help="the old plan's directory")],
    plan_b: Annotated[Path, typer.Argument(metavar="PLAN_B", help="the new plan's directory")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare two plans decision by decision; exit status 1 when they differ."""
    differences = compare(load_plan(plan_a), load_plan(plan_b))
    if as_json:
        rows = [{"section": d.section, "name": d.name, "old": d.old, "new": d.new} for d in differences]
        print(json.dumps({"identical": not rows, "differences": rows}))
    else:
        print("\n".join(diff_lines(differences)))
    if differences:
        raise typer.Exit(DIFFERENT)


@app.command("check")
def check_command(
    plan_dir: PlanDir,
    rank: Annotated[str | None, typer.Option(metavar="R", help="dry-run this rank; default: one of each stage")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Validate a plan and its programs, prove that no rank waits for ever, and run programs on fake tensors, for any number of ranks."""
    document, _ = load_checked(plan_dir)
    programs = load_programs(plan_dir, document)
    world_size = document.mesh.world_size
    ranks = [document.mesh.rank(pp=stage) for stage in range(document.mesh.pp)]
    if rank is not None:
        ranks = [_rank(rank, document)]
    found: dict[int, tuple[str, ...]] = {}
    _check_pipeline(document, programs)
    with _progress() as progress:
        for number in ranks:
            progress(f"rank {number} of {world_size}")
            found[number] = _dry_run(plan_dir, number)
    if as_json:
        print(json.dumps({"plan": str(plan_dir), "ranks": found}))
        return
    print(f"{plan_dir}: plan, {len(document.programs)} programs and digests are in order; no rank can wait for ever")
    for lines in found.values():
        print("\n".join(lines))


@app.command("export")
def export_command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT_DIR", help="what train --save or Engine.save wrote")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="HF_DIR", help="where the model goes")],
    debug: Debug = False,
) -> None:
    """Write a checkpoint as a directory that transformers loads."""
    with _progress() as progress:
        progress("putting tensors together")
        parameters = load_export().export(checkpoint, output)
    print(f"{output}: {parameters:,} parameters of {checkpoint}")


def _number(text: str | None) -> int | str | None:
    """The number that a text is; other texts are left for the plan's schema to refuse."""
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,18}", text) else text


def _rank(text: str, document: PlanDocument) -> int:
    """The rank that --rank names."""
    number = _number(text)
    if not isinstance(number, int) or not 0 <= number < document.mesh.world_size:
        raise InputError(f"--rank: found {text}, expected 0 to {document.mesh.world_size - 1} on the mesh {document.mesh}")
    return number


def _dry_run(plan_dir: Path, rank: int) -> tuple[str, ...]:
    """What a dry run found; one that fails is a failed check, not bad input."""
    try:
        return tuple(line for report in load_dry_runs().dry_run_rank(plan_dir, rank) for line in report.lines())
    except InputError as error:
        raise CheckFailedError(str(error)) from error


def _check_pipeline(document: PlanDocument, programs: Mapping[str, str]) -> None:
    """A schedule that cannot run is a failed check; its error has the grid of actions."""
    try:
        load_driver().check_pipeline(document, programs)
    except UnsoundError as error:
        raise CheckFailedError(str(error)) from error


def _declaration(file: Path | None, options: Mapping[str, object]) -> Declaration:
    """Options over the file of --from, which may be a plan directory."""
    if file is None:
        return read_declaration({}, options, "compile")
    path = file / PLAN_FILE if file.is_dir() else file
    return read_declaration(load(path), options, str(path))


def _facts(document: PlanDocument) -> dict[str, object]:
    """The plan without its layouts."""
    data = document.model_dump(mode="json", by_alias=True, exclude={"parameters", "kinds"})
    return {**data, "world_size": document.mesh.world_size, "micro_batches": document.num_micro_batches}


def _stage_parameters(plan_dir: Path, document: PlanDocument) -> dict[int, tuple[str, ...]]:
    """Names of the parameters that each stage's program holds."""
    names = {stage: program_name(stage) for stage in range(len(document.stages))}
    return {
        stage: stage_parameters(load_program(plan_dir, document, name), plan_dir / "programs" / name)
        for stage, name in names.items()
    }


def _schedule(document: PlanDocument) -> list[list[str]]:
    """Each pipeline rank's actions as text; none when nobody could read so many."""
    if document.num_micro_batches * document.mesh.pp > WIDTH:
        return [[]]
    return [list(map(str, rank)) for rank in plan_order(document, document.num_micro_batches)]


def _print(renderable: RenderableType) -> None:
    """Colours on a terminal, plain text elsewhere."""
    if sys.stdout.isatty():
        Console(markup=False, highlight=False).print(renderable)
    else:
        print(plain(renderable))


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A function that tells what goes on, on a terminal's stderr; silent elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(text)
