"""Which sessions are replayed: a trace's, by name or from a file, or the synthetic rewriting ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eval.workloads.load import read
from eval.workloads.rewriting import Rewriting, rewriting_sessions
from eval.workloads.select import select
from eval.workloads.sessions import Session

TRACES = Path(__file__).parents[2] / "../shared/traces"
WEKA = Path("weka_cc/weka_cc_710.jsonl.xz")
NAMES = {
    "weka": f"recorded Claude Code sessions, {WEKA} in the folder of --traces",
    "w125": "its 125-session selection (w125.json beside it)",
    "rewriting:PERCENT": "the paper's synthetic workload with so many rewriting requests, such as rewriting:10",
}


@dataclass(frozen=True)
class Selection:
    """Sessions of `source` (a name or a path) of `format` (None: found out) after `steps` (see `workloads.select`).

    Each is cut before its first request of more than `context` tokens and after `turns` turns; the first `sessions`
    (None: all) that have `least_turns` then are taken.
    """

    source: str
    format: str | None = None
    steps: str = ""
    sessions: int | None = None
    context: int = 131072
    turns: int | None = None
    least_turns: int = 1
    traces: Path = TRACES

    @property
    def name(self) -> str:
        kind, _, percent = self.source.partition(":")
        what = _rewriting(percent).name if kind == "rewriting" else Path(self.source).name
        parts = [
            what,
            *([self.format] if self.format else []),
            *([self.steps] if self.steps else []),
            "all sessions" if self.sessions is None else f"{self.sessions} sessions",
            f"cut at {self.context} tokens" + ("" if self.turns is None else f" and {self.turns} turns"),
            *([f"of {self.least_turns} turns or more"] if self.least_turns > 1 else []),
        ]
        return ", ".join(parts)


def load(selection: Selection) -> list[Session]:
    """Return the sessions.

    Raises:
        ValueError: there is no such file, or nothing in it is long enough; the message names the flag. Also what
            `read`, `select` and `Rewriting` raise, all of them ValueErrors.
        OSError: the file cannot be read.
    """
    found: list[Session] = []
    for session in _sessions(selection):
        if len(found) == selection.sessions:
            break
        kept = session.cut(selection.context, selection.turns)
        if len(kept.turns) >= selection.least_turns:
            found.append(kept)
    if not found:
        raise ValueError(
            f"--workload {selection.source}: no session has {selection.least_turns} turns below {selection.context} "
            "tokens: raise --context"
        )
    return found


def _sessions(selection: Selection) -> Iterable[Session]:
    kind, _, percent = selection.source.partition(":")
    if kind == "rewriting":
        return rewriting_sessions(_rewriting(percent))
    named = kind in ("weka", "w125")
    path = selection.traces / WEKA if named else Path(selection.source)
    if not path.exists():
        hint = f"there is no {WEKA} in --traces" if named else "no such file or folder"
        raise ValueError(f"--workload {selection.source}: {hint}: give the path of a trace, or rewriting:10")
    steps = ",".join(part for part in ("w125" if kind == "w125" else "", selection.steps) if part)
    return select(read(path, selection.format), steps, near=path)


def _rewriting(percent: str) -> Rewriting:
    try:
        share = float(percent) / 100
    except ValueError:
        raise ValueError(
            f"--workload rewriting:{percent}: a percentage is expected, such as rewriting:10"
        ) from None
    return Rewriting(share)
