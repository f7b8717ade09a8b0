"""No product code knows an architecture: transformers' model types do not occur in it, comments included."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import CONFIG_MAPPING

ROOT = Path(__file__).parents[1]
WORDS = frozenset({"bit", "clip", "encoder-decoder"})
"""Model types that are words of the field: gradient clipping, bits, config.is_encoder_decoder."""


def test_no_architecture_is_named() -> None:
    types = {name for name in CONFIG_MAPPING if name not in WORDS}
    spellings = {re.escape(name).replace(r"\-", "[-_ ]?").replace("_", "[-_ ]?") for name in types}
    pattern = re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(spellings, key=len, reverse=True))})(?![a-z0-9])", re.IGNORECASE)
    folders = [ROOT, *(ROOT / name for name in ("compiler", "passes", "runtime", "plans"))]
    files = [f for folder in folders for f in (folder.glob("*.py") if folder == ROOT else folder.rglob("*.*")) if f.suffix != ".pyc"]
    assert len(files) > 80
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match[1]}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        for match in pattern.finditer(line)
    ]
    assert not found, found
