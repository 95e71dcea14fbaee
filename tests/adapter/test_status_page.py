"""The status page by itself: what it is made of, and what a reader sees of answers that no healthy server gives."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_histate.adapter.hit_series import STEP_S, Step
from sglang_histate.adapter.routes import PAGE
from tests.browser import Browser, needs_browser

TEXT = PAGE.read_text(encoding="utf-8")
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} closes something else"


def elements() -> list[tuple[str, dict[str, str | None]]]:
    parser = _Elements()
    parser.feed(TEXT)
    parser.close()
    assert parser.open == []
    return parser.found


def test_one_page_without_anything_from_elsewhere() -> None:
    for tag, attributes in elements():
        for name in ("src", "href", "action", "data"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert "http://" not in TEXT.replace("http://www.w3.org/2000/svg", "") and "https://" not in TEXT
    assert "@import" not in TEXT and "url(" not in TEXT


def test_the_script_finds_what_it_writes_to() -> None:
    ids = {attributes["id"] for _, attributes in elements() if attributes.get("id")}
    used = set(re.findall(r'\$\("([\w-]+)"\)', TEXT)) | set(re.findall(r'put\("([\w-]+)"', TEXT))
    assert used <= ids and ids - used <= {"main", "state", "pick", "ask", "key", "rank"}


def test_answers_go_in_as_text() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(", TEXT)


# What a server may answer. The keys are those of a live one, which tests/server/test_explain.py checks.


def breaker(state: str = "closed", reason: str | None = None) -> dict[str, Any]:
    return {"state": state, "reason": reason}


EVICTION = {
    "ranks_agree": True,
    "kv_residence_requests": None,
    "state_residence_requests": None,
    "pressure": 1.0,
}
COUNTERS = {
    "verify_mismatches_total": 0, "requests_total": 4, "prompt_tokens_total": 2000, "internal_hits_total": 1,
    "hit_tokens_total": {"device": 300, "host": 0, "ssd": 700}, "recomputed_tokens_with_kv_total": 128,
}  # fmt: skip


def rank(**changes: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "page_size": 64,
        "checkpoint_bytes": 63488,
        "tiers": {
            "device": {"kv": {"used_bytes": 3}, "states": {"used_bytes": 1}, "total_bytes": 8},
            "host": {
                "kv": {"used_bytes": 3}, "states": {"used_bytes": 1}, "inflight": {"used_bytes": 24, "total_bytes": 96},
                "arena_bytes": 4, "total_bytes": 100,
            },
            "ssd": {
                "kinds": {"checkpoint": {"entries": 1, "used_bytes": 1024}, "kv": {"entries": 0, "used_bytes": 0}},
                "checkpoints": {"total_bytes": 4096},
                "directories": [{"name": HOSTILE, "reads": breaker(), "writes": breaker()}],
                "files_lost": 0,
                "recovered": {"checkpoints": 7, "kv_extents": 35},
                "writes": {"bytes_today": 2048, "bytes_per_day": None},
            },
        },
        "eviction": EVICTION,
        "verification": {"quarantined": False, "quarantine_reason": None, "weights_changed": False},
        "inflight": {"writes": 0, "records_free": 1, "records_total": 1},
        "locks": {"requests_waiting_for_reads": 0},
        "counters": COUNTERS,
        **changes,
    }  # fmt: skip


def activity(**changes: Any) -> dict[str, Any]:
    one = {
        "rid": HOSTILE, "admitted_s": 1.0, "prompt_tokens": 1000, "checkpoint": 64, "checkpoint_tier": "ssd",
        "replayed": 128, "replayed_because": [{"why": "not_captured", "start": 64, "end": 192}],
        "prefix_break": {
            "position": 277, "place": "user turn 2", "before": HOSTILE, "against": HOSTILE, "alike_after": 0,
        },
    }  # fmt: skip
    session = {
        "rid": HOSTILE,
        "ended_s": 1.0,
        "tokens": 1024,
        "kv": [{"start": 0, "end": 512, "tiers": ["host", "ssd"]}, {"start": 512, "end": 1024, "tiers": []}],
        "checkpoints": [{"at": 512, "tiers": ["ssd"]}],
    }
    return {
        "enabled": True, "remembers": True, "structure": "on", "series": [], "sessions": [session], "breaks": [one],
        "standing_breaks": [{"times": 3, "position": 30, "place": HOSTILE, "lost_tokens": 3000, "examples": []}],
        **changes,
    }  # fmt: skip


class Fake:
    """Serves the page and two answers; with a `key` only to who sends it."""

    def __init__(self, status: dict[str, Any], ranks: list[dict[str, Any]], key: str | None = None) -> None:
        answers = {
            "/histate": TEXT,
            "/histate/status": json.dumps(status),
            "/histate/activity": json.dumps({"enabled": status["enabled"], "ranks": ranks}),
        }

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                open_to_all = key is None or self.path == "/histate"
                code = 200 if open_to_all or self.headers["Authorization"] == f"Bearer {key}" else 401
                body = answers.get(self.path) if code == 200 else "{}"
                self.send_response(code if body is not None else 404)
                self.send_header(
                    "Content-Type", "text/html" if self.path == "/histate" else "application/json"
                )
                self.end_headers()
                self.wfile.write((body or "").encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/histate"

    def __enter__(self) -> Fake:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer(*ranks: dict[str, Any]) -> dict[str, Any]:
    return {"enabled": True, "ranks": list(ranks), **ranks[0]}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


BARS = "return [...document.querySelectorAll('#tiers .bar')].map(one => one.getAttribute('aria-label'))"
SHOWN = "return !document.getElementById('main').hidden && document.documentElement.dataset.shown"


@needs_browser
def test_names_from_clients_are_shown_and_not_obeyed(browser: Browser) -> None:
    with Fake(answer(rank()), [activity()]) as fake:
        browser.open(fake.url)
        browser.wait(SHOWN)
        assert browser.run("return document.querySelectorAll('img').length") == 0
        assert browser.run("return document.title") == "HiState"
        assert HOSTILE in browser.text("#breaks") and HOSTILE in browser.text("#health")
        assert HOSTILE in browser.text("#standing")
        marks = (
            "return [...document.querySelectorAll('#sessions rect')].map(one => one.getAttribute('class'))"
        )
        assert browser.run(marks) == ["host", "gone", "checkpoint ssd"]
        assert browser.complaints() == []


def step(start_s: int, **tokens: int) -> dict[str, int]:
    """Return ten seconds of a session's life, with the keys of hit_series.py."""
    return asdict(Step(start_s, requests=1, **tokens))


