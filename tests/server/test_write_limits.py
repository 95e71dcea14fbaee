"""Servers that may write little or nothing to their SSD: right answers, limits kept on both ranks, nothing held.

HISTATE_TP_REQUESTS sets the number of requests of the second test (60).
"""

from __future__ import annotations

import os
import random
import time

import pytest

from .conftest import Servers, Spec
from .slabs import slab_files
from .tools import Pending, assert_all_returned, assert_same, cached, cold_run, details, random_tokens

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

REQUESTS = int(os.environ.get("HISTATE_TP_REQUESTS", "60"))
TIGHT = ("--chunked-prefill-size", "2048", "--max-total-tokens", "3072", "--max-mamba-cache-size", "24")
SIZES = ("--histate-ssd-size", "8MiB", "--histate-inflight-size", "1MiB", "--histate-host-size", "8MiB")
READ_ONLY = Spec(
    "read-only",
    (
        *TIGHT,
        "--histate-ssd-write-rate",
        "0",
        "--histate-history",
        "cheapest",
        "--histate-interval",
        "fixed:256",
    ),
    sizes=SIZES,
)
RATE, QUEUE_AGE_S = 256 << 10, 0.2
LIMITED = Spec(
    "limited-ranks",
    (
        *TIGHT, "--tp-size", "2",
        "--histate-ssd-write-rate", "256KiB", "--histate-ssd-daily-writes", "1GiB", "--histate-write-queue-age", str(QUEUE_AGE_S),
    ),
    (("HISTATE_TEST_DISK_DELAY_MS", "150"),),
    sizes=SIZES,
)  # fmt: skip


def test_a_server_that_writes_nothing_still_resumes_from_the_host(servers: Servers) -> None:
    """Sessions at the ends of their answers, rewrites at checkpoints inside."""
    server = servers.get(READ_ONLY)
    prompt = random_tokens(1000, "read-only")
    first = server.generate(prompt, 80)
    server.settle()
    for number in range(5):
        server.generate(
            random_tokens(1200, f"read-only other {number}"), 4
        )  # the device forgets the first one
        server.settle()
    turn = [*prompt, *first["output_ids"][:-1], *random_tokens(40, "read-only turn")]
    answer = server.generate(turn, 16)
    assert details(answer)["host"] > 0 and cached(answer) >= 1024, "the end of its first answer"
    for number in range(5, 10):
        server.generate(random_tokens(1200, f"read-only other {number}"), 4)
        server.settle()
    hits = server.settle()["counters"]["hits_total"]["host"]
    rewrite = [*prompt[:700], *random_tokens(300, "read-only rewrite")]
    rewritten = server.generate(rewrite, 16)
    assert details(rewritten)["host"] > 0 and cached(rewritten) == 512, "inside its first prompt"
    status = server.settle()
    assert status["counters"]["hits_total"]["host"] == hits + 1
    historical = status["counters"]["historical_checkpoints_total"]
    assert historical["host ssd_refused"] >= 40 and sum(historical.values()) == historical["host ssd_refused"]
    assert status["counters"]["checkpoints_captured_total"] >= historical["host ssd_refused"]
    assert status["tiers"]["host"]["states"]["used"] > 0
    assert status["counters"]["ssd_written_bytes_total"] == 0 and status["tiers"]["ssd"]["entries"] == 0
    assert set(status["counters"]["ssd_puts_total"]) == {"write_budget"}
    assert status["tiers"]["ssd"]["writes"]["bytes_per_second"] == 0
    assert_same(answer, cold_run(server, turn))
    assert_same(rewritten, cold_run(server, rewrite))
    assert_all_returned(server)


def test_both_ranks_keep_to_the_rate_and_refuse_the_same(servers: Servers) -> None:
    server = servers.get(LIMITED)
    source = random.Random(13)
    contexts = [random_tokens(source.randrange(300, 900), f"limited-{index}") for index in range(16)]
    asked, started = 0, time.monotonic()
    written_before = server.status()["counters"]["ssd_written_bytes_total"]
    while asked < REQUESTS:
        waiting = []
        for index in source.sample(range(len(contexts)), 6):
            new = [source.randrange(32, 256) for _ in range(source.randrange(20, 250))]
            context = contexts[index]
            kept = len(context) if source.random() < 0.6 else source.randrange(64, len(context))
            contexts[index] = (context[:kept] if len(context) < 1400 else context[:200]) + new
            waiting.append(Pending(server, contexts[index], source.choice([1, 4, 70])))
        for pending in waiting:
            pending.result(120)
        asked += len(waiting)
        status = server.status()
        assert status["eviction"]["ranks_agree"], f"the ranks have evicted differently after {asked} requests"
        writes = status["tiers"]["ssd"]["writes"]
        written = status["counters"]["ssd_written_bytes_total"] - written_before
        assert written <= RATE * (time.monotonic() - started) + writes["burst_bytes"]
        assert 0 <= writes["bytes_now"] <= writes["burst_bytes"] and writes["bytes_today"] >= written
    puts = status["counters"]["ssd_puts_total"]
    print(
        f"write limits: {asked} requests in {time.monotonic() - started:.0f} s, puts {puts}, {written} bytes"
    )
    assert sum(puts.get(reason, 0) for reason in ("write_budget", "low_value", "queue_age")) > 0
    assert all(file.stat().st_size <= 8 << 20 for file in slab_files(servers.ssd_dir(LIMITED)))
    assert_all_returned(server)
