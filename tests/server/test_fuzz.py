"""Random agents: shared prefixes, rewrites, aborts, eight at a time, small pools and a slow disk.

HISTATE_FUZZ_REQUESTS sets the number of requests (200), HISTATE_FUZZ_SEED the seed (1).
"""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import pytest

from eval.servers import Server

from .conftest import Servers, Spec
from .tools import (
    LOGPROB_TOLERANCE,
    Pending,
    abort,
    assert_all_returned,
    cached,
    cold_run,
    details,
    difference,
    random_tokens,
)  # fmt: skip

pytestmark = [pytest.mark.server, pytest.mark.timeout(7200)]

REQUESTS = int(os.environ.get("HISTATE_FUZZ_REQUESTS", "200"))
SEED = int(os.environ.get("HISTATE_FUZZ_SEED", "1"))
CONCURRENCY = 8
COMPARE_EVERY = 20
SSD_COMPARE_EVERY = 5  # besides: answers that came through an SSD checkpoint are rarer
FUZZ = Spec(
    "fuzz",
    ("--chunked-prefill-size", "1024", "--max-total-tokens", "12288", "--histate-interval", "fixed:256"),
    (("HISTATE_TEST_DISK_DELAY_MS", "30"),),
    sizes=("--histate-ssd-size", "8MiB", "--histate-inflight-size", "2MiB"),
)
# KV of all agents together is larger than the device pool and the host arena, so KV and states push each other out.
HOST_MIB = 8
TIGHT = Spec(
    "fuzz-tight-host",
    FUZZ.arguments,
    FUZZ.environ,
    sizes=(*FUZZ.sizes, "--histate-host-size", f"{HOST_MIB}MiB"),
)


class Agents:
    """Makes prompts: each agent keeps a context that grows, is rewritten in the middle, or starts anew."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._systems = [random_tokens(length, f"system-{length}") for length in (200, 448, 1500)]
        self._contexts = [self._fresh() for _ in range(6)]

    def prompt(self) -> list[int]:
        source = self._source
        index = source.randrange(len(self._contexts))
        context = self._contexts[index]
        kind = source.random()
        if kind < 0.35:
            context = context + self._new(source.choice([1, 37, 64, 300]))
        elif kind < 0.75:
            anywhere, on_page = source.randrange(1, len(context) + 1), len(context) // 64 * 64
            cut = source.choice([anywhere, source.randrange(0, on_page + 64, 64)])
            context = context[:cut] + self._new(source.choice([1, 63, 64, 65, 200]))
        elif kind < 0.85:
            context = list(context)
        elif kind < 0.95:
            context = self._fresh()
        else:
            return self._new(source.choice([1, 2, 63, 64, 65]))
        if len(context) > 4500:
            context = self._fresh()
        self._contexts[index] = context
        return context

    def _fresh(self) -> list[int]:
        return self._source.choice(self._systems) + self._new(self._source.randrange(50, 2500))

    def _new(self, count: int) -> list[int]:
        return [self._source.randrange(32, 256) for _ in range(count)]


@pytest.mark.parametrize(
    ("spec", "requests"),
    [(FUZZ, REQUESTS), (TIGHT, REQUESTS // 2)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_random_requests(servers: Servers, spec: Spec, requests: int) -> None:
    server = servers.get(spec)
    source = random.Random(SEED)
    agents = Agents(source)
    lock = threading.Lock()
    numbers = iter(range(requests))
    sampled: list[tuple[list[int], dict[str, Any]]] = []
    errors: list[str] = []
    tally = {"answers": 0, "aborted": 0, "hits": 0, "ssd": 0}

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
                if number is None:
                    return
                prompt = agents.prompt()
                give_up, wait_s, silently = (
                    source.random() < 0.15,
                    source.random() * 0.6,
                    source.random() < 0.5,
                )
                length = source.choice([1, 2, 8, 30])
            try:
                if give_up and number % COMPARE_EVERY:
                    _abort_midway(server, prompt, f"fuzz-{SEED}-{number}", wait_s, silently)
                    with lock:
                        tally["aborted"] += 1
                    continue
                answer = server.generate(prompt, length)
            except Exception as error:
                with lock:
                    errors.append(f"request {number} ({len(prompt)} tokens): {error!r}")
                continue
            with lock:
                tally["answers"] += 1
                tally["hits"] += cached(answer) > 0
                tally["ssd"] += details(answer)["ssd_checkpoint"] > 0
                if not 0 <= cached(answer) < max(2, len(prompt)):
                    errors.append(f"request {number}: {cached(answer)} cached of {len(prompt)}")
                through_ssd = details(answer)["ssd_checkpoint"] > 0
                if number % COMPARE_EVERY == 0 or (through_ssd and tally["ssd"] % SSD_COMPARE_EVERY == 0):
                    sampled.append((prompt, answer))

    workers = [threading.Thread(target=work) for _ in range(CONCURRENCY)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors, errors[:10]
    status = server.settle()
    counters, host = status["counters"], status["tiers"]["host"]
    assert host["kv"]["used_bytes"] + host["states"]["used_bytes"] + host["free_bytes"] == host["arena_bytes"]
    if spec is TIGHT:
        assert HOST_MIB << 20 >= host["total_bytes"] > (HOST_MIB << 20) - host["page_bytes"]
    assert_all_returned(server)
    worst = 0.0
    for prompt, warm in sampled:
        cold = cold_run(server, prompt, len(warm["output_ids"]))
        assert warm["output_ids"] == cold["output_ids"], f"{len(prompt)} tokens, {details(warm)}"
        worst = max(worst, difference(warm, cold))
    assert worst <= LOGPROB_TOLERANCE
    assert_all_returned(server)
    used = sum(details(warm)["ssd_checkpoint"] > 0 for _, warm in sampled)
    print(
        f"fuzz: {tally}, compared {len(sampled)} ({used} through ssd), worst logprob difference {worst:.2e}"
    )
    print(f"fuzz counters: {counters}")
    assert tally["ssd"] > 0, "no request was served through an SSD checkpoint: the fuzz tested nothing"


def _abort_midway(server: Server, prompt: list[int], request_id: str, wait_s: float, silently: bool) -> None:
    pending = Pending(server, prompt, 40, rid=request_id)
    time.sleep(wait_s)
    if silently:
        pending.hang_up()
    else:
        abort(server, request_id)
    assert silently or pending.aborted or pending.last is not None
