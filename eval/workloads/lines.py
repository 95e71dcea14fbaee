"""Reading the files of traces line by line: plain, gzip or xz by the name's end, and errors that say where."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from eval.workloads.fields import TraceError, Where


def open_text(path: Path) -> IO[str]:
    """Return the file opened as text, unpacked if its name ends in .gz or .xz."""
    if path.name.endswith(".xz"):
        return lzma.open(path, "rt", encoding="utf-8")
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def text_lines(path: Path) -> Iterator[tuple[str, Where]]:
    """Yield the lines that are not blank, each with its place.

    Raises:
        TraceError: the file is no text or its compression is damaged; the message names the line.
        OSError: it cannot be read.
    """
    number = 0
    with open_text(path) as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield line, Where(path, number)
        except (lzma.LZMAError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Where(path, number + 1).error(f"the compressed file is damaged: {error}") from None
        except UnicodeDecodeError as error:
            raise Where(path, number + 1).error(f"no UTF-8 text: {error.reason}") from None


def json_lines(path: Path) -> Iterator[tuple[Any, Where]]:
    """Yield the value of every line; errors as in `text_lines`, and for a line that is no JSON."""
    for line, where in text_lines(path):
        yield parsed(line, where), where


def one_json(path: Path) -> tuple[Any, Where]:
    """Return the one value of a whole file; errors as in `json_lines`."""
    where = Where(path, 1)
    try:
        with open_text(path) as file:
            written = file.read()
    except UnicodeDecodeError as error:
        raise where.error(f"no UTF-8 text: {error.reason}") from None
    return parsed(written, where), where


def parsed(written: str, where: Where) -> Any:
    """Return the value of a JSON text that begins at `where`."""
    try:
        return json.loads(written)
    except json.JSONDecodeError as error:
        raise _at_line(where, error) from None


def _at_line(where: Where, error: json.JSONDecodeError) -> TraceError:
    return Where(where.file, where.line + error.lineno - 1).error(f"no JSON: {error.msg}")
