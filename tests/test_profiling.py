"""profile: a file that loads, curves that are read, collectives on ranks of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import op_profile, profiling
from meshwright.cli import main
from meshwright.compiler.costs import all_reduce_s, reduce_scatter_s
from meshwright.compiler.hardware import load_hardware, read_curve, read_seconds
from meshwright.compiler.measured_ops import LIKE
from meshwright.plans.mesh import Mesh


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "EFFORT", op_profile.Effort(0.005, 1 << 18))
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.usefixtures("small")
def test_two_ranks_are_started_and_their_collectives_are_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "-o", str(tmp_path / "here.yaml"), "--ranks", "2"]) == 0
    assert "written to" in capsys.readouterr().out
    hardware = load_hardware(str(tmp_path / "here.yaml"))
    link = hardware.link_for("tp", Mesh(tp=2))
    assert link.measured_ranks == 2
    assert {name for name, _ in link.measured} == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
    assert all_reduce_s(1 << 20, 2, link) == pytest.approx(link.seconds("all-reduce", 1 << 20) or 0)
    assert reduce_scatter_s(1 << 24, 4, link) > reduce_scatter_s(1 << 12, 4, link) > 0
    assert hardware.device.op_overhead_s > 0
    assert hardware.device.matmul_s(2.0 * 16**3, "float32") < hardware.device.matmul_s(2.0 * 64**3, "float32")


@pytest.mark.usefixtures("small")
def test_one_rank_measures_no_collectives(tmp_path: Path) -> None:
    data = profiling.profile(tmp_path / "alone.yaml", 1, lambda text: None)
    assert "collectives" not in str(data["levels"])
    device = load_hardware(str(tmp_path / "alone.yaml")).device
    assert device.flops_per_s("float32") > 0 and device.update_bytes_per_s and device.ranks_per_core == 1
    assert set(device.efficiency.ops) == set(LIKE.values())
    assert device.efficiency.program.forward > 0 and device.efficiency.program.backward > 0
    assert [path.name for path in tmp_path.iterdir()] == ["alone.yaml"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "-o", str(tmp_path)]) == 2
    assert "error: -o:" in capsys.readouterr().err


def test_curves_are_read_between_their_points() -> None:
    shares = [(1e6, 0.2), (1e8, 0.6)]
    assert read_curve(shares, 1e7) == pytest.approx(0.4)
    assert read_curve(shares, 1.0) == 0.2 and read_curve(shares, 1e12) == 0.6
    seconds = [(1000.0, 1e-4), (2000.0, 2e-4)]
    assert read_seconds(seconds, 10) == 1e-4
    assert read_seconds(seconds, 1500) == pytest.approx(1.5e-4)
    assert read_seconds(seconds, 4000) == pytest.approx(4e-4)


def test_smaller_messages_never_take_longer() -> None:
    assert op_profile.growing([[1, 5.0], [2, 3.0], [4, 4.0]]) == [[1, 3.0], [2, 3.0], [4, 4.0]]


def test_a_program_is_a_multiple_of_its_ops_and_a_part_per_op() -> None:
    assert op_profile.fitted((1.0, 4.0), (1.7, 5.3)) == pytest.approx((1.2, 0.5))
    assert op_profile.fitted((1.0, 4.0), (1.0, 5.0)) == pytest.approx((1.2, 0.0)), "noise"
