"""Small hand-made traces, one of every format, as the lines of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[3] / "shared/traces"
"""Recorded traces beside the repository; tests that need them are skipped where they are not."""


def write(folder: Path, name: str, *lines: Any) -> Path:
    """Write one JSON value a line, texts as they are, and return the file."""
    file = folder / name
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


MOONCAKE: list[Any] = [
    {"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]},
    {"timestamp": 105, "input_length": 1800, "output_length": 26, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 3274, "input_length": 1024, "output_length": 30, "hash_ids": [8, 9]},
]
BAILIAN: list[Any] = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 64, "output_length": 20,
     "type": "text", "turn": 1, "hash_ids": [0, 1, 2, 3]},
    {"chat_id": 3, "parent_chat_id": -1, "timestamp": 10.0, "input_length": 50, "output_length": 9,
     "type": "search", "turn": 1, "hash_ids": [0, 1, 7, 8]},
    {"chat_id": 2, "parent_chat_id": 1, "timestamp": 9.5, "input_length": 112, "output_length": 15,
     "type": "text", "turn": 2, "hash_ids": [0, 1, 2, 3, 4, 5, 6]},
    {"chat_id": 5, "parent_chat_id": 2, "timestamp": 20.0, "input_length": 16, "output_length": 15,
     "type": "text", "turn": 3, "hash_ids": [0]},
    {"chat_id": 6, "parent_chat_id": 99, "timestamp": 30.0, "input_length": 16, "output_length": 1,
     "type": "text", "turn": 4, "hash_ids": [0]},
]  # fmt: skip
AIPERF: list[Any] = [
    {"session_id": "s1", "input_length": 1536, "output_length": 320, "hash_ids": [0, 1, 2], "timestamp": 0.0},
    {"session_id": "s1", "input_length": 768, "output_length": 180, "hash_ids": [10, 11], "delay": 2450.0},
    {"session_id": "s2", "input_length": 1024, "output_length": 9, "hash_ids": [0, 20], "timestamp": 500.0},
]
TOKENS: list[Any] = [
    {"input_tokens": list(range(100, 230)), "num_output_tokens": 4, "ts": 0.0},
    {"input_tokens": list(range(100, 330)), "output_tokens": [1, 2, 3], "ts": 1.5},
    {"input_tokens": list(range(500, 600)), "num_output_tokens": 1, "ts": 2.0, "num_input_tokens": 100},
]
CSV = [
    "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms",
    "7,500,0,0,640,64,100",
    "7,500,2,128,192,64,0",
    "7,500,1,640,128,64,2500",
    "8,900,0,0,64,1,0",
]
CHAT: list[Any] = [
    {"timestamp": "2026-01-01T00:00:00Z", "session_id": "a", "usage": {"completion_tokens": 12},
     "messages": [{"role": "system", "content": "You are a careful coding agent who reads all it needs before it writes anything at all."},
                  {"role": "user", "content": [{"type": "text", "text": "Please fix the failing test in a.py"}]}]},
    {"timestamp": "2026-01-01T00:00:05Z", "session_id": "a", "response": "Done.",
     "messages": [{"role": "system", "content": "You are a careful coding agent who reads all it needs before it writes anything at all."},
                  {"role": "user", "content": "Please fix the failing test in a.py"},
                  {"role": "assistant", "content": None, "tool_calls": [
                      {"id": "1", "type": "function", "function": {"name": "run", "arguments": "{\"x\": 1}"}}]},
                  {"role": "tool", "content": "3 tests failed", "tool_call_id": "1"}]},
]  # fmt: skip


def weka(name: str, *requests: Any, **more: Any) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **more}


def weka_request(t: float, ids: list[int], rest: int = 10, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": 64 * len(ids) + rest, "out": 5, "hash_ids": ids, **more}


WEKA: list[Any] = [weka("w", weka_request(0.0, [1, 2, 3]), weka_request(5.0, [1, 2, 3, 4]))]


def tracelab_round(
    index: int,
    at: str,
    total: int,
    prefix: int,
    *,
    session: str = "codex:1",
    answered: str | None = None,
    output: int = 10,
) -> dict[str, Any]:
    """A round submitted at `at`, a time on 2026-01-01, whose last text came at `answered`."""
    events = [
        {"event_type": "user_message", "timestamp": "2026-01-01T00:00:00.000Z", "source": "u"},
        {"event_type": "tool_result", "timestamp": f"2026-01-01T{at}Z", "source": "r"},
        {"event_type": "usage_report", "timestamp": "2026-01-01T23:00:00Z", "source": "r"},
    ]
    if answered:
        events.append({"event_type": "text", "timestamp": f"2026-01-01T{answered}Z", "source": "r"})
    return {
        "provider": "codex", "session_id": session, "round_index": index, "input_tokens_total": total,
        "prefix_tokens": prefix, "newly_append_tokens": total - prefix, "output_tokens": output,
        "timing_events": events,
    }  # fmt: skip


TRACELAB: list[Any] = [
    tracelab_round(0, "00:00:01", 6400, 0, answered="00:00:05"),
    tracelab_round(2, "00:00:30", 3200, 1280, answered="00:00:31"),  # shrinks; out of order in the file
    tracelab_round(1, "00:00:09", 7040, 1280, answered="00:00:12.500"),  # grows, though little was cached
]
FILES: dict[str, tuple[str, list[Any]]] = {
    "weka": ("w.jsonl", WEKA),
    "tracelab:growth": ("t.jsonl", TRACELAB),
    "tracelab:csv": ("t.csv", CSV),
    "mooncake": ("m.jsonl", MOONCAKE),
    "bailian": ("b.jsonl", BAILIAN),
    "aiperf": ("a.jsonl", AIPERF),
    "tokens": ("k.jsonl", TOKENS),
    "openai": ("o.jsonl", CHAT),
}
"""Format -> the name and lines of a file that is of it."""
