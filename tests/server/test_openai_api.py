"""The real `openai` client against the server: what it can ask for, and what the usage says about the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from eval.servers import Server
from sglang_histate.demo import ensure_demo_model

from .tools import assert_all_returned, floor_page, random_tokens

pytestmark = pytest.mark.server

MODEL = "histate-demo"
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read one file of the workspace.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
MESSAGES: list[Any] = [
    {"role": "system", "content": "You are a careful assistant."},
    {"role": "user", "content": "Say something about caches."},
]


@pytest.fixture
def client(main: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=main.url + "/v1", api_key="none", max_retries=0, timeout=120)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage is not None and 0 < answer.usage.completion_tokens <= 24


def test_streaming_chat_gives_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 3
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completion_with_token_ids_equals_the_native_endpoint(main: Server, client: openai.OpenAI) -> None:
    prompt = random_tokens(500, "openai ids")
    native = main.generate(prompt, 16)
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].text == native["text"]


def test_tools_are_in_the_prompt(client: openai.OpenAI) -> None:
    from transformers import AutoTokenizer

    folder: Path = ensure_demo_model()
    template = AutoTokenizer.from_pretrained(str(folder))
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a"}'}}
        ]},
        {"role": "tool", "tool_call_id": "call_0", "content": "the content of a"},
    ]  # fmt: skip
    plain = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    tools: list[Any] = [TOOL]
    with_tools = client.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, tool_choice="auto", max_tokens=1
    )
    assert plain.usage is not None and with_tools.usage is not None
    text = template.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
    assert '"read_file"' in text and "Read one file of the workspace." in text
    assert with_tools.usage.prompt_tokens > plain.usage.prompt_tokens + len("Read one file of the workspace.")


def test_two_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, temperature=1.0, n=2, seed=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    greedy = client.completions.create(
        model=MODEL, prompt=random_tokens(300, "n=2"), max_tokens=8, temperature=0, n=2
    )
    first, second = greedy.choices
    assert first.text == second.text


def test_stop(client: openai.OpenAI) -> None:
    prompt = random_tokens(200, "stop")
    free = client.completions.create(model=MODEL, prompt=prompt, max_tokens=32, temperature=0)
    text = free.choices[0].text
    stop = text[10:12]
    cut = client.completions.create(model=MODEL, prompt=prompt, max_tokens=32, temperature=0, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert content is not None and len(content) == 5
    for entry in content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
    plain = client.completions.create(
        model=MODEL, prompt=random_tokens(100, "logprobs"), max_tokens=4, temperature=0, logprobs=2
    )
    found = plain.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None and len(found.token_logprobs) == 4


def test_usage_says_what_was_cached(main: Server, client: openai.OpenAI) -> None:
    prompt = random_tokens(8192, "usage")
    first = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0)
    assert _cached(first) == 0
    main.settle()
    rewrite = prompt[:5000] + random_tokens(200, "usage new")
    second = client.completions.create(
        model=MODEL, prompt=rewrite, max_tokens=1, temperature=0,
        extra_body={"return_cached_tokens_details": True},
    )  # fmt: skip
    assert _cached(second) >= 4096
    extension: Any = (second.model_extra or {}).get("sglext") or (second.choices[0].model_extra or {}).get(
        "sglext"
    )
    assert extension is not None
    found = extension["cached_tokens_details"]
    assert found["ssd_checkpoint"] == found["device"] + found["host"] == _cached(second)


def test_usage_of_chat_and_of_its_stream(main: Server, client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "long " * 200}]
    client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    main.settle()
    again = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert again.usage is not None
    assert _cached(again) >= floor_page(again.usage.prompt_tokens) - 64
    *_, last = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage is not None and last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == _cached(again)


def _cached(answer: Any) -> int:
    """An answer without the field is a defect: a client cannot tell it from a miss."""
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return int(answer.usage.prompt_tokens_details.cached_tokens)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [], "max_tokens": 1},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "max_tokens": 1, "temperature": -1},
        {"prompt": [32] * 200_000, "max_tokens": 1},
        {"prompt": [5, 100_000_000], "max_tokens": 1},
    ],
    ids=["empty", "negative-length", "negative-temperature", "too-long", "unknown-token"],
)
def test_bad_requests_are_refused_and_leave_the_server_whole(
    main: Server, client: openai.OpenAI, body: dict[str, Any]
) -> None:
    with pytest.raises(openai.APIStatusError) as refusal:
        client.completions.create(model=MODEL, **body)
    assert 400 <= refusal.value.status_code < 500
    assert main.generate(random_tokens(100, "after"), 2)["output_ids"]
    assert_all_returned(main)
