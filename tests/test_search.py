"""--devices: the search equals pricing everything, says why others lost, and what would fit when nothing does."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.passes.choose_schedule import Pipeline, choose_schedule
from meshwright.passes.choose_stages import SegmentCost
from meshwright.passes.search import Combination, Found, Priced, Space, TooLarge, combinations, nothing_fits, rank, report, search
from meshwright.plan import compile
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.tests.parity import build

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1))


def space(devices: int = 8, **changes: object) -> Space:
    defaults: dict[str, object] = {
        "devices": devices, "global_batch": 16, "micro_batches": (1, 2), "schedules": SCHEDULES, "recompute": ("none", "full"),
        "zero": (0, 1), "experts": (1,), "segments": 6, "node": None,
    }  # fmt: skip
    return Space(**{**defaults, **changes})  # type: ignore[arg-type]


class Model:
    """Six segments whose times and bytes shrink with tp; recomputation keeps less and runs longer."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seconds = [rng.random() + 0.1 for _ in range(6)]
        self.overhead = rng.random() * 0.2

    def segments(self, way: Combination) -> tuple[SegmentCost, ...]:
        def segment(number: int, seconds: float) -> SegmentCost:
            time_s = way.micro_batch * seconds / way.mesh.tp + (self.overhead if way.mesh.tp > 1 else 0.0)
            kept = 100 * way.micro_batch // (1 if way.recompute == "none" else 10)
            again = 1.0 if way.recompute == "full" else 0.0
            return SegmentCost(f"s{number}", time_s, (2 + again) * time_s, {f"w{number}": 400 // way.mesh.tp}, kept, 8)

        return tuple(segment(n, s) for n, s in enumerate(self.seconds))

    def price(self, way: Combination, limit: int) -> Priced | TooLarge:
        count = 16 // (way.mesh.dp * way.micro_batch)
        pipeline = Pipeline(way.mesh, count, way.schedule, way.chunks, limit, zero=way.zero)
        try:
            choice = choose_schedule(self.segments(way), pipeline)
        except InputError as error:
            if not str(error).startswith("memory_limit"):
                raise
            return TooLarge(way, limit + 1)
        return Priced(way, choice.stages.step_s, choice.fullest_bytes, {"waiting": choice.stages.bubble})


@pytest.mark.parametrize("seed", range(6))
def test_bounds_lose_no_best_plan(seed: int) -> None:
    model, limit = Model(seed), 4000
    ways = list(combinations(space(), Counter()))
    found = Found()
    search(ways, model.segments, lambda way: model.price(way, limit), 16, limit, found)
    everything = []
    for way in ways:
        try:
            answer = model.price(way, limit)
        except InputError:
            continue
        if isinstance(answer, Priced):
            everything.append(answer)
    best = min(everything, key=rank)
    assert found.best_meshes()[0].step_s == pytest.approx(best.step_s)
    assert found.ruled_out > 0 and len(found.priced) < len(everything)
    lines = report(8, found, limit)
    assert "chosen" in lines[1] and any("most of it" in line or "as fast" in line for line in lines[2:])


def test_what_is_not_legal_is_counted() -> None:
    refused: Counter[str] = Counter()
    ways = list(combinations(space(devices=12, node=4, micro_batches=(1,)), refused))
    assert all(way.mesh.tp <= 4 and way.mesh.pp <= 6 and 16 % way.mesh.dp == 0 for way in ways)
    assert {reason.split(" ")[0] for reason in refused} == {"tp", "global_batch=16", "pp"}
    assert not list(combinations(space(devices=7, micro_batches=(16,), segments=1, node=4), refused))


def test_nothing_fits_says_which_constraint_binds_and_by_how_much() -> None:
    way = Combination(Mesh(dp=2), 1, "1f1b", 1, "full", 0)
    text = nothing_fits(2, Found(legal=1, too_large=[TooLarge(way, 3 << 30)]), 2 << 30, "4 devices, ")
    assert "none of 1 combinations of 2 devices fits memory_limit 2.00 GiB" in text
    assert "needs 3.00 GiB on a rank, 1.00 GiB too much" in text and "4 devices" in text
    assert "global_batch" in nothing_fits(7, Found(refused=Counter({"global_batch=16 no multiple": 3})), 1, "")


def test_devices_give_a_plan_with_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = build("llama").directory
    arguments = ["compile", source, "--devices", "2", "--seq", "32", "--global-batch", "8", "--micro-batch", "2"]
    assert main([*arguments, "-o", str(tmp_path / "plan"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["world_size"] == 2 and facts["micro_batch"] == 2 and facts["global_batch"] == 8
    assert len([line for line in facts["search"] if " a step" in line]) >= 3
    chosen = compile(source, None, mesh=facts["mesh"], seq=32, global_batch=8, micro_batch=2, schedule=facts["schedule"],
                     zero=facts["zero"], recompute=facts["recompute"], memory_limit=facts["memory_limit"])  # fmt: skip
    assert chosen.document.predicted.step_s == pytest.approx(facts["predicted"]["step_s"])
    others = [compile(source, None, mesh=mesh, seq=32, global_batch=8, micro_batch=2) for mesh in ("dp=2", "tp=2", "pp=2")]
    assert facts["predicted"]["step_s"] <= min(o.document.predicted.step_s for o in others) * (1 + 1e-6)
    assert main([*arguments, "-o", str(tmp_path / "small"), "--memory-limit", "700KiB"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: devices: none of") and "too much" in error and "\n" not in error.strip()
    assert not (tmp_path / "small").exists()


def test_devices_and_a_mesh_must_agree() -> None:
    with pytest.raises(InputError, match=r"devices: found 4, but the mesh tp=2 has 2 ranks"):
        compile(build("llama").directory, None, devices=4, mesh="tp=2")
