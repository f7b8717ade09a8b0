"""Planning time by layers, ranks and model: every plan compiled in a process of its own, from the start of Python to its directory.

    python -m meshwright.benchmarks.planning [--layers 32,64,126,256,1024] [--ranks 1024,16384] [--json FILE]

Rows are Llama-3-8B for tp=8 and for dp=2,tp=4; Llama-3.1-405B for pp=16,dp=128,tp=8; and the shapes of the latter with other numbers of
layers, on 1,024 and on 16,384 ranks. Hardware h100, sequences of 4096. Seconds are CPU seconds of the process, all of it; wall is beside
them, and longer on a machine that does other work. Capture is building the model, tracing it and simplifying the graph.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
import typer

from meshwright.driver import compile_plan
from meshwright.plans.document import Declaration
from meshwright.plans.mesh import Mesh

SHAPES: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
MESHES = {1024: "pp=16,dp=8,tp=8", 16384: "pp=16,dp=128,tp=8"}
PHASES = ("capturing the model", "choosing layouts", "cutting pipeline stages", "emitting programs")


@dataclass(frozen=True)
class Row:
    """One plan. `phases`: CPU seconds of PHASES, the last up to the written directory; imports come before them."""

    model: str
    layers: int
    mesh: str
    imports_s: float
    phases: tuple[float, ...]
    wall_s: float
    rss_bytes: int
    plan_bytes: int

    @property
    def cpu_s(self) -> float:
        return self.imports_s + sum(self.phases)


def config(model: str, layers: int) -> dict[str, object]:
    """config.json of a Llama of these shapes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **SHAPES[model],
        "num_hidden_layers": layers,
    }


def measure(model: str, layers: int, mesh: str) -> Row:
    """Compiles one plan in this process, which should have done nothing else."""
    torch.set_num_threads(1)
    marks = [time.process_time()]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "config.json"
        source.write_text(json.dumps(config(model, layers)))
        sizes = Mesh.parse(mesh)
        declaration = Declaration(mesh=sizes, hardware="h100", seq=4096, global_batch=4 * sizes.pp * sizes.dp)

        def tell(phase: str) -> None:
            if phase in PHASES[1:]:
                marks.append(time.process_time())

        compiled = compile_plan(str(source), declaration=declaration, progress=tell)
        compiled.save(Path(folder) / "plan")
        marks.append(time.process_time())
        plan_bytes = (Path(folder) / "plan" / "plan.yaml").stat().st_size
    phases = tuple(after - before for before, after in pairwise(marks))
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Row(model, layers, mesh, marks[0], phases, 0.0, rss, plan_bytes)


def measured_apart(model: str, layers: int, mesh: str) -> Row:
    """The same in a new process, with its wall time."""
    start = time.monotonic()
    command = [sys.executable, "-m", "meshwright.benchmarks.planning", "--one", f"{model} {layers} {mesh}"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(run.stdout.splitlines()[-1])
    return Row(**{**found, "phases": tuple(found["phases"]), "wall_s": time.monotonic() - start})


def line(row: Row) -> str:
    """A row of the table in docs/planning.md."""
    capture, layouts, stages, programs = row.phases
    cells = (
        f"{row.model}, {row.layers} layers", row.mesh, f"{row.imports_s:.1f}", f"{capture:.1f}", f"{layouts:.1f}", f"{stages:.1f}",
        f"{programs:.1f}", f"**{row.cpu_s:.1f}**", f"{row.wall_s:.0f}", f"{row.rss_bytes / 2**20:.0f} MiB", f"{row.plan_bytes:,}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def command(
    layers: Annotated[str, typer.Option(help="of 405b shapes, comma-separated")] = "32,64,126,256,1024",
    ranks: Annotated[str, typer.Option(help="1024, 16384")] = "1024,16384",
    json_file: Annotated[Path | None, typer.Option("--json", help="all rows in one file")] = None,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measures and prints the table."""
    if one:
        model, number, mesh = one.split()
        print(json.dumps(asdict(measure(model, int(number), mesh))))
        return
    wanted = [("8b", 32, "tp=8"), ("8b", 32, "dp=2,tp=4")]
    wanted += [("405b", int(number), MESHES[int(rank)]) for rank in ranks.split(",") for number in layers.split(",")]
    print("| model | mesh | imports | capture | layouts | stages | programs | CPU s | wall s | peak RSS | plan.yaml |")
    print("| --- " * 11 + "|")
    rows = []
    for case in wanted:
        rows.append(measured_apart(*case))
        print(line(rows[-1]), flush=True)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(command)
