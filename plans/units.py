"""Amounts in words: bytes ("40GiB", "1.5 GB") and seconds ("12.3 ms"), read and written."""

from __future__ import annotations

import re

BYTE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
"""By upper-case unit: GiB = 2^30, GB = 1e9."""


def parse_bytes(text: str) -> int:
    """Bytes of "40GiB", "1.5 GB" or "1024"; ValueError says how an amount is written."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in BYTE_UNITS:
        raise ValueError(f"found {text!r}, expected an amount of memory such as 40GiB, 1.5GB or a number of bytes")
    return round(float(match[1]) * BYTE_UNITS[match[2].upper()])


def format_bytes(amount_bytes: float) -> str:
    """"1.50 GiB", "12.0 MiB", "512 B": three digits in the largest binary unit of at least 1."""
    for unit in ("TIB", "GIB", "MIB", "KIB"):
        if abs(amount_bytes) >= BYTE_UNITS[unit]:
            return f"{_three_digits(amount_bytes / BYTE_UNITS[unit])} {unit[0]}iB"
    return f"{amount_bytes:.0f} B"


def format_seconds(amount_s: float) -> str:
    """"1.50 s", "12.0 ms", "3.40 us": three digits in the largest unit of at least 1."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(amount_s) >= size:
            return f"{_three_digits(amount_s / size)} {unit}"
    return f"{_three_digits(amount_s / 1e-6)} us" if amount_s else "0 s"


def _three_digits(amount: float) -> str:
    digits = 2 if abs(amount) < 10 else 1 if abs(amount) < 100 else 0
    return f"{amount:.{digits}f}"
