"""Writing sessions of any format as a trace that `eval.workloads.weka` reads: ids and lengths, no text.

So a log of messages is tokenised once, and what is simulated or replayed later has none of what was said.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from eval.workloads.sessions import Agent, Session, Turn


def saved(sessions: Iterable[Session], path: Path) -> Iterator[Session]:
    """Yield the sessions and write each to `path` as it goes by: JSON lines, xz if the name ends so.

    What is read back has the same turns, agents and times; the delays of agents but for rounding. A name that ends
    in anything but .jsonl or .jsonl.xz is refused, because `weka.read_sessions` would not know it.

    Raises:
        ValueError: such a name.
        OSError: the file cannot be written.
    """
    if not path.name.endswith((".jsonl", ".jsonl.xz")):
        raise ValueError(f"{path}: a trace's name ends in .jsonl or .jsonl.xz")
    path.parent.mkdir(parents=True, exist_ok=True)
    file: IO[str]
    with (
        lzma.open(path, "wt", encoding="utf-8")
        if path.name.endswith(".xz")
        else path.open("w", encoding="utf-8")
    ) as file:
        for session in sessions:
            file.write(json.dumps(_object(session), separators=(",", ":")) + "\n")
            yield session


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
            requests.append(
                {"type": "subagent", "t": start, "agent_id": agent.name, "requests": _requests(agent.turns)}
            )
    return {
        "id": session.name,
        "block_size": session.block_tokens,
        "hash_id_scope": "global" if session.shared_ids else "local",
        "start_s": session.start_s,
        "requests": requests,
    }


def _requests(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return [
        {
            "t": turn.start_s,
            "type": "n",
            "in": turn.input_tokens,
            "out": turn.output_tokens,
            "hash_ids": list(turn.blocks),
            "api_time": turn.service_s,
            "think_time": turn.gap_s,
        }
        for turn in turns
    ]
