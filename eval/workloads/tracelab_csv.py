"""Input of TraceLab's own replayer: one round a row, with what it keeps and what it adds.

Columns, by name: `session_id` or `id`, `round_idx`, `prefix_len` (tokens kept of the session's text so far),
`input_len` (tokens added), `output_len`, `tool_wait_after_ms` (pause before the next round) and, optional,
`arrival_time` (ms, when the session begins). A prompt has prefix_len + input_len tokens. How long a round took is not
known, and pauses of people were dropped when the file was made.
"""

from __future__ import annotations

import csv
from pathlib import Path

from eval.workloads import fields
from eval.workloads.fields import Where
from eval.workloads.lines import text_lines
from eval.workloads.minted import minted
from eval.workloads.sessions import Session, Turn

NEEDED = ("round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms")
_NAMES = ("session_id", "id")
_ARRIVAL = "arrival_time"


def is_header(columns: list[str]) -> bool:
    """Whether the first row of a file names the columns of this format."""
    return set(NEEDED) <= set(columns) and any(name in columns for name in _NAMES)


def read_sessions(path: Path, block_tokens: int = 64) -> list[Session]:
    """Return the sessions in the file's order, rounds by their index.

    Raises:
        TraceError: a column is missing or a field is no whole number; the message names file, line and column.
        OSError: the file cannot be read.
    """
    lines = text_lines(path)
    first = next(lines, None)
    if first is None:
        raise Where(path, 1).error("the file is empty")
    header = [name.strip() for name in next(csv.reader([first[0]]))]
    for name in NEEDED:
        if name not in header:
            raise first[1].at(name).error("there is no such column")
    named = next((name for name in _NAMES if name in header), None)
    if named is None:
        raise first[1].at(_NAMES[0]).error("there is no such column")
    numbers = [*NEEDED, *([_ARRIVAL] if _ARRIVAL in header else [])]
    groups: dict[str, list[dict[str, int]]] = {}
    for line, where in lines:
        cells = next(csv.reader([line]))
        if len(cells) != len(header):
            raise where.error(f"{len(cells)} cells where the header has {len(header)}")
        row = dict(zip(header, (cell.strip() for cell in cells), strict=True))
        numbered = {name: _whole(row[name], where.at(name)) for name in numbers}
        if numbered["prefix_len"] + numbered["input_len"] < 1:
            raise where.at("input_len").error("an empty prompt is none")
        groups.setdefault(row[named], []).append(numbered)
    return [_session(name, rows, block_tokens) for name, rows in groups.items()]


def _session(name: str, rows: list[dict[str, int]], block_tokens: int) -> Session:
    rows.sort(key=lambda row: row["round_idx"])
    prompts = [(row["prefix_len"] + row["input_len"], row["prefix_len"]) for row in rows]
    turns: list[Turn] = []
    start = gap = 0.0
    for row, (length, _), ids in zip(rows, prompts, minted(prompts, block_tokens), strict=True):
        turns.append(Turn(length, row["output_len"], ids, start, gap, 0.0))
        gap = row["tool_wait_after_ms"] / 1000
        start += gap
    return Session(name, block_tokens, tuple(turns), start_s=rows[0].get(_ARRIVAL, 0) / 1000)


def _whole(cell: str, where: Where) -> int:
    try:
        value = int(cell)
    except ValueError:
        value = -1
    if value < 0:
        raise where.error(f"a whole number, not negative, is expected, not {fields.shown(cell)}")
    return value
