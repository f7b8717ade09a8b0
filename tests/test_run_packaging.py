"""What is installed is what is in the repository."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {f.parent.relative_to(ROOT) for f in ROOT.glob("[a-z]*/**/__init__.py") if not f.parts[len(ROOT.parts)].startswith(".")}
    shipped = {folder for folder in folders if folder.parts[0] not in ("tests", "benchmarks")}
    assert set(listed) == {"meshwright", *(".".join(("meshwright", *folder.parts)) for folder in shipped)}
