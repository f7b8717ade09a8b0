"""The command line's face: what it prints where, and its exit status. The driver behind it is replaced by a fake."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from meshwright import cli
from meshwright.cli import main
from meshwright.plans.document import Declaration, PlanDocument
from meshwright.plans.errors import InputError
from meshwright.runtime.soundness import UnsoundError
from meshwright.tests.sample_plan import sample_document, save_sample


@dataclass
class FakeDriver:
    """Remembers what it was asked."""

    asked: list[tuple[str, Declaration]] = field(default_factory=list)
    failing_rank: int = -1
    unsound: str = ""

    def check_pipeline(self, document: PlanDocument, programs: Mapping[str, str]) -> None:
        assert list(programs) == list(document.programs)
        if self.unsound:
            raise UnsoundError(self.unsound)

    def compile_plan(
        self, model: str, *, example: object = None, declaration: Declaration, progress: Callable[[str], None]
    ) -> FakePlan:
        progress("capturing")
        self.asked.append((model, declaration))
        return FakePlan()

    def dry_run_rank(self, plan_dir: Path, rank: int) -> list[FakeReport]:
        if rank == self.failing_rank:
            raise InputError("programs/stage_0.py: shapes do not fit")
        return [FakeReport(rank)]


@dataclass(frozen=True)
class FakePlan:
    document: PlanDocument = field(default_factory=sample_document)
    programs: Mapping[str, str] = field(default_factory=dict)
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    search: tuple[str, ...] = ()

    def save(self, directory: Path) -> None:
        save_sample(directory)

    def summary(self) -> str:
        return "a summary"


@dataclass(frozen=True)
class FakeReport:
    rank: int

    def lines(self) -> list[str]:
        return [f"rank {self.rank}: fine"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cli, "load_driver", lambda: fake)
    monkeypatch.setattr(cli, "load_dry_runs", lambda: fake)
    return fake


@pytest.fixture
def plan_dir(tmp_path: Path) -> Path:
    save_sample(tmp_path / "plan")
    return tmp_path / "plan"


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one error line of a command that must end with 2 and print nothing else."""
    assert main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    return captured.err.removeprefix("error: ").rstrip()


