"""What a run leaves behind: one line of JSON about the run, then one for each request.

The real server's client and the simulator write the same form, so that one report reads both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FORMAT = 1


class RecordsError(ValueError):
    """A file is no records of this form; the message names file and line."""


@dataclass(frozen=True)
class RunFacts:
    """The first line. `system` is the name that tables show; `source` is "engine" or "simulation".

    `workload` names the requests (two runs with equal names had equal requests). `facts` is anything else that a
    reader needs to repeat or judge the run: budgets in bytes, flags, machine, cost model, counters at the end.
    """

    system: str
    source: str
    workload: str
    commit: str
    command: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """One request. Times are seconds from the run's start, lengths tokens.

    `eligible_s`: when the turn could have been sent (end of the turn before and its pause; queueing counts from
    here). `sent_s`: when it was. `first_token_s`, `end_s`: when the first token and the last one came.
    `restored`: prompt tokens not computed again, by the tier that their KV was read from, keys of `TIERS`.
    `checkpoint_tier`: where the one state was read from, "" if nothing was restored.
    `kv_match`: tokens whose KV some tier had, restorable or not; None where the system does not tell.
    `reusable`: what an infinite cache (all KV, a state at every page) would restore: the bound, from the workload.
    `rewrite`: whether this prompt leaves the path of the session's earlier turns before their end.
    `error`: "" or what went wrong; the other figures then mean nothing.
    """

    session: str
    agent: str
    turn: int
    eligible_s: float
    sent_s: float
    first_token_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    restored: dict[str, int]
    checkpoint_tier: str
    kv_match: int | None
    reusable: int
    rewrite: bool
    error: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """What is the same for the same request in every run of a workload."""
        return self.session, self.agent, self.turn

    @property
    def ttft_s(self) -> float:
        """Seconds from eligible to the first token."""
        return self.first_token_s - self.eligible_s

    @property
    def hit(self) -> int:
        """Prompt tokens that were not computed again."""
        return sum(self.restored.values())

    @property
    def recomputed_with_kv(self) -> int | None:
        """Tokens computed again although their KV was there; None where the system does not tell."""
        return None if self.kv_match is None else max(self.kv_match - self.hit, 0)


TIERS = ("device", "host", "ssd")
_NAMES = tuple(one.name for one in fields(Record))


class RecordWriter:
    """Append records to a file, line by line, so that a run that ends early leaves what it had."""

    def __init__(self, path: Path, run: RunFacts) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._line({"format": FORMAT, **asdict(run)})

    def add(self, record: Record) -> None:
        self._line(asdict(record))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps(content, separators=(",", ":")) + "\n")


def read_run(path: Path) -> tuple[RunFacts, list[Record]]:
    """Return a file's run and records. A last line that was cut off is left out.

    Raises:
        RecordsError: see there.
        OSError: the file cannot be read.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    if not lines or not lines[0]:
        raise RecordsError(f"{path}: empty: no run was recorded here")
    head = _object(path, 1, lines[0])
    if head.pop("format", None) != FORMAT:
        raise RecordsError(f"{path}:1: no records of format {FORMAT}: run the evaluation again")
    try:
        run = RunFacts(**head)
    except TypeError as error:
        raise RecordsError(f"{path}:1: {error}") from None
    return run, list(_records(path, lines))


def _records(path: Path, lines: list[str]) -> Iterator[Record]:
    for number, line in enumerate(lines[1:-1], 2):  # what follows the last newline is empty or cut off
        found = _object(path, number, line)
        if tuple(sorted(found)) != tuple(sorted(_NAMES)):
            raise RecordsError(f"{path}:{number}: the fields of a record are {', '.join(_NAMES)}")
        yield Record(**found)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise RecordsError(f"{path}:{number}: no JSON: {error.msg}") from None
    if not isinstance(found, dict):
        raise RecordsError(f"{path}:{number}: an object is expected")
    return found
