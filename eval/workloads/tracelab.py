"""Coding-agent rounds as published by TraceLab: JSON lines, one model call each, with token counts and no content.

`prefix_tokens` is what the provider's cache found, not what a prompt shares with the one before: after a provider's
miss it is small although the text is the same. Two readings are defensible, and a table should say which it used:

- `Reading.PREFIX`: a round keeps the first `prefix_tokens` of the prompt before it and everything else is new (the
  reading of AIPerf). Misses of the provider become rewrites, so there are too many of them.
- `Reading.GROWTH`: sessions only grow. A round whose `input_tokens_total` is smaller than the one before is the
  only rewrite; it keeps its `prefix_tokens`, which the provider cannot have found without their being the same.

Rules of the schema: rounds are ordered by the time they were submitted, then by `round_index`, because neither
`round_id` nor the index is unique. A round is submitted at its latest user message or tool result and took until its
last reasoning, text or tool call. A round without such events has the time of the line before it.
What sessions share with each other is not recorded: block ids are a session's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from eval.workloads import fields
from eval.workloads.fields import Where
from eval.workloads.lines import json_lines
from eval.workloads.minted import minted
from eval.workloads.sessions import Session, Turn

DEFAULT_BLOCK_TOKENS = 64
_SUBMITS = frozenset(("user_message", "tool_result"))
_ANSWERS = frozenset(("reasoning", "text", "tool_call"))


class Reading(Enum):
    """How token counts become content."""

    PREFIX = "prefix"
    GROWTH = "growth"


@dataclass(frozen=True, slots=True)
class Round:
    """One model call. `at_s` on the clock of all sessions; `prefix_tokens` as the provider's cache found them."""

    session: str
    at_s: float
    index: int
    input_tokens: int
    prefix_tokens: int
    output_tokens: int
    service_s: float


def read_sessions(
    path: Path, reading: Reading = Reading.GROWTH, block_tokens: int = DEFAULT_BLOCK_TOKENS
) -> list[Session]:
    """Return the sessions in the order they begin; errors as in `read_rounds`."""
    return sessions_of(read_rounds(path), reading, block_tokens)


def read_rounds(path: Path) -> list[Round]:
    """Return the rounds in the file's order.

    Raises:
        TraceError: a line is not as the schema says; the message names file, line and field.
        OSError: the file cannot be read.
    """
    rounds: list[Round] = []
    latest: dict[str, float] = {}
    for value, where in json_lines(path):
        found = fields.record(value, where)
        session = fields.text(found, "session_id", where)
        total = fields.count(found, "input_tokens_total", where, least=1)
        prefix = fields.count(found, "prefix_tokens", where)
        if prefix > total:
            raise where.at("prefix_tokens").error(f"{prefix} of {total} input tokens")
        submitted, answered = _times(found, where)
        at = latest.get(session, 0.0) if submitted is None else submitted
        latest[session] = at
        service = round(max(answered - at, 0.0), 6) if answered is not None else 0.0
        index = fields.count(found, "round_index", where)
        output = fields.count(found, "output_tokens", where)
        rounds.append(Round(session, at, index, total, prefix, output, service))
    return rounds


def sessions_of(rounds: Iterable[Round], reading: Reading, block_tokens: int) -> list[Session]:
    """Return the sessions of rounds in any order; sessions that begin at the same time, by name."""
    groups: dict[str, list[Round]] = {}
    for one in rounds:
        groups.setdefault(one.session, []).append(one)
    for group in groups.values():
        group.sort(key=lambda one: (one.at_s, one.index))
    begin = min((group[0].at_s for group in groups.values()), default=0.0)
    ordered = sorted(groups.items(), key=lambda item: (item[1][0].at_s, item[0]))
    return [
        Session(name, block_tokens, _turns(group, reading, block_tokens), start_s=group[0].at_s - begin)
        for name, group in ordered
    ]


def kept_tokens(rounds: Sequence[Round], reading: Reading) -> list[int]:
    """Return how much of the prompt before it each round of a session keeps, 0 for the first."""
    kept = [0]
    for before, one in pairwise(rounds):
        grows = one.input_tokens >= before.input_tokens
        whole = reading is Reading.GROWTH and grows
        kept.append(min(before.input_tokens, one.input_tokens if whole else one.prefix_tokens))
    return kept[: len(rounds)]


def _turns(rounds: Sequence[Round], reading: Reading, block_tokens: int) -> tuple[Turn, ...]:
    lengths = [one.input_tokens for one in rounds]
    blocks = minted(zip(lengths, kept_tokens(rounds, reading), strict=True), block_tokens)
    turns = []
    ended = rounds[0].at_s
    for one, ids in zip(rounds, blocks, strict=True):
        # Seconds since 1970 have less than a microsecond left; the recorded times are milliseconds.
        start, gap = round(one.at_s - rounds[0].at_s, 6), round(max(one.at_s - ended, 0.0), 6)
        turns.append(Turn(one.input_tokens, one.output_tokens, ids, start, gap, one.service_s))
        ended = one.at_s + one.service_s
    return tuple(turns)


def _times(found: dict[str, Any], where: Where) -> tuple[float | None, float | None]:
    """Return when a round was submitted and when its answer was complete."""
    submitted: float | None = None
    answered: float | None = None
    place = where.at("timing_events")
    for index, value in enumerate(fields.items(fields.member(found, "timing_events", where), place)):
        event, at = fields.record(value, place.at(index)), place.at(index)
        kind, time_s = fields.text(event, "event_type", at), moment(event, "timestamp", at)
        if kind in _SUBMITS:
            submitted = time_s if submitted is None else max(submitted, time_s)
        elif kind in _ANSWERS:
            answered = time_s if answered is None else max(answered, time_s)
    return submitted, answered


def moment(of: dict[str, Any], name: str, where: Where) -> float:
    """Return an ISO 8601 time as seconds since 1970; without an offset it is UTC."""
    written = fields.text(of, name, where)
    try:
        found = datetime.fromisoformat(written)
    except ValueError:
        raise where.at(name).error(f"an ISO 8601 time is expected, not {fields.shown(written)}") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
