"""Plans with chunks and orders of their own: compiled, compiled again, edited, checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.driver import check_pipeline
from meshwright.dry import dry_run_rank
from meshwright.plans.save import load_plan, load_programs
from meshwright.runtime.actions import show
from meshwright.tests.parity import build


@pytest.fixture(scope="module")
def model() -> str:
    return build("gpt2", layers=4).directory


def compiled(model: str, plan: Path, *options: str) -> Path:
    assert main(["compile", model, "-o", str(plan), "--mesh", "pp=2", "--seq", "32", "--global-batch", "4", *options]) == 0
    return plan


def test_stages_of_a_v_lie_on_ranks_there_and_back(model: str, tmp_path: Path) -> None:
    plan = compiled(model, tmp_path / "plan", "--schedule", "zb-v")
    document = load_plan(plan)
    assert (document.schedule, document.chunks, document.ranks_of_stages, document.actions) == ("zb-v", 2, (0, 1, 1, 0), None)
    assert all(0 < stage.backward_weight_s < stage.backward_s for stage in document.stages)
    assert [report.stage for report in dry_run_rank(plan, 0)] == [0, 3]
    assert "3F0" in show(check_pipeline(document, load_programs(plan, document)))


def test_a_synthesised_plan_compiles_to_itself_and_bad_actions_are_shown(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = compiled(model, tmp_path / "plan", "--schedule", "synthesised")
    again = tmp_path / "again"
    assert main(["compile", "--from", str(plan), "-o", str(again)]) == 0
    assert load_plan(plan).actions == load_plan(again).actions is not None
    assert main(["diff", str(plan), str(again)]) == 0
    text = (plan / "plan.yaml").read_text()
    (plan / "plan.yaml").write_text(text.replace("- 0F0 ", "- 0B0 0F0 ", 1))
    capsys.readouterr()
    for words, status in ((["check", str(plan)], 1), (["compile", "--from", str(plan), "-o", str(tmp_path / "new")], 2)):
        assert main(words) == status
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "error: schedule cannot run: 0RECV_B0 comes twice"
        assert "-> 0RECV_B0" in lines[1] and lines[2].startswith("rank 1:")
    assert not (tmp_path / "new").exists()


def test_options_that_do_not_go_together(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = (
        (("--schedule", "1f1b", "--chunks", "2"), "error: chunks: found 2, 1f1b has 1\n"),
        (("--schedule", "pipedream-2bw", "--zero", "1"), "error: --zero: found 1, pipedream-2bw keeps two whole versions of the weights"),
        (("--schedule", "interleaved", "--chunks", "4"), "error: mesh: pp=2 with 4 chunks asks for as many stages"),
    )
    for options, message in cases:
        capsys.readouterr()
        assert main(["compile", model, "-o", str(tmp_path / "plan"), "--mesh", "pp=2", "--seq", "32", *options]) == 2
        assert capsys.readouterr().err.startswith(message)
