"""plan.yaml as text, and the plan directory: whole or not at all, and nothing changed behind the plan's back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from meshwright.plans.errors import InputError
from meshwright.plans.patterns import compress_mapping
from meshwright.plans.reading import read_plan
from meshwright.plans.save import load_checked, load_plan, load_programs, load_signature, save_plan_dir
from meshwright.plans.units import format_bytes, format_seconds, parse_bytes
from meshwright.plans.yaml_io import dump, load, parse
from meshwright.tests.sample_plan import PROGRAMS, TEXT, sample_document, sample_signature, save_sample


def test_dump_reads_back_and_reads_well() -> None:
    document = sample_document()
    text = dump(document)
    assert read_plan(parse(text)) == document
    assert read_plan(yaml.safe_load(text)) == document, "other YAML readers see the same"
    assert text.startswith("# meshwright plan; change a decision here")
    assert "mesh: {pp: 2, dp: 1, cp: 1, tp: 2, ep: 1}" in text
    assert "# parameter storage: S(d) slice of dim d, I same everywhere, R same with partial gradients\nparameters:\n" in text
    assert "- layers: [embedding, 'model.layers.{0,1}']" in text or "- layers: [embedding, 'model.layers.{0..1}']" in text
    assert "devices" not in text
    assert "\ndecisions:" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_dump_rounds_predictions() -> None:
    data = parse(TEXT)
    assert isinstance(data, dict)
    data["predicted"]["step_s"] = 0.123456789
    assert "step_s: 0.1235" in dump(read_plan(data))


def test_plan_of_126_layers_stays_under_20_kb() -> None:
    data = parse(TEXT)
    assert isinstance(data, dict)
    names = [f"self_attn.{n}_proj" for n in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "norm_1", "norm_2"]
    layers = {f"model.layers.{i}.{n}.weight": f"S({i % 2 if 'mlp' in n else 0})@tp" for i in range(126) for n in names}
    data["parameters"] = compress_mapping(layers)
    data["mesh"]["pp"] = 18
    stage = data["stages"][0]
    data["stages"] = [{**stage, "layers": [f"model.layers.{{{7 * k}..{7 * k + 6}}}"]} for k in range(18)]
    ops = {"transpose": "S(1)@tp", "view": "S(2)@tp", "view.1": "S(2)@tp", "sdpa": "S(1)@tp", "add": "S(1)@tp"}
    layouts = {"self_attn": ops, "mlp": ops, **dict.fromkeys(names, "S(2)@tp")}
    segments = {f"sort_{k}": [f"model.layers.{{{k}..{k + 120}..6}}"] for k in range(6)}
    data["kinds"] = {name: {"segments": found, "layouts": layouts} for name, found in segments.items()}
    text = dump(read_plan(data))
    assert "model.layers.{0..124..2}.mlp.up_proj.weight: S(0)@tp" in text
    assert len(text) < 20_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "line 2, column 1: key 'a' is given twice"),
        ("a: [1\nb: 2", "line 2, column 2: expected ',' or ']'"),
        ("a: !!python/object/apply:os.system [echo]", "line 1, column 4: tag tag:yaml.org,2002:python/object/apply:os.system"),
        ("a: &x 1\nb: *x", "line 1, column 4: aliases of this are not read"),
        ("a: &x [*x]", "aliases of this are not read"),
        ("\x00", "character 1 cannot be in YAML"),
        ("[" * 5000, "nested too deeply"),
        ("a: 1\n\tb: 2", "line 2, column 1: found character"),
        ("a: 1\n---\nb: 1", "line 2, column 1: but found another document"),
    ],
)
def test_bad_yaml_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, "my.yaml")
    assert str(caught.value).startswith("my.yaml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_yaml_words_are_words() -> None:
    text = "a: on\nb: 1e-3\nc: 2026-01-01\nd: no\ne: true\nf: ~\ng: -3\nh: .5\ni:\nj: 1:30"
    expected = {"a": "on", "b": 1e-3, "c": "2026-01-01", "d": "no", "e": True, "f": None, "g": -3, "h": 0.5, "i": None}
    assert parse(text) == {**expected, "j": "1:30"}


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.yaml: cannot be read: No such file"):
        load(tmp_path / "no.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(InputError, match="not UTF-8 text, at byte 3"):
        load(tmp_path / "binary.yaml")


def test_save_and_load(tmp_path: Path) -> None:
    saved = save_sample(tmp_path / "new" / "plan")
    document, signature = load_checked(tmp_path / "new" / "plan")
    assert document == saved
    assert signature == sample_signature()
    assert load_programs(tmp_path / "new" / "plan", document) == PROGRAMS
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["plan"]


def test_save_replaces_a_plan_and_nothing_else(tmp_path: Path) -> None:
    save_sample(tmp_path / "plan")
    (tmp_path / "plan" / "programs" / "stage_7.py").write_text("old")
    save_sample(tmp_path / "plan")
    assert not (tmp_path / "plan" / "programs" / "stage_7.py").exists()
    (tmp_path / "home").mkdir()
    save_sample(tmp_path / "home")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("text")
    for taken in ("other", "file"):
        with pytest.raises(InputError, match="found"):
            save_sample(tmp_path / taken)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "years of work"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "home", "other", "plan"]


def test_save_leaves_nothing_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_sample(tmp_path / "plan")
    before = (tmp_path / "plan" / "plan.yaml").read_text()
    real = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(28, os.strerror(28))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(InputError, match="cannot be written: No space left"):
        save_plan_dir(tmp_path / "plan", sample_document(), {"stage_0.py": ""}, {})
    assert (tmp_path / "plan" / "plan.yaml").read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_changed_program_is_refused(tmp_path: Path) -> None:
    document = save_sample(tmp_path)
    edit(tmp_path / "programs" / "stage_1.py", "Stage", "stage")
    with pytest.raises(InputError, match=r"programs/stage_1.py: does not match its digest in plan.yaml; compile again"):
        load_programs(tmp_path, document)
    (tmp_path / "programs" / "stage_1.py").unlink()
    with pytest.raises(InputError, match=r"stage_1.py: is missing; compile again: meshwright compile --from"):
        load_programs(tmp_path, document)


def test_decisions_edited_in_place_do_not_run(tmp_path: Path) -> None:
    save_sample(tmp_path)
    edit(tmp_path / "plan.yaml", "seed: 0", "seed: 3")
    load_programs(tmp_path, load_plan(tmp_path))
    edit(tmp_path / "plan.yaml", "norm.weight: R@tp", "norm.weight: I")
    with pytest.raises(InputError, match=r"plan.yaml: was edited after its programs were emitted; compile again"):
        load_programs(tmp_path, load_plan(tmp_path))


def test_program_names_stay_in_the_directory(tmp_path: Path) -> None:
    document = save_sample(tmp_path)
    outside = document.model_copy(update={"programs": {"../plan.yaml": "sha256:0"}})
    with pytest.raises(InputError, match=r"expected a file name such as stage_0.py"):
        load_programs(tmp_path, outside)


def test_what_is_no_plan_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such plan directory"):
        load_plan(tmp_path / "none")
    with pytest.raises(InputError, match=r"has no plan\.yaml"):
        load_plan(tmp_path)
    save_sample(tmp_path)
    with pytest.raises(InputError, match="found a file, expected a plan directory"):
        load_plan(tmp_path / "plan.yaml")
    (tmp_path / "model" / "signature.json").write_text("{")
    with pytest.raises(InputError, match=r"signature.json: is not JSON"):
        load_signature(tmp_path)
    (tmp_path / "model" / "signature.json").write_text('{"inputs": []}')
    with pytest.raises(InputError, match=r"signature.json: parameters: missing"):
        load_signature(tmp_path)
    (tmp_path / "model" / "signature.json").unlink()
    with pytest.raises(InputError, match=r"signature.json: is missing; compile again"):
        load_signature(tmp_path)


def test_amounts() -> None:
    assert [parse_bytes(t) for t in ("40GiB", "1.5 GB", "12", "2kib")] == [40 * 2**30, 1_500_000_000, 12, 2048]
    assert [format_bytes(n) for n in (0, 512, 1536, 40 * 2**30)] == ["0 B", "512 B", "1.50 KiB", "40.0 GiB"]
    assert [format_seconds(s) for s in (0, 2.5e-6, 0.0123, 1.5, 123.0)] == ["0 s", "2.50 us", "12.3 ms", "1.50 s", "123 s"]
    for text in ("", "-1", "1 parsec", "1e400GB", "GiB"):
        with pytest.raises(ValueError, match="expected an amount of memory"):
            parse_bytes(text)