def test_compile_merges_file_and_options(driver: FakeDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "some.yaml").write_text("mesh: {tp: 2}\nseq: 64\nmodel: hub/id\nsequence_parallel: on\nmemory_limit: 40GiB\n")
    out = tmp_path / "out"
    assert main(["compile", "-o", str(out), "--from", str(tmp_path / "some.yaml"), "--mesh", "pp=2,tp=2", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"a summary\nwritten to {out}\n"
    assert captured.err == "", "no progress when stderr is not a terminal"
    model, declaration = driver.asked[0]
    assert model == "hub/id"
    assert declaration.mesh is not None and (declaration.mesh.pp, declaration.mesh.tp) == (2, 2)
    assert (declaration.seq, declaration.seed, declaration.sequence_parallel) == (64, 3, "on")
    assert declaration.memory_limit == 40 * 2**30
    assert declaration.schedule is None


def test_compile_from_a_plan_directory(driver: FakeDriver, plan_dir: Path, tmp_path: Path) -> None:
    assert main(["compile", "--from", str(plan_dir), "-o", str(tmp_path / "new"), "--json"]) == 0
    model, declaration = driver.asked[0]
    assert model == "/models/tiny"
    assert declaration.parameters == sample_document().parameters


def test_compile_prints_json(driver: FakeDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "m", "-o", str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["plan"] == str(tmp_path / "out")
    assert facts["mesh"] == {"pp": 2, "dp": 1, "cp": 1, "tp": 2, "ep": 1}
    assert (facts["world_size"], facts["micro_batches"], facts["predicted"]["step_s"]) == (4, 4, 0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "xp=2"], "--mesh: unknown mesh axis 'xp'; the axes are pp, dp, cp, tp, ep"),
        (["--mesh", "cp=2"], "--mesh: cp=2 is not in this version, which has cp=1"),
        (["--mesh", "tp=0"], "--mesh: mesh axis tp is 0; a size is a whole number of 1 or more"),
        (["--mesh", "dp=2", "--micro-batch", "1", "--global-batch", "3"], "--global-batch: found 3, expected a multiple of dp"),
        (["--zero", "4"], "--zero: found 4, expected 0, 1, 2 or 3"),
        (["--precision", "fp64"], "--precision: found 'fp64', expected fp32, bf16 or fp16"),
        (["--recompute", "some"], "--recompute: found 'some', expected none, selective, full or auto"),
        (["--devices", "0"], "--devices: found 0, expected a whole number of 1 or more"),
        (["--seq", "x"], "--seq: found 'x', expected a whole number of 1 or more: tokens per sequence"),
        (["--seq", "0"], "--seq: found 0, expected a whole number of 1 or more"),
        (["--memory-limit", "lots"], "--memory-limit: found 'lots', expected an amount of memory such as 40GiB"),
        (["--from", "none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        (["--meshh", "tp=2"], "No such option: --meshh"),
    ],
)
def test_bad_options(
    options: list[str], message: str, driver: FakeDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(capsys, "compile", "m", "-o", tmp_path / "out", *options).startswith(message)
    assert list(tmp_path.iterdir()) == []
    assert driver.asked == []


def test_bad_calls(driver: FakeDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "MODEL: missing" in error_of(capsys, "compile", "-o", tmp_path / "out")
    assert "Missing option '-o'" in error_of(capsys, "compile", "m")
    assert "Missing command" in error_of(capsys)
    assert "No such command 'shwo'" in error_of(capsys, "shwo")
    assert "Missing argument 'PLAN_DIR'" in error_of(capsys, "show")
    assert "no such plan directory" in error_of(capsys, "show", tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "found a file" in error_of(capsys, "compile", "m", "-o", tmp_path / "file")
    (tmp_path / "bad.yaml").write_text("mesh: {tp: 2}\nmesh: {tp: 4}\n")
    message = error_of(capsys, "compile", "m", "-o", tmp_path / "out", "--from", tmp_path / "bad.yaml")
    assert message.endswith("bad.yaml: line 2, column 1: key 'mesh' is given twice")


def test_debug_shows_the_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "none"), "--debug"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("error: ")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("compile", "show", "diff", "check"))
    assert main(["compile", "-h"]) == 0
    assert "--global-batch" in capsys.readouterr().out


def test_show(plan_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(plan_dir)]) == 0
    text = capsys.readouterr().out
    assert "Schedule of a step\nstage 0  F0 F1" in text
    assert "\x1b" not in text
    assert main(["show", str(plan_dir), "--layer", "1", "--rank", "2", "--programs"]) == 0
    text = capsys.readouterr().out
    assert "model.layers.1 (kind layer, stage 0)" in text
    assert "2 of 4: pp=1, dp=0, cp=0, tp=0" in text
    assert '"""Stage 1."""' in text
    assert main(["show", str(plan_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["model.embed_tokens.weight"] == "S(0)@tp"
    assert error_of(capsys, "show", plan_dir, "--rank", "9").startswith("--rank: found 9, expected 0 to 3")
    assert error_of(capsys, "show", plan_dir, "--rank", "x").startswith("--rank: found x, expected 0 to 3")


def test_diff(plan_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(plan_dir), str(plan_dir)]) == 0
    assert capsys.readouterr().out == "identical\n"
    save_sample(tmp_path / "b", sample_document().model_copy(update={"schedule": "gpipe"}))
    assert main(["diff", str(plan_dir), str(tmp_path / "b")]) == 1
    assert capsys.readouterr().out == "options\n  schedule: 1f1b -> gpipe\n"
    assert main(["diff", str(plan_dir), str(tmp_path / "b"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differences"][0]["new"] == "gpipe"


def test_check(driver: FakeDriver, plan_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(plan_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["rank 0: fine", "rank 2: fine"]
    assert main(["check", str(plan_dir), "--rank", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == {"3": ["rank 3: fine"]}
    assert error_of(capsys, "check", plan_dir, "--rank", "4").startswith("--rank: found 4, expected 0 to 3 on the mesh")
    driver.failing_rank = 2
    assert main(["check", str(plan_dir)]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: programs/stage_0.py: shapes do not fit\n")
    driver.unsound = "schedule cannot run\nrank 0: -> 0F0"
    assert main(["check", str(plan_dir)]) == 1
    assert capsys.readouterr().err == "error: schedule cannot run\nrank 0: -> 0F0\n", "a grid keeps its lines"
    (plan_dir / "programs" / "stage_0.py").write_text("import os")
    assert "does not match its digest" in error_of(capsys, "check", plan_dir)


def test_module_runs_and_survives_a_closed_pipe(plan_dir: Path) -> None:
    command = f"{sys.executable} -m meshwright show {plan_dir} --json | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith('{"plan"')
    assert done.stderr == ""


def test_show_loads_neither_torch_nor_transformers(plan_dir: Path) -> None:
    code = f"import sys; from meshwright.cli import main; main(['show', {str(plan_dir)!r}, '--rank', '1'])"
    check = "assert not {'torch', 'transformers', 'ortools'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", f"{code}; {check}"], timeout=120, check=False).returncode == 0
