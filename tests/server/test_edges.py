"""Prompt lengths around pages and chunks, aborts at every stage, separation of tenants, and disks that fail."""

from __future__ import annotations

import random
import time

import pytest

from eval.servers import Server

from .conftest import Servers, Spec
from .tools import (
    PAGE,
    Pending,
    abort,
    assert_all_returned,
    assert_same,
    cached,
    cold_run,
    details,
    floor_page,
    random_tokens,
)  # fmt: skip

pytestmark = pytest.mark.server

CHUNK = 1024
COMMON = (
    "--chunked-prefill-size",
    str(CHUNK),
    "--max-total-tokens",
    "16384",
    "--histate-interval",
    "fixed:256",
)
# What waits long for a disk as slow as this would not be written at all, and nothing could be read back.
PATIENT = ("--histate-write-queue-age", "3600")
SLOW = Spec("slow-disk", (*COMMON, *PATIENT), (("HISTATE_TEST_DISK_DELAY_MS", "1500"),))
BROKEN = Spec("broken-disk", COMMON, (("HISTATE_TEST_DISK_FAULT_RATE", "1.0"),))
TINY = Spec(
    "tiny", ("--chunked-prefill-size", "4096", "--max-total-tokens", "16384", "--histate-interval", "fixed:64"),
    sizes=("--histate-ssd-size", "1MiB", "--histate-inflight-size", "1MiB"),
)  # fmt: skip


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 8191, 8192, 8193])
def test_lengths_around_pages_and_chunks(main: Server, length: int) -> None:
    """The same prompt twice: at least one token is always computed, and the answers agree."""
    prompt = random_tokens(length, f"length-{length}")
    first = main.generate(prompt, 8)
    assert cached(first) == 0
    main.settle()
    second = main.generate(prompt, 8)
    # The last token is computed again for its logits, so a full match ends one page early.
    assert cached(second) == floor_page(length - 1)
    assert_same(first, second)
    longer = main.generate([*prompt, 65], 8)
    assert cached(longer) == floor_page(length)
    assert_same(longer, cold_run(main, [*prompt, 65], 8))


def test_one_token_of_output(main: Server) -> None:
    prompt = random_tokens(640, "one token")
    first = main.generate(prompt, 1)
    assert len(first["output_ids"]) == 1
    main.settle()
    follow = [*prompt, *first["output_ids"], *random_tokens(100, "one token follow")]
    warm = main.generate(follow, 1)
    assert cached(warm) == 640
    assert_same(warm, cold_run(main, follow, 1))


def test_the_end_of_an_output_is_a_checkpoint(main: Server) -> None:
    prompt = random_tokens(256, "output end")
    answer = main.generate(prompt, 256)
    main.settle()
    follow = [*prompt, *answer["output_ids"], *random_tokens(70, "output end follow")]
    warm = main.generate(follow, 8)
    assert cached(warm) >= 256 + 256 - PAGE
    assert_same(warm, cold_run(main, follow, 8))


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_tenants_share_nothing(main: Server, name: str) -> None:
    prompt = random_tokens(4096, f"tenant-{name}")
    main.generate(prompt, 1, **{name: "red"})
    before = main.settle()["counters"]["ssd_fault_ins_total"]
    rewrite = prompt[:3000] + random_tokens(50, "tenant new")
    assert cached(main.generate(rewrite, 1, **{name: "blue"})) == 0
    assert cached(main.generate(rewrite, 1)) == 0
    assert main.settle()["counters"]["ssd_fault_ins_total"] == before
    again = prompt[:3000] + random_tokens(51, "tenant other")
    assert cached(main.generate(again, 1, **{name: "red"})) > 0
    assert main.settle()["counters"]["ssd_fault_ins_total"] == before + 1


