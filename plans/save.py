"""The plan directory on disk.

    plan.yaml              the document; `programs` has the programs' digests, `decisions` that of what they are made of
    programs/stage_K.py    emitted programs
    model/                 signature.json, buffers, configuration: files given as bytes

`save_plan_dir` writes the whole directory or nothing. `load_plan` and `load_signature` read and check it;
`load_programs` also refuses a program that was changed, or a plan whose decisions were.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from meshwright.plans.document import PlanDocument, validate
from meshwright.plans.errors import InputError
from meshwright.plans.patterns import expand_all
from meshwright.plans.reading import read_plan, read_signature
from meshwright.plans.signature import Signature
from meshwright.plans.yaml_io import dump, load

PLAN_FILE = "plan.yaml"
SIGNATURE_FILE = "model/signature.json"
_RECOMPILE = "compile again: meshwright compile --from"
_IN_PROGRAMS = {"attention", "mesh", "seq", "micro_batch", "precision", "chunks", "stages", "parameters", "kinds"}
"""Keys that programs are made of."""


def digest(text: str) -> str:
    """Digest of a program's text, as plan.yaml holds it."""
    return "sha256:" + sha256(text.encode("utf-8")).hexdigest()


def decisions_digest(document: PlanDocument) -> str:
    """Digest of the decisions that programs are made of; predictions do not count."""
    data = document.model_dump(mode="json", by_alias=True, include=_IN_PROGRAMS)
    data["stages"] = document.stage_segments
    data["parameters"] = {name: str(layout) for name, layout in document.parameter_layouts.items()}
    if document.precision_ops:
        data["precision_ops"] = dict(document.precision_ops)
    if document.recomputed:
        data["recomputed"] = {n: r.regions for r in document.recomputed for n in expand_all(r.segments)}
    return digest(json.dumps(data, sort_keys=True))


def save_plan_dir(
    directory: Path | str, document: PlanDocument, programs: Mapping[str, str], model_files: Mapping[str, bytes]
) -> PlanDocument:
    """Writes a plan directory, in place of an older plan if there is one; gives the document with its digests.

    `programs` are texts by file name, `model_files` bytes by path below model/. InputError when the place is taken.
    """
    target = Path(directory).absolute()
    check_free(target)
    digests = {name: digest(text) for name, text in programs.items()}
    document = document.model_copy(update={"programs": digests, "decisions": decisions_digest(document)})
    files = {PLAN_FILE: dump(document).encode("utf-8")}
    files |= {f"programs/{name}": text.encode("utf-8") for name, text in programs.items()}
    files |= {f"model/{name}": data for name, data in model_files.items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(target, files)
    except OSError as error:
        raise InputError(f"{directory}: cannot be written: {error.strerror}") from None
    return document


def check_free(directory: Path | str) -> None:
    """InputError unless a plan may be written there: nothing, an empty directory, or an older plan."""
    target = Path(directory)
    if target.is_dir():
        if any(target.iterdir()) and not (target / PLAN_FILE).is_file():
            raise InputError(f"{directory}: found other files there, expected a new path, an empty directory or a plan")
    elif target.exists() or target.is_symlink():
        raise InputError(f"{directory}: found a file, expected the path of a directory for the plan")


def load_plan(directory: Path | str) -> PlanDocument:
    """The plan of a directory."""
    path = Path(directory)
    if not path.exists():
        raise InputError(f"{directory}: no such plan directory; meshwright compile MODEL -o {directory} makes one")
    if not path.is_dir():
        raise InputError(f"{directory}: found a file, expected a plan directory that compile wrote")
    if not (path / PLAN_FILE).is_file():
        raise InputError(f"{directory}: has no plan.yaml, so it is no plan directory that compile wrote")
    where = _where(directory)
    return read_plan(load(path / PLAN_FILE, where), where)


def load_signature(directory: Path | str) -> Signature:
    """What the plan directory knows of the model."""
    path = Path(directory) / SIGNATURE_FILE
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; {_RECOMPILE} {_where(directory)}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: is not JSON; {_RECOMPILE} {_where(directory)}") from None
    return read_signature(data, str(path))


def load_checked(directory: Path | str) -> tuple[PlanDocument, Signature]:
    """Plan and signature, checked against each other."""
    document, signature = load_plan(directory), load_signature(directory)
    validate(document, signature, _where(directory))
    return document, signature


def load_programs(directory: Path | str, document: PlanDocument) -> dict[str, str]:
    """Program texts by file name, digests checked. InputError for one that is missing or was changed."""
    check_decisions(directory, document)
    return {name: load_program(directory, document, name) for name in document.programs}


def check_decisions(directory: Path | str, document: PlanDocument) -> None:
    """InputError when the plan has no programs, or was edited since they were emitted."""
    where = _where(directory)
    if not document.programs:
        raise InputError(f"{where}: programs: found none, expected digests by file name; {_RECOMPILE} {where}")
    if document.decisions is not None and document.decisions != decisions_digest(document):
        raise InputError(f"{where}: was edited after its programs were emitted; {_RECOMPILE} {where}")


def load_program(directory: Path | str, document: PlanDocument, name: str) -> str:
    """One program's text, its digest checked."""
    where = _where(directory)
    if name not in document.programs:
        raise InputError(f"{where}: programs: found {', '.join(document.programs) or 'none'}, expected {name}")
    if name != Path(name).name:
        raise InputError(f"{where}: programs.{name}: found a path, expected a file name such as stage_0.py")
    path = Path(directory) / "programs" / name
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; {_RECOMPILE} {where}") from None
    if "sha256:" + sha256(text).hexdigest() != document.programs[name]:
        raise InputError(f"{path}: does not match its digest in plan.yaml; {_RECOMPILE} {where}")
    return text.decode("utf-8")


def _where(directory: Path | str) -> str:
    return str(Path(directory) / PLAN_FILE)


def _write_whole(target: Path, files: Mapping[str, bytes]) -> None:
    """Writes files into a sibling directory, then puts it in the target's place."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        new, old = work / "new", work / "old"
        for name, data in files.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(data)
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
