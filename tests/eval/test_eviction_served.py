"""What is made of a server's answers, with a server that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval.eviction import served
from eval.eviction.budgets import Budgets
from eval.eviction.requests import Request
from eval.eviction.rows import Mode
from eval.internal_hits.client import Answer, Cached
from eval.servers import ServerFailed
from sglang_histate.policy.score import Eviction

REQUESTS = [Request("a", [1] * 100, (1,), 1, 0), Request("a", [1] * 200, (1, 2, 3), 1, 64)]
BUDGETS = Budgets(8192, 24, 2**24, 2**21, 2**21)
MODE = Mode(Eviction.SCORE, 10.0)


class FakeServer:
    """Counts what it is asked; its counters start above 0, as after a warm-up."""

    port = 1
    started: list[list[str]] = []  # noqa: RUF012
    calls: list[str] = []  # noqa: RUF012

    def __init__(self, arguments: list[str], log: Path, environ: dict[str, str]) -> None:
        self.started.append(arguments)
        self.evicted = 5

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append("stopped")

    def wait_ready(self, timeout_s: float) -> FakeServer:
        return self

    def flush(self) -> None:
        self.calls.append("flushed")

    def status(self) -> dict[str, Any]:
        names = [
            f"{tier}_{kind}" for tier in ("device", "host", "ssd") for kind in ("intermediate", "bundle")
        ]
        rank = {
            "counters": {"recomputed_tokens_with_kv_total": 10 * self.evicted},
            "eviction": {"evictions_total": dict.fromkeys(names, self.evicted)},
        }
        return {"ranks": [rank]}

    def settle(self) -> dict[str, Any]:
        self.evicted += 1
        return self.status()


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, cached: tuple[int, ...], extra: int = 0) -> served.Run:
    given = iter((0, *cached))

    def ask(port: int, prompt: list[int], output_tokens: int) -> Answer:
        FakeServer.calls.append("asked")
        tokens = next(given)
        return Answer((7,) * output_tokens, len(prompt) + extra, Cached(tokens, tokens), 0.25, 0.5)

    monkeypatch.setattr(served, "Server", FakeServer)
    monkeypatch.setattr(served, "ask", ask)
    FakeServer.started.clear()
    FakeServer.calls.clear()
    return served.serve(REQUESTS, MODE, BUDGETS, folder / "work", ["--more"], lambda text: None)


def test_a_run_counts_from_the_flush_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = run(monkeypatch, tmp_path, (0, 64)).row
    assert FakeServer.calls == ["asked", "flushed", "asked", "asked", "stopped"]
    assert (row.mode, row.requests, row.prompt, row.reusable, row.cached, row.lost) == (
        "score tau=10", 2, 300, 64, 64, 0,
    )  # fmt: skip
    assert row.with_kv == 20 and set(row.evictions.values()) == {2}
    assert (row.ttft_p50_s, row.ttft_p95_s) == (0.25, 0.25)
    assert FakeServer.started[0][-1] == "--more" and "score" in FakeServer.started[0]


@pytest.mark.parametrize(
    ("cached", "extra", "message"),
    [((0, 128), 0, "of which only 64 were ever seen"), ((0, 0), 1, "counted 101 tokens in a prompt of 100")],
)
def test_what_cannot_be_is_an_error(
    cached: tuple[int, ...], extra: int, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ServerFailed, match=message):
        run(monkeypatch, tmp_path, cached, extra)


def test_different_outputs_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = (run(monkeypatch, tmp_path, (0, 64)) for _ in range(2))
    assert served.different_outputs([first, second]) == []
    second.answers[1] = Answer((8,), 200, Cached(), 0.1, 0.1)
    assert served.different_outputs([first, second]) == [
        "score tau=10: 1 outputs differ from those of score tau=10, first that of request 1"
    ]
