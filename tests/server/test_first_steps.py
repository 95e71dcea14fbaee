"""docs/first-steps.md, carried out in order against a server with an empty cache: all prints what the page says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.servers import Server
from sglang_histate.cli import main as histate
from tests.browser import Browser, needs_browser

pytestmark = pytest.mark.server
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "first-steps.md").read_text(encoding="utf-8")
HOST = "localhost:30000"


def blocks(step: str, kind: str) -> list[str]:
    """Return a step's code blocks of one kind; commands have none."""
    (text,) = re.findall(rf"^## \d+\. {step}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return [body for found, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if found == kind]  # fmt: skip


def run(server: Server, script: str) -> str:
    """Run a Python block and return what it prints."""
    assert script.count(HOST) == 1
    script = script.replace(HOST, f"127.0.0.1:{server.port}")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def said(command: str, *more: str) -> list[str]:
    """Return the words of a `histate` command of the page."""
    program, *words = shlex.split(command)
    assert program == ".venv/bin/histate"
    return [*words, *more]


def series(text: str) -> dict[str, float]:
    """Return the values of /metrics by name and labels."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def wait(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_steps_print_what_the_page_says(main: Server, capsys: pytest.CaptureFixture[str]) -> None:
    main.settle()
    wait(lambda: "histate_requests_total" in main.get("/metrics"))
    time.sleep(2)  # what other tests did is published within two seconds
    before = series(main.get("/metrics"))

    (walk,), (printed,) = blocks("Chat, repeat, rewrite", "python"), blocks("Chat, repeat, rewrite", "text")
    assert run(main, walk) == printed
    main.settle()

    # Each series of the page, and no other of these four metrics.
    (command,) = blocks("See it", "")
    shown = series(blocks("See it", "text")[0])
    (pattern,) = re.findall(r"grep -E '([^']+)'", command)

    def moved() -> dict[str, float]:
        now = series(main.get("/metrics"))
        change = {name: value - before.get(name, 0) for name, value in now.items() if re.match(pattern, name)}
        return {name: value for name, value in change.items() if value}

    wait(lambda: moved() == shown)

    url = ("--url", main.url)
    commands, texts = blocks("Ask why", ""), blocks("Ask why", "text")
    assert len(commands) == len(texts) == 2
    for command, text in zip(commands, texts, strict=True):
        assert histate(said(command, *url)) == 0
        assert capsys.readouterr().out == text

    (habit,), (listing,) = blocks("Find a client's habit", "python"), blocks("Find a client's habit", "")
    listed, broken, warning = blocks("Find a client's habit", "text")
    assert run(main, habit) == ""
    assert histate(said(listing, *url)) == 0
    assert capsys.readouterr().out == listed
    assert histate(["explain", "minute-3", *url]) == 0
    assert capsys.readouterr().out.endswith(broken)
    assert warning in main.log_file.read_text(encoding="utf-8", errors="replace")
    standing = json.loads(main.get("/histate/activity"))["ranks"][0]["standing_breaks"]
    assert "minute-3" in {rid for one in standing for rid in one["examples"]}


@needs_browser
def test_the_status_page_shows_the_walk(main: Server, tmp_path: Path) -> None:
    before = main.settle()["counters"]["internal_hits_total"]
    (walk,) = blocks("Chat, repeat, rewrite", "python")
    run(main, walk)
    main.settle()
    hits = before + 1
    with Browser(tmp_path) as browser:
        browser.open(main.url + "/histate")
        browser.wait(
            "return document.documentElement.dataset.shown && !document.getElementById('main').hidden"
        )
        assert f"{hits} internal hit" in browser.text("#totals")
        named = "return [...document.querySelectorAll('#sessions .session')].map(one => one.dataset.rid)"
        assert browser.run(named) == ["rewrite", "again"]
        row = (
            "return [...document.querySelector('#breaks tr:nth-child(2)').children].map(one => one.innerText)"
        )
        rid, _, position, place, against, prompt, resumed, again = browser.run(row)
        assert (rid, position, place) == ("rewrite", "3,244", "user turn 1") and against == "again"
        assert (prompt, resumed, again) == ("3,855", "3,072 (ssd)", "128: not captured")


def test_sizes_are_those_of_the_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (command,), (text,) = blocks("Size a deployment", ""), blocks("Size a deployment", "text")
    assert histate(said(command)) == 0
    assert capsys.readouterr().out == text


def test_looking_after_the_store(main: Server, capsys: pytest.CaptureFixture[str]) -> None:
    (commands,) = blocks("Look after it", "")
    run(main, blocks("Chat, repeat, rewrite", "python")[0])
    main.settle()
    ssd = str(main.status()["config"]["ssd_dir"])
    out = []
    for command in commands.splitlines():
        words = [ssd if word == "build/ssd" else word for word in said(command)]
        assert ssd in words and histate(words) == 0, command
        out.append(capsys.readouterr().out)
    doctor, inspect, verify = out
    assert re.search(r"^overlay active here +no$", doctor, re.MULTILINE)
    assert "open, process" in inspect and "7 checkpoint" in inspect
    # The page is after a restart, which writes KV as well.
    (text,) = blocks("Look after it", "text")
    after = re.sub(r"\d+ checkpoint, \d+ kv", "7 checkpoint", text)
    assert after == "".join(verify.splitlines(keepends=True)[1:3])
