"""Writing sessions of any format as a trace that `eval.workloads.weka` reads: ids and lengths, no text.

So a log of messages is tokenised once, and what is simulated or replayed later has none of what was said. All fields
of the published schema are there, because other readers of it refuse a session that lacks one, or has one more:
`start_s`, which is ours, is written only where sessions have a common clock.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from eval.workloads.sessions import Agent, Session, Turn

MODEL = "recorded"
"""Stands for every model: sessions do not keep which one it was."""


def saved(sessions: Iterable[Session], path: Path) -> Iterator[Session]:
    """Yield the sessions and write each to `path` as it goes by: JSON lines, xz if the name ends so.

    A name without an ending is a folder's, which gets one file for each session, as the trace was published and as
    AIPerf takes it; by name they are in the order of the sessions. What is read back has the same turns, agents and
    times; the delays of agents but for rounding. A name that ends in anything but .jsonl or .jsonl.xz is refused,
    because `weka.read_sessions` would not know it.

    Raises:
        ValueError: such a name, or a folder that has sessions already.
        OSError: the file cannot be written.
    """
    if not path.suffix:
        yield from _into_folder(sessions, path)
        return
    if not path.name.endswith((".jsonl", ".jsonl.xz")):
        raise ValueError(
            f"{path}: a trace's name ends in .jsonl or .jsonl.xz, or has no ending and is a folder's"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    file: IO[str]
    with (
        lzma.open(path, "wt", encoding="utf-8")
        if path.name.endswith(".xz")
        else path.open("w", encoding="utf-8")
    ) as file:
        for session in sessions:
            file.write(_text(session))
            yield session


def _into_folder(sessions: Iterable[Session], folder: Path) -> Iterator[Session]:
    folder.mkdir(parents=True, exist_ok=True)
    if next(folder.glob("*.json*"), None):
        raise ValueError(f"{folder} has sessions already: name a new folder")
    for number, session in enumerate(sessions):
        # Not by the session's name, which may be no file's name, and would change the order.
        (folder / f"{number:06}.json").write_text(_text(session), encoding="utf-8")
        yield session


def _text(session: Session) -> str:
    return json.dumps(_object(session), separators=(",", ":")) + "\n"


def _object(session: Session) -> dict[str, Any]:
    spawned: dict[int, list[Agent]] = {}
    for agent in session.agents:
        spawned.setdefault(agent.after, []).append(agent)
    requests: list[dict[str, Any]] = []
    ended = 0.0
    own = _requests(session.turns)
    for index in range(-1, len(session.turns)):
        if index >= 0:
            requests.append(own[index])
            ended = session.turns[index].start_s + session.turns[index].service_s
        for agent in spawned.get(index, ()):
            # Inner times count from the session's start, which the reader knows by their not being before `t`.
            start = min([ended + agent.delay_s, *(turn.start_s for turn in agent.turns[:1])])
            requests.append(_agent(agent, start))
    found: dict[str, Any] = {
        "id": session.name,
        "models": [MODEL],
        "block_size": session.block_tokens,
        "hash_id_scope": "global" if session.shared_ids else "local",
        "tool_tokens": 0,
        "system_tokens": 0,
        "requests": requests,
    }
    return found | ({"start_s": session.start_s} if session.start_s else {})


def _agent(agent: Agent, start_s: float) -> dict[str, Any]:
    end_s = max((turn.start_s + turn.service_s for turn in agent.turns), default=start_s)
    return {
        "type": "subagent",
        "t": start_s,
        "agent_id": agent.name,
        "subagent_type": MODEL,
        "duration_ms": round(1000 * (end_s - start_s)),
        "total_tokens": sum(turn.input_tokens + turn.output_tokens for turn in agent.turns),
        "tool_use_count": None,
        "status": "completed",
        "models": [MODEL],
        "requests": _requests(agent.turns),
    }


def _requests(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return [
        {
            "t": turn.start_s,
            "type": "n",
            "model": MODEL,
            "in": turn.input_tokens,
            "out": turn.output_tokens,
            "hash_ids": list(turn.blocks),
            "api_time": turn.service_s,
            "think_time": turn.gap_s,
        }
        for turn in turns
    ]
