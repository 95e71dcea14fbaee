"""Restored prefixes computed again: what is sampled, when, what yields to requests, what is given up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_histate.adapter.counters import Unverified
from sglang_histate.adapter.purge import purge
from sglang_histate.adapter.verification import MAX_PENDING, MAX_STEPS_QUEUED, MAX_TOKENS, MAX_TRIES
from sglang_histate.store import namespace_of

from .conftest import GPU
from .engine import PAGE, request, tokens
from .idle_scheduler import POSITION, A, Scheduler, restored, skipped, start
from .stores import fake_disk
from .test_tier import Alone, Rank

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")


@pytest.fixture
def rank():
    made = Rank(Alone(), verify_rate=1.0)
    yield made
    made.store.close()


@pytest.fixture
def scheduler(rank):
    return Scheduler(rank)


def test_an_equal_state_is_verified_and_leaves_nothing(rank, scheduler) -> None:
    restored(rank)
    req = start(scheduler)
    assert list(req.origin_input_ids) == list(A[:POSITION]) and req.skip_radix_cache_insert
    assert rank.engine.cache.is_internal(req) and not rank.engine.cache.is_internal(request(A))
    planned = rank.counters.planned
    assert scheduler.compute(3.0) is not None
    scheduler.settle()
    assert rank.counters.verified == 1 and rank.counters.mismatches == 0 and skipped(rank) == {}
    assert rank.counters.planned == planned and rank.counters.captured == 0
    assert rank.tier.verification.as_json()["quarantined"] is False
    assert len(list(rank.store.entries())) == 1 and not rank.engine.nodes()
    rank.check_idle()
    for _ in range(4):
        scheduler.idle()
    assert not scheduler.waiting


def test_only_after_a_second_of_idleness(rank, scheduler) -> None:
    restored(rank)
    for _ in range(20):
        scheduler.idle(0.5)
        scheduler.idle(0.4)
        scheduler.busy = True
        scheduler.idle()
        scheduler.busy = False
    assert not scheduler.waiting
    scheduler.idle(0.5)
    scheduler.arrive(request(tokens((7, 100))))
    scheduler.waiting.clear()
    scheduler.idle(0.9)
    scheduler.idle(0.2)
    assert not scheduler.waiting
    scheduler.idle()
    assert len(scheduler.waiting) == 1


def test_small_differences_are_noise(rank, scheduler) -> None:
    restored(rank)
    start(scheduler)
    scheduler.compute(3.0 * (1 + 2**-9))
    scheduler.settle()
    assert rank.counters.verified == 1 and rank.counters.mismatches == 0


def test_a_request_in_the_queue_yields_to_a_real_one(rank, scheduler) -> None:
    restored(rank)
    mine = start(scheduler)
    other = request(tokens((5, 200)))
    scheduler.arrive(other)
    assert scheduler.waiting == [other] and rank.store.records.free == rank.store.records.total
    scheduler.waiting.clear()
    second = start(scheduler)
    assert second.rid != mine.rid and second.extra_key != mine.extra_key
    scheduler.compute(3.0)
    scheduler.settle()
    assert rank.counters.verified == 1 and skipped(rank) == {}
    rank.check_idle()


def test_it_yields_between_chunks_but_not_in_the_last_one(rank, scheduler) -> None:
    restored(rank)
    start(scheduler)
    assert scheduler.compute(0.0, 0, 256) is None, "nothing to capture in the first chunk"
    scheduler.arrive(request(tokens((5, 200))))
    assert (
        not rank.tier.verification.as_json()["running"] and rank.tier.verification.as_json()["pending"] == 1
    )
    scheduler.waiting.clear()
    mine = start(scheduler)
    scheduler.compute(0.0, 0, 256)
    scheduler.compute(3.0, 256)
    scheduler.arrive(request(tokens((5, 200))))
    assert rank.tier.verification.as_json()["running"] and mine not in scheduler.waiting
    scheduler.settle()
    assert rank.counters.verified == 1
    rank.check_idle()


def test_an_interrupted_one_is_given_up_at_last(rank, scheduler) -> None:
    restored(rank)
    for _ in range(MAX_TRIES):
        start(scheduler)
        scheduler.arrive(request(tokens((5, 200))))
        scheduler.waiting.clear()
    assert skipped(rank) == {Unverified.INTERRUPTED: 1} and not rank.tier.verification.as_json()["pending"]
    rank.check_idle()


def test_aborting_everything_does_not_stop_it_for_good(rank, scheduler) -> None:
    restored(rank)
    start(scheduler)
    scheduler.abort_request(SimpleNamespace(rid=""))
    assert rank.tier.verification.as_json()["pending"] == 1
    start(scheduler)
    scheduler.compute(3.0)
    scheduler.settle()
    assert rank.counters.verified == 1


def test_what_is_not_admitted_is_given_up(rank, scheduler) -> None:
    restored(rank)
    start(scheduler)
    for _ in range(MAX_STEPS_QUEUED + 1):
        scheduler.idle(0.0)
    assert skipped(rank) == {Unverified.NOT_ADMITTED: 1} and not scheduler.waiting
    rank.check_idle()


def test_what_is_not_sampled(rank, scheduler) -> None:
    for number in range(MAX_PENDING + 2):
        restored(rank, ids=tokens((20 + number, 256)), position=64)
    assert skipped(rank) == {Unverified.NEVER_IDLE: 2}
    rank.engine.cache.reset()
    assert rank.counters.unverified[Unverified.CACHE_RESET] == MAX_PENDING
    long = request(tokens((3, MAX_TOKENS + 2 * PAGE)))
    rank.tier.verification.restored(long, MAX_TOKENS + PAGE)
    adapted = request(A, lora_id="x")
    rank.tier.verification.restored(adapted, POSITION)
    assert (
        rank.counters.unverified[Unverified.TOO_LONG]
        == rank.counters.unverified[Unverified.NOT_ONLY_TOKENS]
        == 1
    )
    assert not rank.tier.verification.as_json()["pending"]


def test_no_tokens_of_a_purged_tenant_are_kept(rank, scheduler) -> None:
    restored(rank)
    other = request(tokens((6, 300)), cache_salt="b")
    rank.tier.verification.restored(other, 64)
    start(scheduler)
    purge(rank.engine.cache, namespace_of(None, "b"))
    assert rank.tier.verification.as_json()["pending"] == 0 and rank.tier.verification.as_json()["running"]
    assert scheduler.waiting and skipped(rank) == {Unverified.PURGED: 1}
    purge(rank.engine.cache, None)
    assert not rank.tier.verification.as_json()["running"] and not scheduler.waiting
    assert skipped(rank) == {Unverified.PURGED: 2}
    scheduler.settle()
    rank.check_idle()


def test_a_checkpoint_that_went_meanwhile(rank, scheduler) -> None:
    key = restored(rank)
    rank.store.drop(key)
    for _ in range(3):
        scheduler.idle()
    assert skipped(rank) == {Unverified.RECORD_GONE: 1} and not scheduler.waiting
    key = restored(rank)
    start(scheduler)
    rank.store.drop(key)
    scheduler.compute(3.0)
    scheduler.settle()
    assert skipped(rank) == {Unverified.RECORD_GONE: 2} and rank.counters.verified == 0
    rank.check_idle()


def test_a_read_that_fails_is_no_mismatch(rank, scheduler) -> None:
    restored(rank)
    start(scheduler)
    scheduler.compute(3.0)
    fake_disk(rank.store).read_faults.append("eio")
    scheduler.settle()
    assert skipped(rank) == {Unverified.READ_FAILED: 1} and rank.counters.mismatches == 0
    rank.check_idle()


@pytest.mark.parametrize("reading", [False, True])
def test_a_flush_in_the_middle(rank, scheduler, reading) -> None:
    restored(rank)
    start(scheduler)
    scheduler.compute(4.0)
    if reading:
        fake_disk(rank.store).reads_allowed.clear()
        rank.tier.tick()
        assert rank.store.outstanding == 1
    scheduler.flush_cache()
    fake_disk(rank.store).reads_allowed.set()
    scheduler.settle()
    assert skipped(rank) == {Unverified.CACHE_RESET: 1} and rank.counters.verified == 0
    rank.check_idle()


def test_a_share_of_them() -> None:
    rank = Rank(Alone(), verify_rate=0.0)
    for _ in range(5):
        restored(rank)
    assert not rank.tier.verification.as_json()["pending"] and skipped(rank) == {}
    rank.store.close()
