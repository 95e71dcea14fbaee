"""HiState off, or on without interior checkpoints, answers as with them; and with them it really does its work."""

from __future__ import annotations

import urllib.error
from typing import Any

import pytest

from eval.servers import Server

from .conftest import MAIN, Servers, Spec
from .tools import assert_same, cached, details, random_tokens

pytestmark = pytest.mark.server

OFF = Spec("off", MAIN.arguments, histate=False)
NONE = Spec("interval-none", (*MAIN.arguments, "--histate-interval", "none", "--no-histate-metrics"))
PROMPT = random_tokens(3000, "switched")
REWRITE = PROMPT[:2000] + random_tokens(100, "switched new")
GROWN = REWRITE + random_tokens(500, "switched grown")
SEQUENCE = (PROMPT, REWRITE, GROWN, PROMPT)


def ask(server: Server, settle: bool = True) -> list[dict[str, Any]]:
    answers = []
    for prompt in SEQUENCE:
        answers.append(server.generate(prompt, 16))
        if settle:
            server.settle()
    return answers


@pytest.fixture(scope="module")
def with_histate(servers: Servers) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    server = servers.get(MAIN)
    before = server.status()["counters"]
    answers = ask(server)
    after = server.status()["counters"]
    grown = {name: after[name] - before[name] for name in after if isinstance(after[name], int)}
    return answers, grown


def test_with_histate_it_captures_stores_and_restores(
    main: Server,
    with_histate: tuple[list[dict[str, Any]], dict[str, Any]],
) -> None:
    """The guard of all other tests: it fails if HiState did nothing at all."""
    answers, grown = with_histate
    assert details(answers[1])["ssd_checkpoint"] == cached(answers[1]) > 0
    for name in (
        "checkpoints_planned_total", "checkpoints_captured_total", "ssd_written_bytes_total",
        "ssd_fault_ins_total", "ssd_read_bytes_total", "ssd_restored_requests_total", "internal_hits_total",
    ):  # fmt: skip
        assert grown[name] > 0, name


def test_switched_off(servers: Servers, with_histate: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    server = servers.get(OFF)
    answers = ask(server, settle=False)
    for answer, expected in zip(answers, with_histate[0], strict=True):
        assert_same(answer, expected)
    assert cached(answers[1]) == 0, "stock keeps no state inside a prompt of one chunk"
    assert cached(answers[2]) > 0
    with pytest.raises(urllib.error.HTTPError, match="404"):
        server.status()  # the route belongs to HiState


def test_interval_none(servers: Servers, with_histate: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    server = servers.get(NONE)
    answers = ask(server)
    for answer, expected in zip(answers, with_histate[0], strict=True):
        assert_same(answer, expected)
    assert cached(answers[1]) == 0
    assert cached(answers[2]) == 2048
    counters = server.settle()["counters"]
    assert set(counters["intervals_chosen_total"]) <= {"0"}


def test_metrics_switched_off(servers: Servers) -> None:
    """No endpoint; the figures are in the status all the same."""
    server = servers.get(NONE)
    server.generate(PROMPT[:1000], 1)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        server.get("/metrics")
    found = server.settle()["metrics"]
    assert found["histate_checkpoints_captured_total"] > 0
    assert found["histate_queue_seconds"]["count"] > 0
    assert found["histate_intervals_chosen_total"]["interval=0"] > 0
