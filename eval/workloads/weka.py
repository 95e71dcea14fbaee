"""Claude Code sessions as published by WEKA (kv-cache-tester) and in the corpora derived from them.

Read are: a file with one session as JSON, JSON lines with one session each, the latter compressed with
gzip or xz, and a folder of such files, by name. Rules of the schema, all checked:

- `hash_ids` has one id for each whole block of `in` tokens. Where it has one more, for the rest, that one is
  left out: a block that is not full is not the block that the next prompt has there.
- Ids count from 0 or from 1; they are only compared. `hash_id_scope` "local": they mean nothing elsewhere.
- `think_time` is the pause before a request and `api_time` how long it took. Where either is not known the
  pause is the difference of the `t`.
- `start_s`, which only `eval.workloads.save` writes, is when the session began on the clock of all.
- The `t` in a sub-agent count from its start, or from the session's start: the former if the first of them is
  less than the agent's own `t`. Its parent waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eval.workloads import fields
from eval.workloads.fields import TraceError, Where
from eval.workloads.lines import json_lines, one_json
from eval.workloads.sessions import Agent, Session, Turn

SUFFIXES = (".json", ".jsonl", ".jsonl.gz", ".jsonl.xz")
_AGENT = "subagent"
_REQUEST_TYPES = ("n", "s")


def read_sessions(path: Path) -> Iterator[Session]:
    """Yield the sessions of a file or folder, in order. Files are read as far as sessions are taken.

    Raises:
        TraceError: a file is not as the schema says; the message names file, line and field.
        OSError: it cannot be read.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        if not files:
            raise TraceError(f"{path}: no file here ends in {', '.join(SUFFIXES)}")
        for file in files:
            yield from read_sessions(file)
    elif path.name.endswith(".json"):
        yield session_of(*one_json(path))
    else:
        for value, where in json_lines(path):
            yield session_of(value, where)


def session_of(value: Any, where: Where) -> Session:
    """Return the session that a JSON object describes; errors as in `read_sessions`."""
    found = fields.record(value, where)
    name = fields.text(found, "id", where)
    block = fields.count(found, "block_size", where, least=1)
    scope = found.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise where.at("hash_id_scope").error(f"local or global is expected, not {fields.shown(scope)}")
    place = where.at("requests")
    entries = fields.items(fields.member(found, "requests", where), place)
    own: list[tuple[dict[str, Any], Where]] = []
    spawns: list[tuple[dict[str, Any], Where, int]] = []
    for index, entry in enumerate(entries):
        at = place.at(index)
        kind = fields.text(fields.record(entry, at), "type", at)
        if kind == _AGENT:
            spawns.append((entry, at, len(own) - 1))
        elif kind in _REQUEST_TYPES:
            own.append((entry, at))
        else:
            expected = ", ".join((*_REQUEST_TYPES, _AGENT))
            raise at.at("type").error(f"one of {expected} is expected, not {fields.shown(kind)}")
    turns = _turns(own, block, 0.0)
    agents = tuple(_agent(*spawn, turns, block) for spawn in spawns)
    begin = fields.seconds(found, "start_s", where) or 0.0
    return Session(name, block, turns, agents, shared_ids=scope == "global", start_s=begin)


def _agent(found: dict[str, Any], where: Where, after: int, parent: tuple[Turn, ...], block: int) -> Agent:
    start = fields.needed_seconds(found, "t", where)
    place = where.at("requests")
    entries = [
        (fields.record(entry, place.at(index)), place.at(index))
        for index, entry in enumerate(fields.items(fields.member(found, "requests", where), place))
    ]
    for entry, at in entries:
        if fields.text(entry, "type", at) not in _REQUEST_TYPES:
            raise at.at("type").error(f"one of {', '.join(_REQUEST_TYPES)} is expected inside a sub-agent")
    first = fields.needed_seconds(entries[0][0], "t", entries[0][1]) if entries else 0.0
    turns = _turns(entries, block, start if first < start else 0.0)
    ended = parent[after].start_s + parent[after].service_s if after >= 0 else 0.0
    return Agent(fields.text(found, "agent_id", where), after, max(start - ended, 0.0), turns)


def _turns(entries: list[tuple[dict[str, Any], Where]], block: int, offset_s: float) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    took: float | None = None
    for entry, where in entries:
        tokens = fields.count(entry, "in", where, least=1)
        start = fields.needed_seconds(entry, "t", where) + offset_s
        think = fields.seconds(entry, "think_time", where)
        if not turns:
            gap = 0.0
        elif think is None or took is None:
            gap = max(start - turns[-1].start_s - turns[-1].service_s, 0.0)
        else:
            gap = think
        took = fields.seconds(entry, "api_time", where)
        blocks = fields.block_ids(entry, "hash_ids", where, tokens, block)
        turns.append(Turn(tokens, fields.count(entry, "out", where), blocks, start, gap, took or 0.0))
    return tuple(turns)
