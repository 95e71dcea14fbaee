"""What an interrupted run left that need not be run again: whole sessions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.records import Record, RecordsError, RecordWriter, RunFacts, read_run
from eval.replay.requests import SessionRequests

# Facts that may differ between the two parts of a run that was interrupted.
_FREE = ("machine", "round", "position")


@dataclass(frozen=True)
class Kept:
    """`records` of the sessions that are complete, `left`: the others, `end_s`: when the last kept request ended."""

    records: tuple[Record, ...]
    left: tuple[SessionRequests, ...]

    @property
    def end_s(self) -> float:
        return max((record.end_s for record in self.records), default=0.0)


def keep(path: Path, run: RunFacts, sessions: Sequence[SessionRequests]) -> Kept:
    """Read what is in `path`, if there is such a file. A session whose requests are all there, failed or not, is complete.

    `run` has the facts that are known before it.

    Raises:
        RecordsError: the file is no records, or of another system, other requests or other settings.
    """
    if not path.exists():
        return Kept((), tuple(sessions))
    found, records = read_run(path)
    _check_same(path, found, run)
    there = {record.key for record in records}
    whole = {
        session.name
        for session in sessions
        if all(request.key in there for request in session.all_requests())
    }
    return Kept(
        tuple(record for record in records if record.session in whole),
        tuple(session for session in sessions if session.name not in whole),
    )


def complete(path: Path, run: RunFacts) -> bool:
    """Say whether `path` has the whole of this run.

    Raises:
        RecordsError: as in `keep`.
    """
    if not path.exists():
        return False
    found, _ = read_run(path)
    _check_same(path, found, run)
    return bool(found.facts.get("complete"))


def _check_same(path: Path, found: RunFacts, run: RunFacts) -> None:
    wanted = json.loads(json.dumps(run.facts))  # as a file has them: lists, no tuples
    pairs = [(name, getattr(found, name), getattr(run, name)) for name in ("system", "workload")]
    pairs += [(name, found.facts.get(name), value) for name, value in wanted.items() if name not in _FREE]
    for name, there, here in pairs:
        if there != here:
            raise RecordsError(
                f"{path}: recorded with {name} {there!r}, not {here!r}: --resume needs the options of the run that was "
                "interrupted; give another --out, or leave --resume away"
            )


class GrowingRun:
    """A records file that is always whole: what was kept is in it from the start, its facts change at the end."""

    def __init__(self, path: Path, run: RunFacts, kept: Sequence[Record]) -> None:
        self._path = path
        self._run = run
        self._records = list(kept)
        self._writer = self._rewritten()

    def add(self, record: Record) -> None:
        self._records.append(record)
        self._writer.add(record)

    def finish(self, facts: dict[str, Any]) -> None:
        """Add `facts` to those of the run, and close the file."""
        self._writer.close()
        self._run = replace(self._run, facts={**self._run.facts, **facts})
        self._rewritten().close()

    def close(self) -> None:
        """Close the file as it is."""
        self._writer.close()

    @property
    def records(self) -> list[Record]:
        return list(self._records)

    def _rewritten(self) -> RecordWriter:
        aside = self._path.with_name(self._path.name + ".part")
        writer = RecordWriter(aside, self._run)
        for record in self._records:
            writer.add(record)
        os.replace(aside, self._path)  # the open file keeps its name
        return writer
