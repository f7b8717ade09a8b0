"""`python -m meshwright.tests.zoo.copies`: that copying alike layers changes no graph, for every architecture of the zoo.

Each tiny model, deeper than in the sweep where it can be, is captured with and without copied layers (compiler/capture/replicas.py).
The two graphs must be equal, whole.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections import Counter
from typing import Annotated

import torch
import typer

from meshwright.compiler.capture import simplify
from meshwright.compiler.capture.copies import Copies
from meshwright.compiler.capture.simplify import RandomOpsError
from meshwright.compiler.capture.source import FAILURES, quiet
from meshwright.compiler.capture.trace import Traced, trace
from meshwright.compiler.graph import Graph
from meshwright.plans.errors import InputError
from meshwright.tests.zoo.models import Tiny, absent, listed, tiny, zoo

DEPTH = 8
DEPTHS = (
    "num_hidden_layers n_layer n_layers num_layers num_blocks depth encoder_layers decoder_layers num_encoder_layers num_decoder_layers"
)


def deep(arch: str) -> Tiny:
    """A tiny model of DEPTH layers; as deep as in the sweep where its configuration does not take that."""
    module = zoo()
    functions = (module.shrink_config, module.shrunk_kwargs)
    before = dict(module.SIZES), [f.__defaults__ for f in functions]
    module.SIZES.update(dict.fromkeys(DEPTHS.split(), DEPTH))
    for function in functions:
        function.__defaults__ = (*function.__defaults__[:-1], DEPTH)
    try:
        return tiny(arch)
    except FAILURES:
        pass
    finally:
        module.SIZES.clear()
        module.SIZES.update(before[0])
        for function, defaults in zip(functions, before[1], strict=True):
            function.__defaults__ = defaults
    return tiny(arch)


def captured(model: Tiny, replicate: bool) -> tuple[Graph, int, float]:
    """The graph, how many layers were copied, and CPU seconds of the trace."""
    copied = [0]
    original = Copies.copy

    def copy(self: Copies, *args: object) -> object:
        copied[0] += 1
        return original(self, *args)  # type: ignore[arg-type]

    Copies.copy = copy  # type: ignore[assignment, method-assign]
    start = time.process_time()
    try:
        traced = trace(model.module, model.example, replicate=replicate)
    finally:
        Copies.copy = original  # type: ignore[method-assign]
    return settled(traced, model, replicate), copied[0], time.process_time() - start


def settled(traced: Traced, model: Tiny, replicate: bool) -> Graph:
    """The simplified graph, of the model without noise where it has some."""
    try:
        return simplify(traced)
    except RandomOpsError as error:
        return simplify(trace(model.module, model.example, error.modules, replicate))


def compare(arch: str) -> str:
    """One word and what there is to say."""
    model = deep(arch)
    with quiet():
        try:
            whole, _, whole_s = captured(model, False)
        except InputError as error:
            return f"refused    {str(error)[:80]}"
        found, num_copies, found_s = captured(model, True)
    verdict = "DIFFERS" if found != whole else "equal" if num_copies else "no copies"
    return f"{verdict:10} {num_copies:3} copies  {len(whole.ops):5} ops  {found_s:6.2f} s instead of {whole_s:.2f} s"


def command(archs: Annotated[str, typer.Option(help="comma-separated; all when left out")] = "") -> None:
    """Compares."""
    if problem := absent():
        print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(2)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    for arch in archs.split(",") if archs else listed()[0]:
        line = compare(arch)
        counts[line.split("  ")[0].strip()] += 1
        print(f"{arch:32} {line}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    raise typer.Exit(1 if "DIFFERS" in counts else 0)


if __name__ == "__main__":
    typer.run(command)
