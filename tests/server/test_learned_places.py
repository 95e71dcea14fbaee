"""Clients that rewrite, against ``--histate-interval learned``: each resumes within a page of where its text is new.

A compaction keeps the system prompt and the tools, an edited message replaces the last one or the one before: nothing has
to be learned for these. A stripped thinking block and a blanked tool result are learned from the first few sessions.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from eval.servers import Server
from sglang_histate.demo import ensure_demo_model

from .conftest import Servers, Spec
from .tools import PAGE, cached, floor_page, random_tokens, warm_equals_cold

pytestmark = pytest.mark.server

LEARNED = Spec(
    "learned",
    (
        "--chunked-prefill-size", "9216", "--histate-step-tail", "1024", "--max-total-tokens", "20480",
        "--histate-interval", "learned", "--histate-eviction", "loss",
    ),
    sizes=("--histate-ssd-size", "256MiB", "--histate-inflight-size", "16MiB"),
)  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "read_file", "description": "Read a file. " * 60, "parameters": {}},
}
CALL = {"id": "c0", "type": "function", "function": {"name": "read_file", "arguments": {"path": "a"}}}
SESSIONS = 6
"""A short learning phase."""


@pytest.fixture(scope="module")
def server(servers: Servers) -> Server:
    return servers.get(LEARNED)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ensure_demo_model())


def words(what: str, count: int) -> str:
    return " ".join(f"{what}{number}" for number in range(count))


def session(name: str, **changes: Any) -> list[dict[str, Any]]:
    """A conversation that a client sends whole: system, two questions, thinking, a tool's result, a last question."""
    said = {
        "first": words(f"{name} first ", 60),
        "thinking": words(f"{name} thought ", 60),
        "answer": words(f"{name} answer ", 40),
        "result": words(f"{name} result ", 80),
        "second": words(f"{name} second ", 60),
        "last": words(f"{name} last ", 60),
    } | changes
    return [
        {"role": "system", "content": words(f"{name} system ", 60)},
        {"role": "user", "content": said["first"]},
        {"role": "assistant", "content": said["answer"], "tool_calls": [CALL]},
        {"role": "tool", "content": said["result"], "tool_call_id": "c0"},
        {"role": "assistant", "content": words(f"{name} reply ", 40)},
        {"role": "user", "content": said["second"]},
        {"role": "assistant", "content": words(f"{name} more ", 40)},
        {"role": "user", "content": said["last"]},
    ]


def rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def shared(one: list[int], other: list[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


def rewritten(server: Server, before: list[int], after: list[int]) -> tuple[int, dict[str, Any]]:
    """Send a text and then another that leaves it; return how far the second resumed below the best, and its answer."""
    server.generate(before, 4)
    server.settle()
    answer = server.generate(after, 4)
    return floor_page(shared(before, after)) - cached(answer), answer


def compacted(name: str) -> list[dict[str, Any]]:
    system = session(name)[0]
    return [system, {"role": "user", "content": words(f"{name} summary ", 90)}]


CHANGES = {
    "compaction": lambda name: compacted(name),
    "edited last message": lambda name: session(name, last=words(f"{name} edited ", 60)),
    "edited message before the last": lambda name: session(name, second=words(f"{name} edited ", 60)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_time_without_anything_learned(server: Server, tokenizer: Any, change: str) -> None:
    server.flush()
    name = change.replace(" ", "")
    before = rendered(tokenizer, session(name))
    after = rendered(tokenizer, CHANGES[change](name))
    below, answer = rewritten(server, before, after)
    assert 0 <= below <= PAGE
    warm_equals_cold(server, after, answer)


def blanked(tokenizer: Any, name: str) -> tuple[list[int], list[int]]:
    return rendered(tokenizer, session(name)), rendered(tokenizer, session(name, result="[cleared]"))


def stripped(tokenizer: Any, name: str) -> tuple[list[int], list[int]]:
    """Thinking is rendered behind the last question only, so a new question takes it out of the answer before."""
    thought = {"role": "assistant", "reasoning_content": words(f"{name} thought ", 90), "tool_calls": [CALL]}
    result = {"role": "tool", "content": words(f"{name} later ", 90), "tool_call_id": "c0"}
    asked = [*session(name), thought, result, thought, result]
    return rendered(tokenizer, asked), rendered(tokenizer, [*asked, {"role": "user", "content": "go on"}])


@pytest.mark.parametrize("client", [blanked, stripped], ids=lambda client: client.__name__)
def test_after_a_few_sessions_the_first_time_in_a_new_one(
    server: Server, tokenizer: Any, client: Any
) -> None:
    for number in range(SESSIONS):
        rewritten(server, *client(tokenizer, f"{client.__name__}{number}x"))
    server.flush()
    before, after = client(tokenizer, f"{client.__name__}new")
    below, answer = rewritten(server, before, after)
    assert 0 <= below <= PAGE
    warm_equals_cold(server, after, answer)


def test_raw_completions_have_no_places_and_are_served(server: Server) -> None:
    prompt = [65 + number % 20 for number in range(3000)]
    answer = server.generate(prompt, 4)
    server.settle()
    again = server.generate(prompt, 4)
    assert cached(again) >= floor_page(len(prompt) - 1) - PAGE
    assert again["output_ids"] == answer["output_ids"]
    places = server.status()["eviction"]["hits_expected"]["places"]
    assert places["tool result"] > 0 and set(places) >= {"end of system and tools", "last user message"}


@pytest.mark.parametrize(("length", "steps"), [(8192, [8192]), (9216, [9216]), (9280, [8192, 1088])])
def test_the_tail_of_a_step_is_for_prompts_that_end_with_it(
    server: Server, length: int, steps: list[int]
) -> None:
    before = len(computed(server))
    prompt = random_tokens(length, f"tail-{length}")
    server.generate(prompt, 1)
    server.settle()
    assert computed(server)[before:] == steps
    assert cached(server.generate([*prompt, 65], 1)) == length, (
        "what ends in the tail is captured like any other prompt"
    )


def computed(server: Server) -> list[int]:
    """Return the prompt tokens of each step so far, as SGLang logs them."""
    log = server.log_file.read_text(encoding="utf-8", errors="replace")
    return [int(found) for found in re.findall(r"Prefill batch.*?#new-token: (\d+)", log)]
