"""One entry to all recorded workloads: `read(path)` finds out what a file is, or is told.

    for session in read(Path("trace.jsonl")): ...
    for session in read(Path("rounds.jsonl.gz"), "tracelab:prefix"): ...

`FORMATS` has one line about each, for the help of commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from eval.workloads import (
    aiperf,
    bailian,
    interleaved,
    mooncake,
    openai_log,
    token_trace,
    tracelab,
    tracelab_csv,
    weka,
)
from eval.workloads.chat_tokens import DEMO, ChatTokens, NoTokenizer
from eval.workloads.fields import TraceError, Where
from eval.workloads.lines import one_json, parsed, text_lines
from eval.workloads.sessions import Session
from eval.workloads.tracelab import Reading

FORMATS = {
    "weka": "Claude Code sessions of WEKA's kv-cache-tester: JSON, JSON lines (.gz, .xz) or a folder; 64-token ids",
    "weka:split": "the same, with parallel agents that were recorded in one list told apart by their text",
    "tracelab:growth": "TraceLab rounds; a prompt that grows keeps all, one that shrinks keeps what was cached",
    "tracelab:prefix": "TraceLab rounds; a prompt keeps what the provider's cache found, misses become rewrites",
    "tracelab:csv": "input of TraceLab's replayer: rows of prefix_len, input_len, output_len, tool_wait_after_ms",
    "mooncake": "Mooncake requests, 512-token ids, put together to sessions by the text they share",
    "mooncake:single": "the same, every request a session of its own at its own time",
    "bailian": "Qwen-Bailian chats, 16-token ids, sessions by parent_chat_id",
    "aiperf": "AIPerf's Mooncake dialect: session_id, lengths and ids of what each turn adds",
    "tokens": "SGLang token traces: input_tokens of every request, put together by the text they share",
    "openai": "requests to a chat API: messages, a time, optional session and usage; needs a model's tokenizer",
}
DEFAULT_BLOCK_TOKENS = 64


class UnknownFormat(ValueError):
    """A file looks like none of the formats, or the name is none of theirs. The message lists them."""


def read(
    path: Path,
    format: str | None = None,
    *,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    model: str | None = None,
) -> Iterator[Session]:
    """Yield the sessions of a file or, for weka, of a folder. Sessions of weka are read as they are taken.

    Args:
        format: a key of `FORMATS`; None finds out from the first line.
        block_tokens: size of the blocks where the file has none of its own (tracelab, aiperf, tokens, openai).
        model: whose tokenizer "openai" uses: a folder, a name that transformers knows, or "demo".

    Raises:
        UnknownFormat: see there.
        NoTokenizer: "openai" with no usable `model`.
        TraceError: the file is not as its format says; the message names file, line and field.
        OSError: it cannot be read.
    """
    kind = guess(path) if format is None else format
    if kind not in FORMATS:
        raise UnknownFormat(f"{kind} is no format: use one of {', '.join(FORMATS)}")
    yield from _sessions(path, kind, block_tokens, model)


def _sessions(path: Path, kind: str, block: int, model: str | None) -> Iterable[Session]:
    if kind in ("weka", "weka:split"):
        found = weka.read_sessions(path)
        return map(interleaved.split, found) if kind == "weka:split" else found
    if path.is_dir():
        raise TraceError(f"{path}: a folder is read as weka only: name a file")
    if kind in ("tracelab:growth", "tracelab:prefix"):
        return tracelab.read_sessions(path, Reading(kind.partition(":")[2]), block)
    if kind == "tracelab:csv":
        return tracelab_csv.read_sessions(path, block)
    if kind in ("mooncake", "mooncake:single"):
        return mooncake.read_sessions(path, chain=kind == "mooncake")
    if kind == "bailian":
        return bailian.read_sessions(path)
    if kind == "aiperf":
        return aiperf.read_sessions(path, block)
    if kind == "tokens":
        return token_trace.read_trace(path, block).sessions
    if model is None:
        raise NoTokenizer(
            f"{path}: a log of messages needs the model's tokenizer: name its folder, or {DEMO} for one token a byte"
        )
    return openai_log.read_sessions(path, ChatTokens(model), block)


def guess(path: Path) -> str:
    """Return the format that the first line of a file has, "weka" for a folder.

    Raises:
        UnknownFormat: it has none of them.
        TraceError: it is neither JSON nor such a CSV, or empty.
        OSError: the file cannot be read.
    """
    if path.is_dir():
        return "weka"
    if path.name.endswith(".json"):
        return _kind(*one_json(path))
    first = next(text_lines(path), None)
    if first is None:
        raise Where(path, 1).error("the file is empty")
    line, where = first
    if not line.lstrip().startswith("{") and tracelab_csv.is_header(
        [name.strip() for name in line.split(",")]
    ):
        return "tracelab:csv"
    return _kind(parsed(line, where), where)


_SIGNS = (
    # The fields that all lines of a format have and those of the formats after it have not.
    ("weka", ("requests", "block_size")),
    ("tracelab:growth", ("timing_events", "prefix_tokens")),
    ("bailian", ("chat_id", "parent_chat_id", "hash_ids")),
    ("aiperf", ("session_id", "input_length")),
    ("mooncake", ("input_length", "hash_ids")),
    ("tokens", ("input_tokens",)),
    ("openai", ("messages",)),
)


def _kind(value: Any, where: Where) -> str:
    if isinstance(value, dict):
        for kind, names in _SIGNS:
            if all(name in value for name in names):
                return kind
        if any(
            isinstance(value.get(name), dict) and "messages" in value[name] for name in ("request", "body")
        ):
            return "openai"
    raise UnknownFormat(
        f"{where.file}:{where.line}: this is none of the formats {', '.join(FORMATS)}: name the one it is"
    )