@needs_browser
def test_the_figures_are_those_of_the_answers(browser: Browser) -> None:
    now = int(time.time()) // STEP_S * STEP_S
    series = [
        step(now - 20, computed=1000),
        step(now, device=300, ssd=200, from_ssd=500, replayed=100, computed=400),
    ]
    with Fake(answer(rank()), [activity(series=series)]) as fake:
        browser.open(fake.url)
        browser.wait(SHOWN)
        # The arena is full: what is in flight has a bar of its own, and hides nothing.
        assert browser.run(BARS) == [
            "device 50.0 % used", "host 100.0 % used", "in flight 25.0 % used", "ssd 25.0 % used",
        ]  # fmt: skip
        totals = browser.text("#totals")
        assert "4 requests, 50.0 % of 2,000 prompt tokens reused, 1 internal hit, 128 tokens" in totals
        shares = "return [...document.querySelectorAll('#shares tr')].map(one => one.innerText.split('\t').map(part => part.trim()))"
        head, *rows = browser.run(shares)
        assert head == ["last 5 minutes", "KV was on", "checkpoint was on"]
        assert rows == [
            ["device", "15.0 %", "0.0 %"], ["host", "0.0 %", "0.0 %"], ["ssd", "10.0 %", "25.0 %"],
            ["computed again", "5.0 %", ""], ["computed", "70.0 %", ""],
        ]  # fmt: skip
        drawn = "return [...document.querySelectorAll('#series rect')].map(one => one.getAttribute('class'))"
        assert browser.run(drawn) == [
            *("computed", "device", "ssd", "replayed", "computed"),  # by the tier of the KV
            *("computed", "ssd", "replayed", "computed"),  # by the tier of the checkpoint
        ]
        assert "7 checkpoints, 35 extents of KV" in browser.text("#health")
        assert "64 (ssd)" in browser.text("#breaks") and "128: not captured" in browser.text("#breaks")
        assert "token 1,024" in browser.run("return document.querySelector('#sessions').textContent")


