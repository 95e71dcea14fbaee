"""Logs of requests to an OpenAI-compatible chat API: JSON lines, one request each.

A line is the request's object itself, or has it under `request` or `body`:

- `messages`, optional `tools`: tokenised with a model's chat template (`eval.workloads.chat_tokens`).
- a time: the first there is of `TIME_FIELDS`, as seconds or milliseconds (above 10^11) or ISO 8601.
- optional a session: the first there is of `SESSION_FIELDS`. Lines that have none are put together by their text
  (`eval.workloads.chains`), those of different `user` never.
- optional the answer's length: `usage.completion_tokens`, of the line or of its `response`; else the tokens of the
  response's message; else 0. Optional its duration: the first there is of `DURATION_FIELDS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.workloads import fields
from eval.workloads.chains import Request, chained, sessions_of
from eval.workloads.chat_tokens import BadChat, ChatTokens
from eval.workloads.fields import Where
from eval.workloads.lines import json_lines
from eval.workloads.sessions import Session
from eval.workloads.token_blocks import TokenBlocks
from eval.workloads.tracelab import moment

DEFAULT_BLOCK_TOKENS = 64
TIME_FIELDS = ("timestamp", "ts", "time", "created_at", "created", "start_time")
SESSION_FIELDS = ("session_id", "conversation_id", "session", "chat_id", "thread_id")
DURATION_FIELDS = {"duration_s": 1.0, "latency_s": 1.0, "duration_ms": 0.001, "latency_ms": 0.001}
_INNER = ("request", "body")
_MILLISECONDS_FROM = 1e11  # as seconds this is the year 5138, as milliseconds 1973


def read_sessions(path: Path, chat: ChatTokens, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> list[Session]:
    """Return the sessions in the order they begin; only block ids of the prompts are kept.

    Raises:
        TraceError: a line is not as described; the message names file, line and field.
        OSError: the file cannot be read.
    """
    blocks = TokenBlocks(block_tokens)
    named: dict[str, list[Request]] = {}
    loose: list[Request] = []
    for value, where in json_lines(path):
        line = fields.record(value, where)
        inner, at = _request(line, where)
        tokens = _prompt(inner, at, chat)
        request = Request(
            _time(line, inner, where),
            len(tokens),
            _output_tokens(line, where, chat),
            blocks.ids(tokens),
            _duration(line, where),
            owner=_name(inner.get("user"), line.get("user")),
        )
        session = _name(*(source.get(name) for name in SESSION_FIELDS for source in (line, inner)))
        if session:
            named.setdefault(session, []).append(request)
        else:
            loose.append(request)
    loose.sort(key=lambda one: one.at_s)
    groups = [(name, sorted(group, key=lambda one: one.at_s)) for name, group in named.items()]
    groups += [(f"chain-{number:05d}", group) for number, group in enumerate(chained(loose))]
    groups.sort(key=lambda item: item[1][0].at_s)
    return sessions_of([group for _, group in groups], block_tokens, [name for name, _ in groups])


def _request(line: dict[str, Any], where: Where) -> tuple[dict[str, Any], Where]:
    for name in _INNER:
        if "messages" not in line and name in line:
            return fields.record(line[name], where.at(name)), where.at(name)
    return line, where


def _prompt(inner: dict[str, Any], where: Where, chat: ChatTokens) -> list[int]:
    place = where.at("messages")
    messages = fields.items(fields.member(inner, "messages", where), place)
    if not messages:
        raise place.error("at least one message is expected")
    for index, message in enumerate(messages):
        fields.text(fields.record(message, place.at(index)), "role", place.at(index))
    tools = inner.get("tools")
    if tools is not None:
        fields.items(tools, where.at("tools"))
    try:
        tokens = chat.prompt(messages, tools or None)
    except BadChat as error:
        raise place.error(f"the chat template refuses them: {error}") from None
    if not tokens:
        raise place.error("the chat template makes an empty prompt of them")
    return tokens


def _time(line: dict[str, Any], inner: dict[str, Any], where: Where) -> float:
    for source in (line, inner):
        for name in TIME_FIELDS:
            value = source.get(name)
            if isinstance(value, str):
                return moment(source, name, where)
            if value is not None:
                given = fields.needed_seconds(source, name, where)
                return given / 1000 if given > _MILLISECONDS_FROM else given
    raise where.at(TIME_FIELDS[0]).error(f"is missing: a time is needed, as one of {', '.join(TIME_FIELDS)}")


def _output_tokens(line: dict[str, Any], where: Where, chat: ChatTokens) -> int:
    response = line.get("response")
    answer = response if isinstance(response, dict) else {}
    if isinstance(answer.get("body"), dict):  # the batch API's results
        answer = answer["body"]
    for source in (line, answer):
        usage = source.get("usage")
        if isinstance(usage, dict) and usage.get("completion_tokens") is not None:
            return fields.count(usage, "completion_tokens", where.at("usage"))
    if isinstance(response, str):
        return len(chat.encode(response))
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message")
        if isinstance(message, dict) and isinstance(message.get("content"), str):
            return len(chat.encode(message["content"]))
    return 0


def _duration(line: dict[str, Any], where: Where) -> float:
    for name, unit in DURATION_FIELDS.items():
        found = fields.seconds(line, name, where)
        if found is not None:
            return found * unit
    return 0.0


def _name(*candidates: Any) -> str:
    """Return the first name there is; ids may be numbers."""
    return next((str(one) for one in candidates if isinstance(one, str | int) and str(one)), "")
