"""What a plan's keys must satisfy together; each check raises Conflict with the path of the key at fault.

    check_batch        global_batch = dp * micro_batch * a whole number of micro-batches
    check_versions     pipedream-2bw has no shards of parameters, gradients or states
    check_stages       one stage per pp rank and chunk; no segment in two stages; layers in ascending order
    check_placement    every pp rank has as many stages as there are chunks
    check_segments     the stages' segments are the kinds' segments, each once
    check_recomputed   nothing is under `none`, whole segments alone are under `full`; no segment twice
    check_parameters   no name twice; no parameter partial, or laid out over pp
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from meshwright.plans.layout import Layout
from meshwright.plans.mesh import Mesh
from meshwright.plans.patterns import compress, expand_all, form


class Conflict(ValueError):
    """`path` is where in the plan ("stages[1].layers"), the message what is wrong there."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def check_batch(global_batch: int, micro_batch: int, mesh: Mesh) -> None:
    """The global batch divides into micro-batches."""
    share = mesh.dp * micro_batch
    if global_batch % share:
        raise Conflict(
            "global_batch",
            f"found {global_batch}, expected a multiple of dp * micro_batch = {mesh.dp} * {micro_batch} = {share}",
        )


def check_versions(schedule: str, zero: int) -> None:
    """A schedule with two versions of the weights keeps them whole."""
    if schedule == "pipedream-2bw" and zero:
        raise Conflict("zero", f"found {zero}, pipedream-2bw keeps two whole versions of the weights; use zero 0, or another schedule")


def check_stages(layers: Sequence[Sequence[str]], mesh: Mesh | None, chunks: int) -> None:
    """`layers` are the segment patterns of each stage."""
    if mesh is not None and len(layers) != mesh.pp * chunks:
        raise Conflict(
            "stages",
            f"found a list of {len(layers)}, expected pp * chunks = {mesh.pp} * {chunks} = {mesh.pp * chunks} stages; "
            "leave stages out to have them chosen",
        )
    stage_of: dict[str, int] = {}
    for stage, patterns in enumerate(layers):
        for name in expand_at(f"stages[{stage}].layers", patterns):
            if name in stage_of:
                raise Conflict(f"stages[{stage}].layers", f"{name} is in stages[{stage_of[name]}] already")
            stage_of[name] = stage
    _check_order(stage_of)


def check_placement(stage_ranks: Sequence[int], mesh: Mesh, chunks: int) -> None:
    """`stage_ranks` is the pp coordinate of each stage."""
    wanted = sorted(list(range(mesh.pp)) * chunks)
    if sorted(stage_ranks) != wanted:
        found = " ".join(map(str, stage_ranks))
        raise Conflict("stage_ranks", f"found {found}, expected each pp rank 0 to {mesh.pp - 1} {chunks} times, in the stages' order")


def check_segments(layers: Sequence[Sequence[str]], kinds: Mapping[str, Sequence[str]]) -> None:
    """`kinds` are the segment patterns of each kind."""
    kind_of: dict[str, str] = {}
    for kind, patterns in kinds.items():
        for name in expand_at(f"kinds.{kind}.segments", patterns):
            if name in kind_of:
                raise Conflict(f"kinds.{kind}.segments", f"{name} is of kind {kind_of[name]} already")
            kind_of[name] = kind
    placed: set[str] = set()
    for stage, patterns in enumerate(layers):
        names = expand_all(patterns)
        if unknown := [name for name in names if name not in kind_of]:
            raise Conflict(f"stages[{stage}].layers", f"{_some(unknown)} is no segment of the kinds below")
        placed.update(names)
    if missing := [name for name in kind_of if name not in placed]:
        raise Conflict("stages", f"{_some(missing)} is in no stage")


def check_parameters(layouts: Mapping[str, Layout]) -> None:
    """`layouts` by pattern."""
    pattern_of: dict[str, str] = {}
    for pattern, layout in layouts.items():
        path = f"parameters.{pattern}"
        for name in expand_at(path, [pattern]):
            if name in pattern_of:
                raise Conflict(path, f"{name} is laid out already, by {pattern_of[name]}")
            pattern_of[name] = pattern
        for axis, type_ in layout.types:
            if type_.kind == "P" or axis == "pp":
                raise Conflict(path, f"found {layout}, expected S, I or R, on axes other than pp")
            if type_.kind == "R" and axis == "ep":
                raise Conflict(path, f"found {layout}, expected S or nothing on ep: its ranks are part of dp, which sums the gradients")


def check_recomputed(mode: str, entries: Sequence[tuple[Sequence[str], bool]]) -> None:
    """`entries`: segment patterns, and whether all of them runs again."""
    seen: set[str] = set()
    for number, (patterns, whole) in enumerate(entries):
        if mode == "none" or (mode == "full" and not whole):
            raise Conflict("recomputed", f"recompute is {mode}, expected selective or auto for this list; or leave recomputed out")
        for name in expand_at(f"recomputed[{number}].segments", patterns):
            if name in seen:
                raise Conflict(f"recomputed[{number}].segments", f"{name} is given twice; give all its regions in one place")
            seen.add(name)


def expand_at(path: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Names of patterns; what is wrong with a pattern is a Conflict at `path`."""
    try:
        return expand_all(patterns)
    except ValueError as error:
        raise Conflict(path, str(error)) from None


def _check_order(stage_of: Mapping[str, int]) -> None:
    """Segments that differ in indices only are spread over the stages in ascending order."""
    alike: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in stage_of:
        template, indices = form(name)
        alike.setdefault(template, []).append((indices, name))
    for members in alike.values():
        names = [name for _, name in sorted(members)]
        for before, after in pairwise(names):
            if stage_of[before] > stage_of[after]:
                path = f"stages[{stage_of[after]}].layers"
                raise Conflict(path, f"{after} comes before {before} of stages[{stage_of[before]}]")


def _some(names: Sequence[str]) -> str:
    patterns = compress(names)
    return patterns[0] if len(patterns) == 1 else f"{patterns[0]} (and {len(expand_all(patterns[1:]))} more)"