@needs_browser
def test_a_server_that_has_gone_is_said(browser: Browser) -> None:
    with Fake(answer(rank()), [activity()]) as fake:
        browser.open(fake.url)
        browser.wait(SHOWN)
    browser.wait("return document.getElementById('state').innerText.includes('what is below is old')")
    assert browser.run("return document.getElementById('state').className") == "bad"
    browser.complaints()  # of the failed requests


@needs_browser
def test_what_is_wrong_stands_out(browser: Browser) -> None:
    broken = rank(
        eviction=EVICTION | {"ranks_agree": False},
        verification={"quarantined": True, "quarantine_reason": "a state was off", "weights_changed": True},
        counters=COUNTERS | {"verify_mismatches_total": 2},
    )
    broken["tiers"]["ssd"]["directories"] = [
        {"name": "/a", "reads": breaker(), "writes": breaker("open", "ENOSPC")}
    ]
    broken["tiers"]["ssd"]["files_lost"] = 1
    with Fake(answer(broken), [activity(series=[])]) as fake:
        browser.open(fake.url)
        browser.wait(SHOWN)
        lines = browser.run("return [...document.querySelectorAll('#health .bad')].map(one => one.innerText)")
        for words in ("quarantine: a state was off", "weights were replaced", "/a: no writes (ENOSPC)", "1 file of",
                      "ranks disagree", "2 restored states were wrong"):  # fmt: skip
            assert any(words in line for line in lines), words
        assert browser.run("return document.querySelectorAll('#health .good').length") == 0


@needs_browser
def test_a_server_that_wants_a_key(browser: Browser) -> None:
    with Fake(answer(rank()), [activity()], key="secret") as fake:
        browser.open(fake.url)
        browser.wait("return !document.getElementById('ask').hidden")
        assert browser.run("return document.getElementById('main').hidden")
        enter = "document.getElementById('key').value = arguments[0]; document.querySelector('#ask button').click()"
        browser.run(enter, "wrong")
        browser.wait("return document.getElementById('state').innerText.includes('refuses the key')")
        browser.run(enter, "secret")
        browser.wait(SHOWN)
        assert browser.run("return document.getElementById('ask').hidden")
        browser.run("sessionStorage.clear()")


@needs_browser
def test_one_of_several_schedulers(browser: Browser) -> None:
    other = activity(sessions=[], breaks=[], standing_breaks=[])
    with Fake(answer(rank(), rank()), [activity(), other]) as fake:
        browser.open(fake.url)
        browser.wait(SHOWN)
        assert not browser.run("return document.getElementById('pick').hidden")
        browser.run(
            "const rank = document.getElementById('rank'); rank.value = '1'; rank.dispatchEvent(new Event('change'))"
        )
        browser.wait("return document.getElementById('sessions').innerText.includes('No finished request')")


@needs_browser
def test_servers_with_nothing_to_show(browser: Browser) -> None:
    with Fake({"enabled": False, "ranks": []}, []) as fake:
        browser.open(fake.url)
        browser.wait("return document.getElementById('state').innerText.includes('without HiState')")
    with Fake(answer(rank()), [{"enabled": True, "remembers": False}]) as fake:
        browser.open(fake.url)
        browser.wait(SHOWN)
        assert "--histate-explain-requests 0" in browser.text("#structure")