class TestAborts:
    """Against a disk that takes up to 1.5 s for every read and write."""

    @pytest.fixture
    def slow(self, servers: Servers) -> Server:
        return servers.get(SLOW)

    @pytest.mark.parametrize("silently", [False, True], ids=["abort_request", "hang up"])
    def test_while_queued_and_prefilling(self, slow: Server, silently: bool) -> None:
        pending = [
            Pending(slow, random_tokens(5000, f"queue-{silently}-{i}"), 2, rid=f"queue-{i}") for i in range(3)
        ]
        time.sleep(0.3)
        for index, request in enumerate(pending):
            _end(slow, request, f"queue-{index}", silently)
        _assert_idle_and_whole(slow)

    @pytest.mark.parametrize("silently", [False, True], ids=["abort_request", "hang up"])
    def test_while_decoding(self, slow: Server, silently: bool) -> None:
        pending = Pending(slow, random_tokens(700, f"decode-{silently}"), 5000, rid="decode")
        assert pending.first_token.wait(60)
        _end(slow, pending, "decode", silently)
        _assert_idle_and_whole(slow)

    @pytest.mark.parametrize("silently", [False, True], ids=["abort_request", "hang up"])
    def test_while_faulting_in(self, slow: Server, silently: bool) -> None:
        prompt = random_tokens(3000, f"fault-{silently}")
        slow.generate(prompt, 1)
        slow.settle()
        before = slow.status()["counters"]
        pending = Pending(slow, prompt[:2000] + random_tokens(50, "fault new"), 2, rid="fault")
        deadline = time.monotonic() + 20
        while (
            slow.status()["inflight"]["fault_ins"] == 0 and time.monotonic() < deadline and pending.is_alive()
        ):
            time.sleep(0.02)
        _end(slow, pending, "fault", silently)
        after = slow.settle()["counters"]
        assert after["ssd_fault_ins_total"] > before["ssd_fault_ins_total"]
        _assert_idle_and_whole(slow)

    def test_one_waiter_gives_up_and_the_other_is_served(self, slow: Server) -> None:
        prompt = random_tokens(3000, "two waiters")
        slow.generate(prompt, 1)
        slow.settle()
        rewrites = [prompt[:2000] + random_tokens(50, f"waiter-{index}") for index in range(2)]
        first = Pending(slow, rewrites[0], 4, rid="waiter-0")
        second = Pending(slow, rewrites[1], 4, rid="waiter-1")
        time.sleep(0.2)
        abort(slow, "waiter-0")
        answer = second.result()
        first.join(60)
        assert details(answer)["ssd_checkpoint"] == cached(answer) == 1792
        assert_same(answer, cold_run(slow, rewrites[1], 4))
        _assert_idle_and_whole(slow)

    def test_while_storing(self, slow: Server) -> None:
        pending = Pending(slow, random_tokens(3000, "store"), 400, rid="store")
        assert pending.first_token.wait(60)
        assert slow.status()["inflight"]["writes"] > 0
        abort(slow, "store")
        slow.flush()  # with checkpoints still on their way
        _assert_idle_and_whole(slow)

    def test_others_run_while_one_waits_for_its_checkpoint(self, slow: Server) -> None:
        prompt = random_tokens(3000, "others")
        slow.generate(prompt, 1)
        slow.settle()
        waiting = Pending(slow, prompt[:2000] + random_tokens(50, "others new"), 2)
        time.sleep(0.05)
        started = time.monotonic()
        slow.generate(random_tokens(40, "quick"), 1)
        quick_s = time.monotonic() - started
        was_waiting = waiting.is_alive()
        assert details(waiting.result())["ssd_checkpoint"] == 1792
        assert was_waiting or quick_s < 1.5

    def test_two_hundred_aborts_at_any_moment(self, slow: Server) -> None:
        source = random.Random(60)
        contexts = [random_tokens(1500, f"abort-{index}") for index in range(5)]
        for number in range(50):
            batch = []
            for index in range(4):
                context = source.choice(contexts)
                prompt = context[: source.randrange(200, 1500)] + random_tokens(30, f"abort-{number}-{index}")
                batch.append(Pending(slow, prompt, 20, rid=f"abort-{number}-{index}"))
            time.sleep(source.random() * 0.15)
            for index, request in enumerate(batch):
                _end(slow, request, f"abort-{number}-{index}", silently=source.random() < 0.5, wait=False)
        _assert_idle_and_whole(slow)


def _end(server: Server, request: Pending, request_id: str, silently: bool, wait: bool = True) -> None:
    if silently:
        request.hang_up()
    else:
        abort(server, request_id)
    if wait:
        request.join(60)
        assert not request.is_alive()


def _assert_idle_and_whole(server: Server) -> None:
    assert_all_returned(server)
    assert server.generate(random_tokens(300, "whole"), 2)["output_ids"]
    assert_all_returned(server)


def test_a_broken_disk_is_only_slow(servers: Servers) -> None:
    server = servers.get(BROKEN)
    before = server.status()["counters"]
    for index in range(4):
        prompt = random_tokens(3000, f"broken-{index}")
        server.generate(prompt, 2)
        server.settle()
        rewrite = prompt[:2000] + random_tokens(50, f"broken-new-{index}")
        warm = server.generate(rewrite, 8)
        assert details(warm)["ssd_checkpoint"] == 0
        assert_same(warm, cold_run(server, rewrite, 8))
    after = server.settle()["counters"]
    assert after["ssd_misses_total"]["read_failed"] > before["ssd_misses_total"]["read_failed"]
    reasons = {name: count for name, count in after["ssd_read_misses_total"].items() if count}
    for name in (
        "cleared",
        "root_down",
    ):  # no failed reads: flushed meanwhile, and not asked after five failures in a row
        reasons.pop(name, None)
    assert reasons and set(reasons) <= {"io_error", "corrupt_header", "corrupt_segment", "wrong_fingerprint",
                                        "wrong_key", "wrong_generation", "wrong_length"}  # fmt: skip
    assert sum(reasons.values()) == after["ssd_misses_total"]["read_failed"]
    assert_all_returned(server)


def test_a_tiny_tier_drops_and_evicts_and_stays_right(servers: Servers) -> None:
    server = servers.get(TINY)
    assert server.status()["tiers"]["ssd"]["checkpoints"]["total"] <= 15
    for index in range(4):
        prompt = random_tokens(3000, f"tiny-{index}")
        server.generate(prompt, 2)
        status = server.settle()
        slabs = status["tiers"]["ssd"]["checkpoints"]
        assert slabs["used"] <= slabs["total"]
        rewrite = prompt[:2900] + random_tokens(50, f"tiny-new-{index}")
        warm = server.generate(rewrite, 8)
        assert 0 < cached(warm) <= 2900
        assert_same(warm, cold_run(server, rewrite, 8))
    for index in range(4):  # without a flush in between, so that slabs run out
        server.generate(random_tokens(2000, f"tiny-fill-{index}"), 2)
        server.settle()
    counters = server.status()["counters"]
    assert counters["checkpoints_dropped_total"]["no_inflight_buffer"] > 0
    assert counters["ssd_entries_dropped_total"]["evicted"] > 0
    assert counters["checkpoints_planned_total"] == counters["checkpoints_captured_total"]
    assert_all_returned(server)
