"""Logs of chat requests: prompts as a server makes them, sessions by id or by text, every error with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trace_files import CHAT, write

from eval.workloads.chat_tokens import ChatTokens, NoTokenizer
from eval.workloads.fields import TraceError
from eval.workloads.openai_log import read_sessions
from eval.workloads.sessions import Session, common


@pytest.fixture(scope="module")
def chat() -> ChatTokens:
    return ChatTokens("demo")


def said(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]


def line(at: Any, *texts: str, **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "messages": said(*texts), **more}


def load(folder: Path, chat: ChatTokens, *lines: Any) -> list[Session]:
    return read_sessions(write(folder, "log.jsonl", *lines), chat)


def test_a_later_prompt_has_the_earlier_one_as_its_beginning(tmp_path: Path, chat: ChatTokens) -> None:
    (session,) = load(tmp_path, chat, *CHAT)
    first, second = session.turns
    assert session.name == "a" and session.shared_ids and session.block_tokens == 64
    assert common(first.blocks, second.blocks) == len(first.blocks) >= 2
    assert (first.output_tokens, second.output_tokens) == (12, len("Done."))
    assert second.gap_s == 5.0


def test_prompts_are_those_of_the_template(chat: ChatTokens) -> None:
    """Text as a list of parts, absent content and calls with their arguments as text make the same prompt as plain ones."""
    call = {"id": "1", "type": "function", "function": {"name": "run", "arguments": {"x": 1}}}
    plain = [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "c"},
    ]
    sent = json.loads(json.dumps(plain))
    sent[0]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    sent[1]["content"] = None
    sent[1]["tool_calls"][0]["function"]["arguments"] = '{"x": 1}'
    tools = [{"type": "function", "function": {"name": "run"}}]
    assert chat.prompt(sent, tools) == chat.prompt(plain, tools) != chat.prompt(plain)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert chat.prompt(image) == chat.prompt([{"role": "user", "content": "[image_url]"}])


LONG = "x" * 300


def test_without_ids_requests_are_put_together_by_text_and_user(tmp_path: Path, chat: ChatTokens) -> None:
    lines = [
        line(0, LONG + "1"),
        line(1, "y" * 300),
        line(2, LONG + "1", "ok", "more"),
        line(3, LONG + "1", "ok", "more", user="somebody"),
    ]
    found = load(tmp_path, chat, *lines)
    assert [session.requests for session in found] == [2, 1, 1]
    assert common(found[0].turns[1].blocks, found[2].turns[0].blocks) > 0  # the text is the same all the same


@pytest.mark.parametrize(
    "times",
    [
        (1_700_000_000, 1_700_000_002.5),
        (1_700_000_000_000, 1_700_000_002_500),
        ("2026-01-01T00:00:00Z", "2026-01-01T00:00:02.500Z"),
        ("2026-01-01T02:00:00+02:00", "2026-01-01T00:00:02.500"),
    ],
    ids=["seconds", "milliseconds", "ISO 8601", "with and without offset"],
)
def test_times_may_be_of_any_usual_kind(tmp_path: Path, chat: ChatTokens, times: tuple[Any, Any]) -> None:
    (found,) = load(
        tmp_path,
        chat,
        line(times[1], "b", session_id="s"),
        line(times[0], "a", session_id="s", latency_ms=500),
    )
    assert [turn.start_s for turn in found.turns] == [0.0, 2.5]
    assert (found.turns[0].service_s, found.turns[1].gap_s) == (0.5, 2.0)


def test_the_request_may_be_inside(tmp_path: Path, chat: ChatTokens) -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "four"}}]}
    found = load(
        tmp_path,
        chat,
        {"created": 5, "body": {"messages": said("a"), "user": "u"}, "response": {"body": {"usage": {"completion_tokens": 7}}}},
        {"request": {"messages": said("a"), "created_at": 6, "session_id": 3}, "response": answer},
    )  # fmt: skip
    assert [(session.name, session.turns[0].output_tokens) for session in found] == [
        ("chain-00000", 7),
        ("3", 4),
    ]


BAD: list[tuple[str, Any]] = [
    ("messages: is missing", {"timestamp": 1}),
    ("body.messages: at least one message is expected", {"timestamp": 1, "body": {"messages": []}}),
    ("messages[0].role: is missing", {"timestamp": 1, "messages": [{"content": "x"}]}),
    ("messages[1]: an object is expected, not 'x'", {"timestamp": 1, "messages": [*said("a"), "x"]}),
    ("timestamp: is missing: a time is needed, as one of timestamp, ts, time, created_at, created, start_time",
     {"messages": said("a")}),
    ("created: an ISO 8601 time is expected, not 'noon'", {"messages": said("a"), "created": "noon"}),
    ("tools: a list is expected, not 'x'", line(1, "a", tools="x")),
    ("usage.completion_tokens: a whole number of at least 0 is expected, not 'x'",
     line(1, "a", usage={"completion_tokens": "x"})),
    ("latency_ms: seconds, not negative, are expected, not -1", line(1, "a", latency_ms=-1)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "bad"), BAD, ids=[message[:40] for message, _ in BAD])
def test_an_error_names_file_line_and_field(tmp_path: Path, chat: ChatTokens, message: str, bad: Any) -> None:
    with pytest.raises(TraceError) as error:
        load(tmp_path, chat, line(0, "a"), bad)
    assert str(error.value) == f"{tmp_path}/log.jsonl:2: {message}"


def test_what_the_template_refuses_is_the_messages_fault(tmp_path: Path, chat: ChatTokens) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    with pytest.raises(
        TraceError, match=r"log\.jsonl:1: messages: the chat template refuses them: UndefinedError"
    ):
        load(tmp_path, chat, {"timestamp": 1, "messages": [call]})


def test_a_folder_without_a_tokenizer_or_template_is_named(tmp_path: Path) -> None:
    from sglang_histate.demo.tokenizer import write_tokenizer

    with pytest.raises(NoTokenizer, match="no tokenizer could be loaded"):
        (tmp_path / "tokenizer.json").write_text("{}")
        ChatTokens(str(tmp_path))
    write_tokenizer(tmp_path)
    assert ChatTokens(str(tmp_path)).encode("ab") == [97, 98]
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(NoTokenizer, match="has no chat template"):
        ChatTokens(str(tmp_path))
