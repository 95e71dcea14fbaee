"""Hints with the real OpenAI client: a place for a checkpoint, a session to keep, one that is over, and nonsense."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from eval.servers import Server

from .tools import LOGPROB_TOLERANCE, PAGE, cached, floor_page, random_tokens, warm_equals_cold

pytestmark = pytest.mark.server

LONG = "Read the files first, then say what you would change and why. "


def metric(server: Server, name: str, label: str) -> float:
    found = server.status()["metrics"][f"histate_{name}"]
    return float(next(value for key, value in found.items() if key.endswith(f"={label}")))


def chat(
    server: Server, messages: list[dict[str, Any]], *, tokens: int = 4, rid: str = "", **hints: Any
) -> Any:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    extra: dict[str, Any] = {"rid": rid} if rid else {}
    if hints:
        extra["custom_params"] = {f"histate_{name}": value for name, value in hints.items()}
    return client.chat.completions.create(
        model="histate-demo",
        messages=messages,
        max_tokens=tokens,
        temperature=0,
        logprobs=True,
        extra_body=extra,
    )


def reused(answer: Any) -> int:
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else int(details.cached_tokens or 0)


def same_as_cold(server: Server, messages: list[dict[str, Any]], warm: Any) -> None:
    """Compare `warm` with a run after a flush."""
    server.flush()
    cold = chat(server, messages, tokens=warm.usage.completion_tokens)
    assert reused(cold) == 0 < reused(warm)
    first, second = (answer.choices[0].logprobs.content for answer in (warm, cold))
    assert [one.token for one in first] == [one.token for one in second]
    assert max(abs(a.logprob - b.logprob) for a, b in zip(first, second, strict=True)) <= LOGPROB_TOLERANCE


def said(*what: str) -> list[dict[str, Any]]:
    """A conversation: system prompt, question, answer, question, ..."""
    roles = ("system", *("user", "assistant") * len(what))
    return [{"role": role, "content": content} for role, content in zip(roles, what, strict=False)]


def words(name: str, count: int) -> str:
    """About `count` bytes that no other name shares."""
    return (
        f"{name}: " + bytes(random_tokens(count, name)).decode("latin-1").encode("ascii", "replace").decode()
    )


def on_device(server: Server, rid: str) -> int:
    """Return how many tokens of the KV of a session are on the device, from its beginning on."""
    server.settle()
    (found,) = json.loads(server.get("/histate/activity"))["ranks"]
    (line,) = [one for one in found["sessions"] if one["rid"] == rid]
    end = 0
    for run in line["kv"]:
        if "device" not in run["tiers"]:
            break
        end = run["end"]
    return end


def press(server: Server, name: str, tokens: int) -> None:
    """Ask for so much that as many tokens have to leave the device."""
    device = server.status()["tiers"]["device"]["kv"]
    left = device["total"] - device["used"] + tokens
    while left > 0:
        server.generate(random_tokens(min(left, 6000), f"{name} {left}"), 1)
        left -= 6000


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


def test_a_session_that_another_request_ends_goes_first(main: Server) -> None:
    counted = metric(main, "hints_total", "end_sessions")
    wrong = metric(main, "hints_ignored_total", "unknown_session")
    chat(main, said(words("early", 3000), "Begin."), rid="early")
    chat(main, said(words("sub", 3000), "Begin."), rid="sub", session="sub")
    chat(main, said("", "Bye."), end_sessions=["sub"])
    press(main, "room", 512)
    assert on_device(main, "sub") < 2000 and on_device(main, "early") > 2900, (
        "the earlier one would have gone"
    )
    chat(main, said("", "Bye."), end_sessions=["sub", "nobody"])
    main.settle()
    assert metric(main, "hints_total", "end_sessions") == counted + 2
    assert metric(main, "hints_ignored_total", "unknown_session") == wrong + 2


def test_compaction_resumes_where_system_and_tools_end(main: Server) -> None:
    system, context = words("tools", 1500), words("context", 1500)
    chat(main, said(words("bystander", 3000), "Begin."), rid="bystander")
    chat(main, said(system, context), session="long", rid="first")
    long = said(system, context, "I see.", words("more", 600))
    chat(main, long, session="long", about_to="compact", rid="long")
    whole = on_device(main, "long")
    press(main, "compacted", 1024)
    left = on_device(main, "long")
    assert whole > 3500 and 1500 <= left < whole - 1000, "the old context is the first to go, its head stays"
    assert on_device(main, "bystander") > 2900, "though it came before"
    summary = said(system, words("summary", 300))
    warm = chat(main, summary)
    assert 1500 // PAGE * PAGE <= reused(warm) < 1500 + 2 * PAGE
    same_as_cold(main, summary, warm)


def test_all_forks_of_a_session_resume_at_its_end(main: Server) -> None:
    parent = said(words("parent", 1500), words("task", 700))
    first = chat(main, parent, tokens=80, rid="parent", session="parent", about_to={"fork": 3})
    for count in range(3):
        chat(main, said(words(f"other {count}", 1000), "Begin."), rid=f"other {count}")
    press(main, "others", 1024)
    answer = first.choices[0].message.content
    end = first.usage.prompt_tokens
    assert on_device(main, "parent") >= floor_page(end), "kept"
    assert on_device(main, "other 0") < 900, "though it came later"
    for count in range(3):
        fork = [
            *parent,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"Part {count}"},
        ]
        warm = chat(main, fork)
        assert reused(warm) >= floor_page(end) - PAGE
    same_as_cold(main, fork, warm)


def test_names_of_sessions_that_are_no_names(main: Server) -> None:
    names = ("wrong_type", "out_of_range", "too_many_sessions", "unknown_session")
    before = [metric(main, "hints_ignored_total", name) for name in names]
    many = [f"s{count}" for count in range(20)]
    answer = chat(
        main, said("", "?"), session=5, end_sessions=many, keep_sessions=["x" * 500], about_to="dance"
    )
    assert answer.choices[0].finish_reason in ("length", "stop")
    main.settle()
    counted = [
        metric(main, "hints_ignored_total", name) - count for name, count in zip(names, before, strict=True)
    ]
    assert counted == [1, 2, 1, 16]
