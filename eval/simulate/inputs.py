"""What is served: a named workload or a recorded file, as sessions and under a name that equal requests share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eval.workloads.adversarial import Adversarial, Kind, adversarial_sessions
from eval.workloads.codex import codex_workload
from eval.workloads.load import read
from eval.workloads.rewriting import After, Depth, Rewriting, rewriting_sessions
from eval.workloads.select import select
from eval.workloads.sessions import Session
from eval.workloads.shared_prefix import with_shared_prefix
from eval.workloads.tracelab import Reading

TRACES = Path(__file__).parents[2] / "../shared/traces"
W125_TRACE = "weka_cc/weka_cc_710.jsonl.xz"
NAMED = {
    "w125": f"125 recorded Claude Code sessions; {W125_TRACE} and its w125.json are in the folder of --traces",
    "rewriting": "made: 24 sessions of 16 turns with 8,192 new tokens each, see --share, --depth and --after",
    "codex": "made: 68 sessions with 4,791 requests that have the published aggregates of Codex, see --reading",
    "adversarial-shift": "made: 96 sessions, the first half rewrites the last block, the second half parts anywhere",
    "adversarial-uniform": "made: 96 sessions that part anywhere",
    "adversarial-flood": "made: the same, beside one tenant whose long prompts nobody sends again",
}
_ADVERSARIAL = {f"adversarial-{kind.value}": kind for kind in Kind}


class BadInput(ValueError):
    """The workload cannot be had; the message names the flag and the way out."""


@dataclass(frozen=True)
class Workload:
    """The flags that choose the requests; see `python -m eval.simulate --help`. Lengths in tokens."""

    source: str
    traces: Path = TRACES
    format: str | None = None
    selection: str = ""
    shared_prefix: int = 0
    share: float = 0.1
    depth: Depth = Depth.UNIFORM
    after: After = After.DISCARD
    reading: Reading = Reading.GROWTH
    seed: int = 0

    @property
    def name(self) -> str:
        """Equal names, equal requests (but for other files of one name)."""
        if self.source == "rewriting":
            name = self._rewriting.name
        elif self.source in _ADVERSARIAL:
            name = self._adversarial.name
        elif self.source == "codex":
            name = f"codex:{self.reading.value} seed {self.seed}"
        else:
            name = self.source if self.source == "w125" else Path(self.source).name
            if self.format:
                name += f" as {self.format}"
        if self.selection:
            name += f" ({self.selection})"
        return f"{name} + shared prefix {self.shared_prefix}" if self.shared_prefix else name

    @property
    def _rewriting(self) -> Rewriting:
        return Rewriting(share=self.share, depth=self.depth, after=self.after, seed=self.seed)

    @property
    def _adversarial(self) -> Adversarial:
        return Adversarial(_ADVERSARIAL[self.source], seed=self.seed)

    def sessions(self) -> list[Session]:
        """Return the sessions.

        Raises:
            BadInput: there is no such file, or no request in it.
            ValueError: what the loaders and makers say (TraceError, BadSelection and others are ValueErrors).
            OSError: the file cannot be read.
        """
        made: Iterable[Session]
        near: Path | None = None
        if self.source == "rewriting":
            made = rewriting_sessions(self._rewriting)
        elif self.source in _ADVERSARIAL:
            made = adversarial_sessions(self._adversarial)
        elif self.source == "codex":
            made = codex_workload(self.reading, seed=self.seed)
        else:
            near = self.traces / W125_TRACE if self.source == "w125" else Path(self.source)
            if not near.exists():
                raise BadInput(
                    f"--workload {self.source}: there is no {near}: give a file, one of {', '.join(NAMED)}, or --traces"
                )
            made = read(near, self.format)
        chosen = "w125" if self.source == "w125" else ""
        text = ",".join(part for part in (chosen, self.selection) if part)
        found = select(made, text, near)
        if self.shared_prefix:
            found = with_shared_prefix(found, self.shared_prefix)
        sessions = [session for session in found if session.requests]
        if not sessions:
            raise BadInput(f"--workload {self.source}: no request is left after --select {self.selection}")
        return sessions
