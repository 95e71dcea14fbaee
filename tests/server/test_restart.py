"""A server that is killed or stopped and started again finds what the SSD has, from its first request on.

HISTATE_RESTART_ROUNDS sets how often the server is killed under load (once in the suite: each costs a server start),
HISTATE_RESTART_DTYPE the encoding of its checkpoints.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.servers import Server
from sglang_histate.demo import ensure_demo_model

from .conftest import ENVIRON, Servers
from .slabs import prefix_keys, read_names, slab_files
from .tools import (
    BF16_LOGPROB_BOUND,
    PAGE,
    Pending,
    assert_same,
    cached,
    details,
    floor_page,
    logprobs,
    random_tokens,
)

pytestmark = pytest.mark.server

ROUNDS = int(os.environ.get("HISTATE_RESTART_ROUNDS") or 1)
DTYPE = os.environ.get("HISTATE_RESTART_DTYPE") or "native"
SAVED = "can be resumed after a restart"
ARGUMENTS = (
    "--demo", "--chunked-prefill-size", "4096", "--max-total-tokens", "3072", "--max-mamba-cache-size", "24",
    "--histate-checkpoint-dtype", DTYPE, "--histate-ssd-size", "32MiB", "--histate-inflight-size", "2MiB", "--histate-host-size", "6MiB",
)  # fmt: skip


class Restarts:
    """Servers one after the other on one directory."""

    def __init__(self, folder: Path) -> None:
        self.ssd = folder / "restart-ssd"
        self._folder = folder
        self._count = 0
        self.server: Server | None = None

    def start(self, *more: str) -> Server:
        self._count += 1
        log = self._folder / f"restart-{self._count}.log"
        self.server = Server([*ARGUMENTS, "--histate-ssd-dir", str(self.ssd), *more], log, ENVIRON)
        self.server.wait_ready()
        return self.server

    def kill(self) -> None:
        assert self.server is not None
        os.killpg(self.server.process.pid, signal.SIGKILL)
        self.server.process.wait(20)

    def stop(self, *, at_a_terminal: bool = False) -> str:
        """End as an operator does: SIGTERM to the server, or Ctrl-C, which every process gets. Return the log."""
        assert self.server is not None
        if at_a_terminal:
            os.killpg(self.server.process.pid, signal.SIGINT)
        else:
            self.server.process.send_signal(signal.SIGTERM)
        assert self.server.process.wait(60) == 0, self.server.log_tail()
        self.server.stop()
        return self.server.log_file.read_text()

    def durable(self, prompt: list[int]) -> int:
        """The longest prefix of `prompt` that the file could restore: KV without a gap, and a checkpoint at its end."""
        checkpoints, pages = read_names(slab_files(self.ssd)[0])
        best = 0
        for position, key in prefix_keys(prompt).items():
            if key not in pages:
                break
            if key in checkpoints:
                best = position
        return best


@pytest.fixture
def restarts(servers: Servers) -> Iterator[Restarts]:
    servers.stop()  # one server at a time
    made = Restarts(servers.folder)
    yield made
    if made.server is not None:
        made.server.stop()


def session(server: Server, name: str, length: int = 610) -> list[int]:
    prompt = random_tokens(length, name)
    return prompt + server.generate(prompt, 30)["output_ids"]


def ask_all(server: Server, contexts: list[list[int]]) -> list[dict[str, Any]]:
    return [server.generate([*context, 65, 66, 67], 6) for context in contexts]


def same_as_cold(server: Server, contexts: list[list[int]], warm: list[dict[str, Any]]) -> None:
    server.flush()
    for context, answer in zip(contexts, warm, strict=True):
        cold = server.generate([*context, 65, 66, 67], 6)
        if DTYPE == "native":
            assert_same(answer, cold)
        else:
            assert alike_error(answer, cold) <= BF16_LOGPROB_BOUND


def alike_error(warm: dict[str, Any], cold: dict[str, Any]) -> float:
    """Return the largest difference of log probabilities up to the first token that differs."""
    pairs = list(zip(warm["output_ids"], cold["output_ids"], strict=True))
    alike = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs) - 1) + 1
    return max(abs(a - b) for a, b in zip(logprobs(warm)[:alike], logprobs(cold)[:alike], strict=True))


def test_killed_under_load_then_stopped(restarts: Restarts) -> None:
    source = random.Random(11)
    server = restarts.start()
    contexts: list[list[int]] = []
    for round_number in range(ROUNDS):
        contexts = [session(server, f"restart-{round_number}-{index}") for index in range(24)]
        load = [Pending(server, random_tokens(900, f"load-{round_number}-{index}"), 30) for index in range(6)]
        time.sleep(source.uniform(0.05, 1.0))
        restarts.kill()
        for pending in load:
            pending.join(30)
        durable = [restarts.durable(context) for context in contexts]
        assert sum(length > 0 for length in durable) >= 8, (
            "the load left too little on the SSD to test anything"
        )

        server = restarts.start()
        recovered = server.status()["tiers"]["ssd"]["recovered"]
        assert recovered["checkpoints"] >= sum(length > 0 for length in durable)
        warm = ask_all(server, contexts)
        found = [cached(answer) for answer in warm]
        assert sum(map(min, found, durable)) >= 0.9 * sum(durable), list(zip(found, durable, strict=True))
        assert any(details(answer)["storage"] for answer in warm)
        session(server, "flushed")  # not asked again before the restart
        server.settle()
        same_as_cold(server, contexts, warm)

    contexts = [session(server, f"graceful-{index}") for index in range(6)]
    server.settle()
    log = restarts.stop(at_a_terminal=True)
    assert SAVED in log, log[-2000:]
    server = restarts.start()
    warm = ask_all(server, contexts)
    for context, answer in zip(contexts, warm, strict=True):
        assert cached(answer) >= floor_page(len(context)) - PAGE, details(answer)
    flushed = random_tokens(610, "flushed")
    assert cached(server.generate(flushed, 1)) == 0, "what was flushed before the restart is back"
    other = server.generate(contexts[0], 1, cache_salt="another tenant")
    assert cached(other) == 0, "a tenant got another's prefix"
    same_as_cold(server, contexts, warm)

    session(server, "not kept")
    server.settle()
    log = restarts.stop()
    assert SAVED in log, log[-2000:]
    server = restarts.start("--no-histate-keep-on-restart")
    assert server.status()["tiers"]["ssd"]["entries"] == 0
    assert all(cached(answer) == 0 for answer in ask_all(server, contexts))

    # Other weights, here the same ones again: what belongs to the old ones is out of use.
    session(server, "old weights")
    assert server.settle()["tiers"]["ssd"]["entries"] > 0
    model = server.post("/update_weights_from_disk", {"model_path": str(ensure_demo_model())})
    assert model["success"], model
    context = session(server, "new weights")
    status = server.settle()
    assert status["tiers"]["ssd"]["entries"] == 0 and status["verification"]["weights_changed"]
    assert cached(server.generate(context, 1)) > 0, "device and host go on"
