"""Runs that may stand in one table: records files of one workload, by system.

A system may have several runs (repeats); their requests are put together. Nothing here computes a figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.records import Record, RecordsError, RunFacts, read_run

Key = tuple[str, str, int]

# Rows of every table, and which colour a system has: the bound first, then ours, then the others by what they keep.
ORDER = (
    "infinite",
    "histate",
    "histate-all",
    "histate-all-tiers",
    "histate-learned-loss",
    "histate-learned",
    "histate-scarce",
    "histate-loss",
    "histate-bf16",
    "histate-below",
    "histate-tiers",
    "histate-tail",
    "histate-dense",
    "histate-free",
    "histate-packed",
    "histate-lru",
    "histate-lru-refresh",
    "histate-align",
    "histate-fixed",
    "histate-fixed32",
    "histate-none",
    "vllm-disk",
    "vllm-cpu",
    "hicache",
    "hicache-ends",
    "marconi",
    "stock",
    "none",
    "nocache",
)


# Facts that are no system's own: where two runs tell different ones, their difference is not the systems'.
SETTINGS = (
    "budgets", "device_bytes", "host_bytes", "ssd_bytes", "costs", "tuning", "model", "chunk_tokens", "running_requests",
    "live_sessions", "pause_cap_s",
)  # fmt: skip


class NotComparable(ValueError):
    """Runs that must not stand in one table; the message is one sentence that names the files."""


@dataclass(frozen=True)
class Run:
    """One records file."""

    path: Path
    facts: RunFacts
    records: tuple[Record, ...]

    @property
    def good(self) -> list[Record]:
        """Requests that did not fail."""
        return [record for record in self.records if not record.error]


@dataclass(frozen=True)
class Comparison:
    """Runs of one workload from one source ("engine" or "simulation"), by system in the order of tables."""

    workload: str
    source: str
    systems: dict[str, tuple[Run, ...]]

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.systems.values() for run in runs]

    @property
    def commit(self) -> str:
        """The one commit, or all of them in order, with commas between."""
        return ", ".join(dict.fromkeys(run.facts.commit for run in self.runs))

    @property
    def keys(self) -> frozenset[Key]:
        """Every request that at least one run has."""
        return frozenset(record.key for run in self.runs for record in run.records)


def load(paths: Iterable[Path]) -> list[Run]:
    """Read records files; a folder stands for every *.jsonl below it, in the order of their names.

    Raises:
        RecordsError: a file is none, or a folder has none.
        OSError: a path cannot be read.
    """
    files: dict[Path, Path] = {}  # one file may be named in two ways
    for path in paths:
        if path.is_dir():
            found = sorted(path.rglob("*.jsonl"))
            if not found:
                raise RecordsError(f"{path}: no records (*.jsonl) in this folder: give one that a run wrote")
        else:
            found = [path]
        for file in found:
            files.setdefault(file.resolve(), file)
    runs = []
    for file in files.values():
        facts, records = read_run(file)
        runs.append(Run(file, facts, tuple(records)))
    return runs


def compare(runs: Sequence[Run]) -> Comparison:
    """Group `runs` by system.

    Raises:
        NotComparable: no run, other workloads, engine and simulation mixed, other `SETTINGS`, a request twice in one
            run, or runs whose requests are not the same although they are said to be.
    """
    if not runs:
        raise NotComparable("no run was given: name a records file or a folder of them")
    first = runs[0]
    for run in runs:
        for what in ("workload", "source"):
            mine, other = getattr(first.facts, what), getattr(run.facts, what)
            if mine != other:
                raise NotComparable(
                    f"{first.path} is of {what} {mine!r} and {run.path} of {other!r}: compare runs of one {what} "
                    "at a time"
                )
    _check_settings(runs)
    _check_requests(runs)
    names = dict.fromkeys(run.facts.system for run in runs)
    ordered = sorted(names, key=place)
    return Comparison(
        first.facts.workload,
        first.facts.source,
        {name: tuple(run for run in runs if run.facts.system == name) for name in ordered},
    )


def place(system: str) -> tuple[int, str]:
    """Sorting key of a system's row; unknown ones come last, by name."""
    return (ORDER.index(system) if system in ORDER else len(ORDER)), system


def _check_settings(runs: Sequence[Run]) -> None:
    told: dict[str, tuple[object, Path]] = {}
    for run in runs:
        for name in SETTINGS:
            if name not in run.facts.facts:
                continue
            mine = run.facts.facts[name]
            other, path = told.setdefault(name, (mine, run.path))
            if other != mine:
                raise NotComparable(
                    f"{path} was made with {name} {other} and {run.path} with {mine}: compare runs of equal settings, "
                    "in folders of their own"
                )


def _check_requests(runs: Sequence[Run]) -> None:
    seen: dict[Key, tuple[int, Path]] = {}
    for run in runs:
        counts = Counter(record.key for record in run.records)
        twice = next((key for key, count in counts.items() if count > 1), None)
        if twice is not None:
            raise NotComparable(f"{run.path} has request {_shown(twice)} more than once: run it again")
        for record in run.records:
            tokens, path = seen.setdefault(record.key, (record.prompt_tokens, run.path))
            if tokens != record.prompt_tokens:
                raise NotComparable(
                    f"request {_shown(record.key)} has {tokens} prompt tokens in {path} and {record.prompt_tokens} in "
                    f"{run.path}: these are not runs of one workload"
                )


def _shown(key: Key) -> str:
    session, agent, turn = key
    return f"{session}{'/' + agent if agent else ''} turn {turn}"
