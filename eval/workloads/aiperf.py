"""Sessions in AIPerf's dialect of the Mooncake form: every line adds to the text of its session.

Fields: `session_id`, `input_length` and `hash_ids` of what the turn adds (512-token blocks, the last one may be
short), `output_length`, `timestamp` (ms, a session's first turn) and `delay` (ms after the answer before, later
turns). A prompt is all that was added so far with the answers between. Additions begin anywhere in a block of the
prompt, so prompts are cut into blocks of `block_tokens` by what stands in them: two blocks are the same if they
have the same pieces of the same added blocks. Equal `hash_ids` mean equal text in the whole file.

Lines with `messages` are text and not read here. `is_restart` on a later turn is refused: the form does not say what
of the session's text is left.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.workloads import fields
from eval.workloads.fields import Where
from eval.workloads.lines import json_lines
from eval.workloads.sessions import Session, Turn

ADDED_BLOCK_TOKENS = 512
DEFAULT_BLOCK_TOKENS = 64

_Piece = tuple[Hashable, int, int]  # what it is of, its first token there, how many


@dataclass
class _Text:
    """A session's text so far: whole blocks by number, then pieces that fill no block."""

    start_s: float
    turns: list[Turn] = field(default_factory=list)
    tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    open: list[_Piece] = field(default_factory=list)
    open_tokens: int = 0


def read_sessions(path: Path, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> list[Session]:
    """Return the sessions in the order their first turns are in the file.

    Raises:
        TraceError: a line is not as the form says; the message names file, line and field.
        OSError: the file cannot be read.
    """
    numbers: dict[tuple[_Piece, ...], int] = {}
    texts: dict[str, _Text] = {}

    def add(text: _Text, of: Hashable, length: int) -> None:
        done = 0
        while done < length:
            part = min(length - done, block_tokens - text.open_tokens)
            text.open.append((of, done, part))
            text.open_tokens += part
            done += part
            if text.open_tokens == block_tokens:
                text.blocks.append(numbers.setdefault(tuple(text.open), len(numbers)))
                text.open, text.open_tokens = [], 0
        text.tokens += length

    for value, where in json_lines(path):
        found = fields.record(value, where)
        if "messages" in found:
            raise where.at("messages").error("turns given as text are not read: use lengths and hash_ids")
        name = fields.text(found, "session_id", where)
        gap = (fields.seconds(found, "delay", where) or 0.0) / 1000
        text = texts.get(name)
        if text is None:
            begin = (fields.seconds(found, "timestamp", where) or 0.0) / 1000
            text = texts[name] = _Text(begin)
        elif found.get("is_restart"):
            raise where.at("is_restart").error(
                "a restart within a session is not read: what it keeps is open"
            )
        else:
            before = text.turns[-1]
            add(text, (name, len(text.turns)), before.output_tokens)
        for of, length in _added(found, where, (name, len(text.turns), "rest")):
            add(text, of, length)
        start = text.turns[-1].start_s + gap if text.turns else 0.0
        output = fields.count(found, "output_length", where)
        text.turns.append(
            Turn(text.tokens, output, tuple(text.blocks), start, gap if text.turns else 0.0, 0.0)
        )
    return [
        Session(name, block_tokens, tuple(text.turns), shared_ids=True, start_s=text.start_s)
        for name, text in texts.items()
    ]


def _added(found: dict[str, Any], where: Where, rest: Hashable) -> list[tuple[Hashable, int]]:
    """Return what a line adds, with lengths; `rest` names what has no id."""
    length = fields.count(found, "input_length", where, least=1)
    place = where.at("hash_ids")
    ids = fields.items(fields.member(found, "hash_ids", where), place)
    for index, one in enumerate(ids):
        if not isinstance(one, int) or isinstance(one, bool):
            raise place.at(index).error(f"a whole number is expected, not {fields.shown(one)}")
    whole, short = divmod(length, ADDED_BLOCK_TOKENS)
    if len(ids) == whole + bool(short):
        lengths = [ADDED_BLOCK_TOKENS] * whole + [short] * bool(short)
        return list(zip(ids, lengths, strict=True))
    if len(ids) == whole:
        return [*((one, ADDED_BLOCK_TOKENS) for one in ids), (rest, short)]
    raise place.error(f"{len(ids)} ids do not fit {length} tokens in blocks of {ADDED_BLOCK_TOKENS}")
