"""Hints with the real OpenAI client: a place for a checkpoint, a session to keep, one that is over, and nonsense."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from eval.servers import Server

from .tools import PAGE, cached, floor_page, random_tokens, warm_equals_cold

pytestmark = pytest.mark.server

LONG = "Read the files first, then say what you would change and why. "


def metric(server: Server, name: str, label: str) -> float:
    found = server.status()["metrics"][f"histate_{name}"]
    return float(next(value for key, value in found.items() if key.endswith(f"={label}")))


def chat(server: Server, messages: list[dict[str, Any]], **hints: Any) -> Any:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    extra = {"custom_params": {f"histate_{name}": value for name, value in hints.items()}} if hints else {}
    return client.chat.completions.create(
        model="histate-demo", messages=messages, max_tokens=4, temperature=0, extra_body=extra
    )


def conversation(last: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": LONG * 8},
        {"role": "user", "content": LONG * 12},
        {"role": "assistant", "content": "I shall."},
        {"role": "user", "content": last},
    ]


@pytest.mark.parametrize("hinted", [False, True])
def test_the_last_message_sent_again_changed(main: Server, hinted: bool) -> None:
    hints = {"checkpoint_before_last": [1]} if hinted else {}
    first = chat(main, conversation("Begin. " + LONG * 10), **hints)
    main.settle()
    again = chat(main, conversation("Wait. " + LONG * 2))
    reused = again.usage.prompt_tokens_details.cached_tokens
    last = len(LONG) * 10 + len("Begin. ")  # of its tokens, which are bytes
    before = first.usage.prompt_tokens - last - 64
    assert (reused >= floor_page(before) - PAGE) == hinted, "without the hint there is no checkpoint there"


def test_a_place_in_tokens_and_warm_equals_cold(main: Server) -> None:
    prompt = random_tokens(3000, "hinted place")
    place = {"custom_params": {"histate_checkpoint_at": [1111]}}
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2, "temperature": 0, **place}}
    main.post("/generate", body)
    main.settle()
    edited = prompt[:1200] + random_tokens(100, "hinted other")
    warm = main.generate(edited, 8)
    assert cached(warm) == floor_page(1111)
    warm_equals_cold(main, edited, warm)


def test_nonsense_is_counted_and_answered(main: Server) -> None:
    names = ("wrong_type", "out_of_range", "unknown_hint")
    before = [metric(main, "hints_ignored_total", name) for name in names]
    answer = chat(main, conversation("?"), checkpoint_at="everywhere", keep_requests=-5, nap=True)
    assert answer.choices[0].finish_reason in ("length", "stop")
    main.settle()
    assert [metric(main, "hints_ignored_total", name) for name in names] == [count + 1 for count in before]


def test_a_session_that_is_over_makes_room_for_the_others(main: Server) -> None:
    done = metric(main, "hints_total", "done")
    written = main.status()["counters"]["output_end_checkpoints_total"]
    chat(main, conversation("The last one."), done=True)
    chat(main, conversation("And this one stays."), keep_requests=100)
    main.settle()
    assert metric(main, "hints_total", "done") == done + 1
    assert main.status()["counters"]["output_end_checkpoints_total"] <= written + 1
