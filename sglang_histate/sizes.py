"""Byte sizes as people write them: ``512MiB``, ``2GiB``, ``1TiB``."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")


def parse_size(text: str | int) -> int:
    """Return the number of bytes that `text` names.

    A bare number is bytes. Suffixes are binary (KiB, MiB, GiB, TiB) and case-sensitive, because
    ``512MB`` and ``512MiB`` differ by 5 % and a silent guess would break a hard budget.

    Raises:
        ValueError: with one sentence that names the value and the suffixes that are understood.
    """
    match = _PATTERN.match(str(text))
    if match is None or match.group(2) not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write a number with KiB, MiB, GiB or TiB, such as 512MiB")
    size = float(match.group(1)) * _UNITS[match.group(2)]
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Return `size_bytes` with the largest binary suffix that keeps it readable, such as ``1.50GiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{int(value)}{unit}" if unit == "B" else f"{value:.2f}{unit}"
        value /= 1024
    return f"{value:.2f}TiB"
