"""Two ranks with disks of different speed decide alike: same tokens and same cached counts as one rank, no hang.

HISTATE_TP_REQUESTS sets the number of requests (60). HISTATE_TP_POLICY=paper lets the small tiers evict by the default
policies; else by those that learn, which have more state to agree on.
"""

from __future__ import annotations

import os
import random
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eval.servers import Server
from tests.metric_names import documented

from .conftest import Servers, Spec
from .slabs import read_slabs, slab_files
from .tools import Pending, assert_all_returned, cached, details, logprobs, random_tokens

pytestmark = [pytest.mark.server, pytest.mark.timeout(5400)]

REQUESTS = int(os.environ.get("HISTATE_TP_REQUESTS", "60"))
PAPER = os.environ.get("HISTATE_TP_POLICY") == "paper"
COMMON = ("--chunked-prefill-size", "2048", "--max-total-tokens", "16384")
# Delays are drawn from a sequence seeded by the rank's name, so the ranks finish their reads in different order.
SLOW_DISK = (("HISTATE_TEST_DISK_DELAY_MS", "40"),)
ONE = Spec("one-rank", COMMON, SLOW_DISK)
TWO = Spec("two-ranks", (*COMMON, "--tp-size", "2"), SLOW_DISK)
# Of each rank: 1.6 MiB on the device, 2.5 MiB on the host, 2 MiB on the SSD; the sessions below are ten times as much.
TIGHT_TWO = Spec(
    "two-tight-ranks",
    (
        "--chunked-prefill-size",
        "2048",
        "--max-total-tokens",
        "3072",
        "--max-mamba-cache-size",
        "24",
        "--tp-size",
        "2",
        *(() if PAPER else ("--histate-interval", "learned", "--histate-eviction", "loss")),
    ),
    SLOW_DISK,
    sizes=("--histate-ssd-size", "2MiB", "--histate-inflight-size", "1MiB", "--histate-host-size", "5MiB"),
)
BATCH = 6


def prompts() -> list[list[int]]:
    source = random.Random(7)
    contexts = [random_tokens(900, f"tp-{index}") for index in range(4)]
    found = []
    for number in range(REQUESTS):
        index = number % len(contexts)
        context = contexts[index]
        cut = source.randrange(64, len(context))
        context = context[:cut] + [source.randrange(32, 256) for _ in range(source.choice([10, 200, 500]))]
        if len(context) > 3000 or len(context) < 200:
            context = random_tokens(900, f"tp-{index}-{number}")
        contexts[index] = context
        found.append(context)
    return found


def ask_all(server: Server) -> list[tuple[list[int], int, int]]:
    """Ask one by one, settling in between, so that what is cached does not depend on how fast anything is."""
    answers = []
    for prompt in prompts():
        answer = server.generate(prompt, 4)
        answers.append((answer["output_ids"], cached(answer), details(answer)["ssd_checkpoint"]))
        server.settle()
    return answers


def test_two_ranks_answer_like_one(servers: Servers) -> None:
    one = ask_all(servers.get(ONE))
    assert sum(ssd > 0 for _, _, ssd in one) >= REQUESTS // 10
    server = servers.get(TWO)
    two = ask_all(server)
    assert [counts for _, *counts in two] == [counts for _, *counts in one]
    assert [tokens for tokens, *_ in two] == [tokens for tokens, *_ in one]
    print(
        "tensor parallel:", len(two), "requests,", sum(ssd > 0 for *_, ssd in two), "through SSD checkpoints"
    )


def test_each_rank_tells_what_is_its_own(servers: Servers) -> None:
    """What both decide alike comes from the first one, so that a sum is right; bytes and times come from each."""
    server = servers.get(TWO)
    server.generate(random_tokens(1000, "tp metrics"), 2)
    server.settle()
    time.sleep(2.5)
    ranks: dict[str, set[str]] = {}
    samples = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples if family.name.startswith("histate_") else ():
            ranks.setdefault(family.name + "_total" * (family.type == "counter"), set()).add(
                sample.labels["tp_rank"]
            )
            samples[sample.name, sample.labels["tp_rank"], sample.labels.get("kind")] = sample.value
    assert ranks == {row.name: {"0", "1"} if row.each_rank else {"0"} for row in documented()}
    assert samples["histate_ranks_agree", "0", None] == 1
    written = [samples["histate_ssd_written_bytes_total", rank, "checkpoint"] for rank in ("0", "1")]
    assert written[0] == written[1] > 0
    assert all(samples["histate_ssd_write_seconds_count", rank, "checkpoint"] > 0 for rank in ("0", "1"))


def test_concurrent_requests_do_not_hang(servers: Servers) -> None:
    server = servers.get(TWO)
    waiting: list[Pending] = []
    answered = 0
    for prompt in prompts():
        waiting.append(Pending(server, prompt, 4))
        if len(waiting) == 6:
            assert len(logprobs(waiting.pop(0).result(120))) == 4
            answered += 1
    for pending in waiting:
        pending.result(120)
        answered += 1
    assert answered == REQUESTS
    assert_all_returned(server)


def test_both_ranks_evict_the_same(servers: Servers) -> None:
    """After each batch; every tier is so small that it evicts, and the disks of the ranks are slow in their own ways."""
    server = servers.get(TIGHT_TWO)
    source = random.Random(11)
    contexts = [random_tokens(source.randrange(300, 900), f"tp tight-{index}") for index in range(24)]
    asked = hits = reads = batches = 0
    started = time.monotonic()
    while asked < REQUESTS:
        waiting = []
        for index in source.sample(range(len(contexts)), BATCH):
            new = [source.randrange(32, 256) for _ in range(source.randrange(20, 250))]
            context = contexts[index]
            kept = len(context) if source.random() < 0.6 else source.randrange(64, len(context))
            contexts[index] = (context[:kept] if len(context) < 1400 else context[:200]) + new
            waiting.append(Pending(server, contexts[index], source.choice([1, 4, 70])))
        for pending in waiting:
            answer = pending.result(120)
            hits += cached(answer) > 0
            reads += details(answer)["ssd_checkpoint"] > 0
        asked, batches = asked + len(waiting), batches + 1
        eviction = server.status()["eviction"]
        assert eviction["ranks_agree"], f"the ranks have evicted differently after {asked} requests"
    evicted = eviction["evictions_total"]
    print(
        f"tensor parallel: {asked} requests in {time.monotonic() - started:.0f} s, equal digests after each of {batches} "
        f"batches; hits {hits}, of these {reads} through the SSD; evictions {evicted}"
    )
    if asked >= 60:
        for tier in ("device", "host", "ssd"):
            assert evicted[f"{tier}_bundle"] + evicted[f"{tier}_intermediate"] > 0
    assert reads > 0
    assert_all_returned(server)


def test_both_ranks_hold_the_same_checkpoints(servers: Servers) -> None:
    server = servers.get(TWO)
    server.generate(random_tokens(2000, "tp same"), 2)
    server.settle()
    first, second = (read_slabs(file) for file in slab_files(servers.ssd_dir(TWO)))
    assert first.keys() == second.keys()
    for key, stored in first.items():
        assert (stored.at_token, stored.generation) == (second[key].at_token, second[key].generation)
        assert stored.payload != second[key].payload  # each rank has its own half of the state
    states = server.status()["ranks"]
    assert states[0]["tiers"]["ssd"]["entries"] > 0
