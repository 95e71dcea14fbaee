"""Which recorded sessions are replayed, by name or from a file."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from eval.workloads.sessions import Session
from eval.workloads.weka import read_sessions

TRACES = Path(__file__).parents[2] / "../shared/traces"
WEKA = Path("weka_cc/weka_cc_710.jsonl.xz")
LEAST_TURNS = 3


@dataclass(frozen=True)
class Selection:
    """The first `sessions` (None: all) of `source` after `skip`, each cut where it exceeds `context` tokens or has
    `turns` turns, and only those that have three turns or more then.
    """

    source: str
    sessions: int | None
    skip: int
    context: int
    turns: int | None

    @property
    def name(self) -> str:
        count = "all" if self.sessions is None else f"{self.sessions}"
        start = f" after {self.skip}" if self.skip else ""
        turns = "" if self.turns is None else f" and {self.turns} turns"
        return f"{Path(self.source).name}, {count} sessions{start}, cut at {self.context} tokens{turns}"


def load(selection: Selection, traces: Path = TRACES) -> list[Session]:
    """Return the sessions.

    Raises:
        ValueError: there is no such file, or nothing in it is long enough; the message names the flag.
        TraceError, OSError: the file cannot be read.
    """
    path = traces / WEKA if selection.source == "weka" else Path(selection.source)
    if not path.exists():
        hint = "it is not beside the repository" if selection.source == "weka" else "no such file or folder"
        raise ValueError(f"--workload {selection.source}: {hint}: give the path of a trace")
    found: list[Session] = []
    for session in islice(read_sessions(path), selection.skip, None):
        if len(found) == selection.sessions:
            break
        kept = session.cut(selection.context, selection.turns)
        if len(kept.turns) >= LEAST_TURNS:
            found.append(kept)
    if not found:
        raise ValueError(
            f"--workload {selection.source}: no session has {LEAST_TURNS} turns below {selection.context} tokens: "
            "raise --context"
        )
    return found
