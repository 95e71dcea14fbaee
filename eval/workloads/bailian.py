"""Chats as published by Alibaba Cloud (Qwen-Bailian usage traces): JSON lines of 16-token block ids.

Every line is one turn with `chat_id` and the `parent_chat_id` it goes on from, -1 for a first turn. A session is a
first turn and all that goes on from it, by time; where two turns go on from the same one, the later is a session's
turn that rolls back. A turn whose parent is not in the file begins a session. Ids mean the same in the whole file.
Times are in seconds from the file's start; how long a turn took is not known.
"""

from __future__ import annotations

from pathlib import Path

from eval.workloads import fields
from eval.workloads.chains import Request, sessions_of
from eval.workloads.lines import json_lines
from eval.workloads.sessions import Session

BLOCK_TOKENS = 16
_NO_PARENT = -1


def read_sessions(path: Path) -> list[Session]:
    """Return the sessions in the order they begin.

    Raises:
        TraceError: a line is not as the schema says, or a chat id comes twice; names file, line and field.
        OSError: the file cannot be read.
    """
    turns: list[tuple[int, int, Request]] = []
    seen: set[int] = set()
    for value, where in json_lines(path):
        found = fields.record(value, where)
        chat = fields.count(found, "chat_id", where)
        if chat in seen:
            raise where.at("chat_id").error(f"{chat} is an earlier line's too")
        seen.add(chat)
        parent = fields.count(found, "parent_chat_id", where, least=_NO_PARENT)
        tokens = fields.count(found, "input_length", where, least=1)
        request = Request(
            fields.needed_seconds(found, "timestamp", where),
            tokens,
            fields.count(found, "output_length", where),
            fields.block_ids(found, "hash_ids", where, tokens, BLOCK_TOKENS),
        )
        turns.append((chat, parent, request))
    turns.sort(key=lambda turn: turn[2].at_s)  # equal times stay in the file's order: a parent comes first
    first_of: dict[int, int] = {}  # chat -> the first turn of its session
    groups: dict[int, list[Request]] = {}
    for chat, parent, request in turns:
        first = first_of[chat] = first_of.get(parent, chat)
        groups.setdefault(first, []).append(request)
    return sessions_of(groups.values(), BLOCK_TOKENS, [f"chat-{first}" for first in groups])
