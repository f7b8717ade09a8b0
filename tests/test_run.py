"""The commands under torchrun, on the toy model of tests/toy.py: training, resuming, measuring, failing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from typer.main import get_command

from meshwright import run
from meshwright.driver import compile_plan
from meshwright.materialize import materialize
from meshwright.plans.mesh import Mesh
from meshwright.plans.reading import read_declaration
from meshwright.tests import toy
from meshwright.tests.ranks import run_ranks
from meshwright.train import LearningRate
from meshwright.verify import DiffersError

LIMIT_S = 60


def call(*words: str) -> int:
    """A command line in this process."""
    return int(get_command(run.app).main(list(words), standalone_mode=False) or 0)


def torchrun(ranks: int, *words: str) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launch, "-m", "meshwright.run", *words]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    ids = np.random.default_rng(0).integers(0, toy.VOCABULARY, 600).astype(np.int32)
    np.save(tmp_path / "ids.npy", ids)
    return tmp_path / "ids.npy"


def losses(file: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()]


def test_training_is_the_same_on_every_mesh_and_after_a_resume(tmp_path: Path, data: Path) -> None:
    single = str(toy.write_plan(tmp_path / "single", Mesh()))
    plan = str(toy.write_plan(tmp_path / "plan", Mesh(pp=2, tp=2)))
    common = ["train", "--data", str(data), "--steps", "5", "--lr", "1e-2", "--warmup", "2", "--seed", "3"]
    one, four, later = (tmp_path / f"{name}.jsonl" for name in ("one", "four", "later"))
    run_ranks(1, call, single, *common, "--metrics", str(one))
    saving = ["--save", str(tmp_path / "ckpt"), "--save-every", "3", "--metrics", str(four)]
    assert run_ranks(4, call, plan, *common, *saving) == [0] * 4
    np.testing.assert_allclose(losses(four), losses(one), rtol=1e-5)
    records = [json.loads(line) for line in one.read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4]
    assert set(records[0]) == {"step", "loss", "grad_norm", "lr", "tokens_per_s", "seconds"}
    np.testing.assert_allclose([r["lr"] for r in records][:3], [0.5e-2, 1e-2, 1e-2])

    half = ["--data", str(data), "--steps", "3", "--lr", "1e-2", "--schedule", "constant", "--save", str(tmp_path / "half")]
    run_ranks(1, call, single, "train", *half)
    whole = ["--data", str(data), "--steps", "5", "--lr", "1e-2", "--schedule", "constant"]
    run_ranks(1, call, single, "train", *whole, "--metrics", str(one))
    run_ranks(4, call, plan, "train", *whole, "--resume", str(tmp_path / "half"), "--metrics", str(later))
    np.testing.assert_allclose(losses(later), losses(one)[3:], rtol=1e-5)


def test_bench_traces_sums_beside_the_backward(tmp_path: Path) -> None:
    plan = str(toy.write_plan(tmp_path / "plan", Mesh(dp=2), zero=3))
    assert run_ranks(2, call, plan, "bench", "--steps", "2", "--trace", str(tmp_path / "trace.json")) == [0, 0]
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in range(2):
        last = max((e for e in events if e["pid"] == rank and e["cat"] == "B"), key=lambda e: e["ts"])
        sums = [e for e in events if e["pid"] == rank and e["cat"] == "sum"]
        beside = [e for e in sums if last["ts"] < e["ts"] < last["ts"] + last["dur"]]
        assert beside and all(e["args"]["bytes"] > 0 for e in sums)


def test_bench_traces_every_action(tmp_path: Path) -> None:
    plan = str(toy.write_plan(tmp_path / "plan", Mesh(pp=2), "zb-v"))
    assert run_ranks(2, call, plan, "bench", "--steps", "1", "--trace", str(tmp_path / "trace.json")) == [0, 0]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(rows.values()) == {"compute", "waiting", "messages", "gradient sums"}
    done = {(e["pid"], e["name"]) for e in events if e["ph"] == "X" and rows[e["pid"], e["tid"]] == "compute"}
    assert done == {(r, f"{s}{k}{i}") for r, stages in ((0, (0, 3)), (1, (1, 2))) for s in stages for k in "FBW" for i in range(8)}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")


def verify_twice(plan: str) -> tuple[int, str]:
    """Exit status with the usual tolerance, and the verdict with none."""
    status = call(plan, "verify")
    try:
        call(plan, "verify", "--gradient-tolerance", "0")
    except DiffersError as found:
        return status, str(found)
    return status, ""


def test_verify_and_materialize(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 51}
    LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "model")
    declaration = read_declaration({"mesh": {"pp": 2}, "seq": 16, "global_batch": 4}, {}, "test")
    compile_plan(str(tmp_path / "model"), declaration=declaration).save(tmp_path / "plan")
    found = run_ranks(2, verify_twice, str(tmp_path / "plan"), env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert found == [(0, "DIFFERS beyond tolerance: gradients")] * 2

    materialize(tmp_path / "plan", tmp_path / "weights")
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
    assert set(weights) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_learning_rate() -> None:
    cosine = LearningRate(1.0, 2, 6, "cosine", 0.1)
    assert [cosine.at(step) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert cosine.at(4) == pytest.approx(0.55) and cosine.at(6) == pytest.approx(0.1)
    assert LearningRate(1.0, 0, 6, "constant", 0.1).at(5) == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("absent", "verify"), "error: absent: no such plan directory"),
        (("PLAN", "train", "--data", "DATA"), "error: Missing option '--steps'"),
        (("PLAN", "train", "--data", "absent.npy", "--steps", "1"), "error: --data absent.npy: no such file"),
        (("PLAN", "train", "--data", "DATA", "--steps", "1", "--resume", "nowhere"), "error: --resume nowhere: no such"),
        (("PLAN", "train", "--data", "DATA", "--steps", "1", "--save-every", "2"), "error: --save-every needs --save"),
        (("TWO", "bench"), "error: mesh pp=2 needs 2 processes, torchrun started 1"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, data: Path, words: tuple[str, ...], message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    places = {"DATA": str(data), "PLAN": str(toy.write_plan(tmp_path / "plan", Mesh()))}
    places["TWO"] = str(toy.write_plan(tmp_path / "two", Mesh(pp=2)))
    monkeypatch.setattr(sys, "argv", ["run", *(places.get(word, word) for word in words)])
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="2"):
        run.main()
    errors = capsys.readouterr().err
    assert errors.startswith(message) and errors.count("\n") == 1


def leave(status: int) -> None:
    raise SystemExit(status)


@pytest.mark.parametrize("message", ["the weights are odd\nsecond line", "[gloo/pair.cc:1] Connection closed by peer"])
def test_a_failure_is_told_last_and_reported(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "error.json"
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(run, "GRACE_S", 0.01)
    with pytest.raises(SystemExit, match="1"):
        run.end_with(RuntimeError(message))
    told = f"error: rank 3: RuntimeError: {message.splitlines()[0]}"
    assert capsys.readouterr().err.splitlines()[-1] == told
    assert json.loads(report.read_text())["message"]["message"] == told


def test_bad_input_in_a_process(tmp_path: Path) -> None:
    np.save(tmp_path / "wrong.npy", np.full(99, toy.VOCABULARY) * (np.arange(99) > 0))
    plan = str(toy.write_plan(tmp_path / "plan", Mesh()))
    words = [plan, "train", "--data", str(tmp_path / "wrong.npy"), "--steps", "1"]
    done = subprocess.run([sys.executable, "-m", "meshwright.run", *words], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    where = f"error: --data {words[3]}: token id 32 at position 1"
    assert done.stderr == f"{where} is outside the model's vocabulary, 0 to 31\n"


def test_under_torchrun_rank_0_alone_reports_bad_input(tmp_path: Path) -> None:
    plan = str(toy.write_plan(tmp_path / "plan", Mesh(pp=2, tp=2)))
    done = subprocess.run(torchrun(2, plan, "bench"), capture_output=True, text=True, timeout=LIMIT_S)
    cause = "error: mesh pp=2,tp=2 needs 4 processes, torchrun started 2"
    lines = done.stderr.splitlines()
    assert done.returncode != 0 and lines.count(cause) == 1
    assert [line for line in lines if line.strip("=")][-1].endswith(cause), done.stderr


def test_a_killed_rank_ends_the_job_and_is_named_last(tmp_path: Path, data: Path) -> None:
    plan = str(toy.write_plan(tmp_path / "plan", Mesh(pp=2)))
    metrics = tmp_path / "metrics.jsonl"
    words = (plan, "train", "--data", str(data), "--steps", "100000", "--metrics", str(metrics))
    job = subprocess.Popen(torchrun(2, *words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        started = time.monotonic()
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert job.poll() is None and time.monotonic() < started + LIMIT_S
            time.sleep(0.1)
        victim = max(children(job.pid))
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        _, errors = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode != 0 and time.monotonic() < killed + LIMIT_S
    last = [line for line in errors.splitlines() if line.strip("=")][-1]
    assert f"Signal 9 (SIGKILL) received by PID {victim}" in last, errors


def children(parent: int) -> list[int]:
    """Processes that `parent` started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (entry / "stat").exists():
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(entry.name))
    return found
