"""A client's questions: what was reused of my prompt, why not more, what do I change? Answers, routes, command, page."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from eval.servers import Server
from sglang_histate.cli import main as histate
from tests.browser import Browser, needs_browser

from .test_rewrites import push_out_of_device
from .tools import cached, floor_page, random_tokens

pytestmark = pytest.mark.server

LONG = "Read the files first, then say what you would change and why. " * 24
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read.",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = {"id": "c0", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a"}'}}


def chat(server: Server, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": "histate-demo", "messages": messages, "max_tokens": 4, "temperature": 0}
    return server.post("/v1/chat/completions", {**body, "return_cached_tokens_details": True, **fields})


def said(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["sglext"]["cached_tokens_details"]


def explain(server: Server, rid: str) -> dict[str, Any]:
    return json.loads(server.get(f"/histate/explain?rid={rid}"))


def refused(server: Server, path: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.get(path)
    return refusal.value.code, json.load(refusal.value)["error"]


def conversation(**changes: str) -> list[dict[str, Any]]:
    words = {"system": LONG, "first": LONG, "answer": "I shall.", "result": LONG, "second": "go on"} | changes
    return [
        {"role": "system", "content": words["system"]},
        {"role": "user", "content": words["first"]},
        {"role": "assistant", "content": words["answer"], "tool_calls": [CALL]},
        {"role": "tool", "content": words["result"], "tool_call_id": "c0"},
        {"role": "user", "content": words["second"]},
    ]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"system": LONG + " Today is Monday."}, "system"),
        ({"first": LONG + " Please."}, "user turn 1"),
        ({"answer": "I will not."}, "assistant turn 1"),
        ({"result": LONG[:-30] + "[cleared]"}, "tool result 1"),
        ({"second": "stop"}, "user turn 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_answer_names_where_the_prompt_departs(main: Server, change: dict[str, str], place: str) -> None:
    chat(main, conversation(), tools=[TOOL])
    main.settle()
    answer = chat(main, conversation(**change), tools=[TOOL])
    details = said(answer)
    assert details["prefix_break_place"] == place
    assert details["device"] + details["host"] + details["ssd"] == details["checkpoint"]
    assert details["checkpoint"] <= details["restorable"] <= details["prefix_break"]
    found = explain(main, answer["id"])
    assert floor_page(found["prefix_break"]["position"]) == details["prefix_break"]
    assert found["cached"]["device"] == details["device"] and found["output_tokens"] == 4
    assert found["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_another_tool_is_a_break_in_the_tools(main: Server) -> None:
    chat(main, conversation(), tools=[TOOL])
    other = json.loads(json.dumps(TOOL).replace("Read.", "Read one."))
    assert said(chat(main, conversation(), tools=[other]))["prefix_break_place"] == "tools"


def test_a_prompt_that_goes_on_does_not_break(main: Server) -> None:
    first = chat(main, conversation()[:2])
    text = first["choices"][0]["message"]["content"]
    assert "prefix_break" not in said(first), "nothing was before it"
    messages = [
        *conversation()[:2],
        {"role": "assistant", "content": text},
        {"role": "user", "content": "more"},
    ]
    assert "prefix_break" not in said(chat(main, messages))
    messages[2] = {"role": "assistant", "content": text[:2] + "@" + text[3:]}
    edited = said(chat(main, messages))
    exact = first["usage"]["prompt_tokens"] + len(text[:2].encode())
    assert edited["prefix_break"] == floor_page(exact), "in whole pages: what is exact is for the operator"
    assert edited["prefix_break_place"] == "assistant turn 1"


def test_an_internal_hit_through_the_ssd_is_explained(
    main: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = random_tokens(8192, "explained")
    main.generate(prompt, 1)
    push_out_of_device(main, "explained pusher")
    main.settle()
    warm = main.generate(prompt[:5000] + random_tokens(200, "explained new"), 4, rid="the-rewrite")
    details, found = warm["meta_info"]["cached_tokens_details"], explain(main, "the-rewrite")
    assert cached(warm) >= 4096 and details["checkpoint"] == cached(warm)
    assert details["checkpoint_tier"] == found["checkpoint_tier"] == "ssd"
    assert found["prefix_break"]["position"] == 5000 and details["prefix_break"] == floor_page(5000)
    assert found["prefix_break"]["place"] is None, "no template has made this prompt"
    assert "prefix_break_place" not in details
    assert found["kv_found"] == 4992 and found["replayed"] == details["replayed"] == 4992 - cached(warm)
    assert sum(one["end"] - one["start"] for one in found["replayed_because"]) == found["replayed"]
    assert histate(["explain", "the-rewrite", "--url", main.url]) == 0
    out = capsys.readouterr().out
    assert f"reused    {cached(warm)} tokens" in out and "which was on the ssd" in out
    assert "break     token 5000" in out
    assert histate(["explain", "--last", "2", "--url", main.url]) == 0
    head, latest, _ = capsys.readouterr().out.splitlines()
    assert latest.startswith("the-rewrite") and "token 5000" in latest and "replayed" in head


def test_streams_say_it_too(main: Server) -> None:
    chat(main, conversation())
    body = {
        "model": "histate-demo", "messages": conversation(second="stop"), "max_tokens": 3, "stream": True,
        "return_cached_tokens_details": True,
    }  # fmt: skip
    request = urllib.request.Request(
        main.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        chunks = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    (details,) = [
        chunk["sglext"]["cached_tokens_details"]
        for chunk in chunks
        if (chunk.get("sglext") or {}).get("cached_tokens_details")
    ]
    assert details["prefix_break_place"] == "user turn 2"


def test_a_standing_offender_is_named_once(main: Server) -> None:
    before = main.log_file.read_text(errors="replace").count("near the head of the prompt")
    for number in range(6):
        # A tenant of its own, so that nothing has been said of it yet.
        chat(main, conversation(system=f"Session {number}{number * 7} is yours. {LONG}"), cache_salt="nonces")
    log = main.log_file.read_text(errors="replace")
    assert log.count("near the head of the prompt") == before + 1
    (line,) = [line for line in log.splitlines() if "near the head of the prompt" in line][before:]
    assert "(system)" in line and "Session" not in line
    standing = json.loads(main.get("/histate/activity"))["ranks"][0]["standing_breaks"]
    assert any(one["times"] >= 5 and one["place"] == "system" for one in standing)


def test_what_cannot_be_explained(main: Server) -> None:
    code, sentence = refused(main, "/histate/explain?rid=never-seen")
    assert code == 404 and "never-seen" in sentence
    assert refused(main, "/histate/explain?last=0")[0] == 400
    main.generate(random_tokens(100, "words"), 1, rid="words")
    code, sentence = refused(main, "/histate/explain?rid=words&text=1")
    assert code == 403 and "--admin-api-key" in sentence


def test_the_page_shows_what_the_routes_say(main: Server) -> None:
    """What the page's script reads of the two answers is there, without a browser."""
    with urllib.request.urlopen(main.url + "/histate", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert b"<title>HiState</title>" in answer.read()
    main.generate(random_tokens(1000, "page"), 2, rid="page-1")
    main.generate(random_tokens(1000, "page")[:700] + random_tokens(50, "page new"), 2, rid="page-2")
    status = main.settle()
    (found,) = json.loads(main.get("/histate/activity"))["ranks"]
    tiers = status["ranks"][0]["tiers"]
    for tier, kinds in {"device": ("kv", "states"), "host": ("kv", "states", "inflight")}.items():
        assert tiers[tier]["total_bytes"] > 0 and all("used_bytes" in tiers[tier][kind] for kind in kinds)
    assert set(tiers["ssd"]["kinds"]) == {"checkpoint", "kv"}
    assert (
        sum(kind["used_bytes"] for kind in tiers["ssd"]["kinds"].values())
        == tiers["ssd"]["checkpoints"]["used_bytes"]
    )
    (directory,) = tiers["ssd"]["directories"]
    assert directory["reads"]["state"] == directory["writes"]["state"] == "closed"
    assert status["eviction"]["ranks_agree"] and not status["verification"]["quarantined"]
    assert found["remembers"] and found["structure"] == "on"
    assert sum(step["requests"] for step in found["series"]) >= 2
    assert {
        "device",
        "host",
        "ssd",
        "from_device",
        "from_host",
        "from_ssd",
        "replayed",
        "computed",
        "start_s",
    } == set(found["series"][-1]) - {"requests"}
    first = status["ranks"][0]
    assert {"bytes_today", "bytes_per_day"} <= set(tiers["ssd"]["writes"])
    assert {"checkpoints", "kv_extents"} <= set(tiers["ssd"]["recovered"])
    assert (
        tiers["host"]["arena_bytes"] + tiers["host"]["inflight"]["total_bytes"]
        == tiers["host"]["total_bytes"]
    )
    assert {"kv_residence_requests", "state_residence_requests", "pressure"} <= set(first["eviction"])
    assert {
        "requests_total",
        "prompt_tokens_total",
        "internal_hits_total",
        "recomputed_tokens_with_kv_total",
    } <= set(first["counters"])
    assert set(first["counters"]["hit_tokens_total"]) == {"device", "host", "ssd"}
    sessions = {session["rid"]: session for session in found["sessions"]}
    line = sessions["page-1"]
    assert line["kv"][0]["start"] == 0 and line["kv"][-1]["end"] == line["tokens"] == 960
    assert "device" in line["kv"][0]["tiers"] and line["checkpoints"][-1]["at"] == 960
    assert found["breaks"][0]["rid"] == "page-2" and found["breaks"][0]["prefix_break"]["position"] == 700
    assert {"checkpoint", "checkpoint_tier", "replayed", "replayed_because"} <= set(found["breaks"][0])


@needs_browser
def test_the_page_in_a_browser(main: Server, tmp_path: Path) -> None:
    for turn in range(3):
        chat(main, conversation(second=f"{turn} {LONG}"), rid=f"turn-{turn}")
    main.settle()
    with Browser(tmp_path) as browser:
        browser.open(main.url + "/histate")
        browser.wait(
            "return document.documentElement.dataset.shown && !document.getElementById('main').hidden"
        )
        assert browser.run("return document.querySelectorAll('#health .bad').length") == 0
        bars = (
            "return [...document.querySelectorAll('#tiers .bar')].map(one => one.getAttribute('aria-label'))"
        )
        device, host, flying, ssd = browser.run(bars)
        assert device.startswith("device") and not device.startswith("device 0.0")
        assert host.startswith("host") and flying == "in flight 0.0 % used" and ssd.startswith("ssd")
        lines = browser.run(
            "return [...document.querySelectorAll('#sessions .session')].map(one => ({...one.dataset}))"
        )
        shown = {line["rid"]: line for line in lines}
        assert {"turn-0", "turn-1", "turn-2"} <= set(shown)
        assert all(int(line["checkpoints"]) >= 1 for line in shown.values())
        broken = browser.text("#breaks")
        assert "turn-2" in broken and "user turn 2" in broken
        assert browser.run("return document.querySelectorAll('#series rect').length") > 0
        # It goes on by itself.
        chat(main, conversation(second=f"later {LONG}"), rid="turn-later")
        browser.wait("return document.getElementById('breaks').innerText.includes('turn-later')")
        assert browser.complaints() == []
