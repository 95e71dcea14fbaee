"""Restored prefixes computed again: what is sampled, when, what yields to requests, what a difference brings about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_histate.adapter.counters import Unverified
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.request_state import state_of
from sglang_histate.adapter.trust import Trust
from sglang_histate.adapter.verification import MAX_PENDING, MAX_STEPS_QUEUED, MAX_TOKENS, MAX_TRIES
from sglang_histate.store import PutResult
from sglang_histate.store.quarantine import Quarantine, read_quarantine

from .conftest import GPU
from .engine import PAGE, request, tokens
from .stores import put
from .test_tier import Alone, Rank

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
A = tokens((1, 1024))
POSITION = 512


class Scheduler:
    """What verification uses of SGLang's scheduler, around a rank without model."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.cache = rank.engine.cache
        self.waiting: list[Any] = []
        self.busy = False
        self.flushes = 0
        self.now_s = 100.0
        rank.tier.verification._clock = lambda: self.now_s

    def handle_generate_request(self, recv: Any) -> None:
        assert recv.sampling_params.max_new_tokens == 1
        req = request(recv.input_ids, extra_key=recv.extra_key)
        req.rid = recv.rid
        self.arrive(req)

    def arrive(self, req: Any) -> None:
        self.cache.request_arrived(req)
        self.waiting.append(req)

    def abort_request(self, recv: Any) -> None:
        for req in [req for req in self.waiting if req.rid.startswith(recv.rid)]:
            self.waiting.remove(req)
            self.cache.release_aborted_request(req.cache_request_handle)

    def is_fully_idle(self) -> bool:
        return not self.waiting and not self.busy

    def flush_cache(self) -> bool:
        self.flushes += 1
        self.cache.reset()
        self.rank.engine.kv.clear()
        self.rank.engine.states.clear()
        return True

    def idle(self, seconds: float = 0.6) -> None:
        """One idle step, and some time after it."""
        self.cache.scheduler_idle(self)
        self.now_s += seconds

    def compute(self, value: float, start: int = 0, end: int | None = None) -> Any:
        """One prefill chunk of the request in the queue. All numbers of the state at its end are `value`."""
        (req,) = self.waiting
        assert self.cache.request_ready(req)
        req.prefix_len, req.extend_end = start, len(req.origin_input_ids) if end is None else end
        capture = self.cache.plan_capture([req])
        if capture is not None:
            (row,) = capture.rows
            layout = self.rank.engine.layout
            for views in layout.record_views(row.record.payload):
                parts = layout.codec.encode(torch.full((1, *layout.temporal_shape), value))
                for target, part in zip(views.temporal, parts, strict=True):
                    target.copy_(part[0])
                views.conv.fill_(value)
            capture.done = lambda: True
        if req.extend_end == len(req.origin_input_ids):
            self.waiting.remove(req)
            self.rank.tier.released(req)
        return capture

    def settle(self) -> None:
        self.rank.drain()


@pytest.fixture
def rank():
    made = Rank(Alone(), verify_rate=1.0)
    yield made
    made.store.close()


@pytest.fixture
def scheduler(rank):
    return Scheduler(rank)


def restored(rank: Rank, value: float = 3.0, ids=A, position: int = POSITION) -> bytes:
    """A request resumes from a checkpoint whose numbers are all `value`."""
    key = PageKeys(PAGE, None, None).at(ids, position)
    if rank.store.lookup(key) is None:
        put(rank.store, rank.engine.layout, key, position, value)
        rank.drain()
    req = request(ids)
    req.prefix_len, req.extend_end = position, len(ids)
    req.last_node = rank.engine.cache.tree_core.root_node.id
    state_of(req, PAGE).attached = position
    rank.tier._account(req)
    return key


def skipped(rank: Rank) -> dict[Unverified, int]:
    return {reason: count for reason, count in rank.counters.unverified.items() if count}


def start(scheduler: Scheduler) -> Any:
    """Be idle until the check begins; return its request."""
    for _ in range(4):
        scheduler.idle()
    (req,) = scheduler.waiting
    return req


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


@pytest.mark.parametrize("value", [3.2, -3.0, 0.0, float("nan")])
def test_a_difference_ends_all_use_of_the_store(rank, scheduler, value, caplog) -> None:
    restored(rank)
    put(rank.store, rank.engine.layout, b"o" * 32, 64, 1.0)
    rank.drain()
    start(scheduler)
    scheduler.compute(value)
    scheduler.settle()
    assert rank.counters.verified == rank.counters.mismatches == 1
    found = rank.tier.verification.as_json()
    assert (
        found["quarantined"] and "layer 0" in found["quarantine_reason"] and found["quarantined_since"] > "20"
    )
    assert caplog.text.count("HISTATE ALARM") == 1
    assert not list(rank.store.entries()), "records of any prompt are out of use"
    record = rank.store.acquire_record()
    assert rank.store.put(b"n" * 32, 64, record) is PutResult.QUARANTINED
    assert rank.tier.verification.trust.tree_doubted


def test_small_differences_are_noise(rank, scheduler) -> None:
    restored(rank)
    start(scheduler)
    scheduler.compute(3.0 * (1 + 2**-9))
    scheduler.settle()
    assert rank.counters.verified == 1 and rank.counters.mismatches == 0


def test_nothing_in_memory_is_used_until_the_flush(rank, scheduler) -> None:
    rank.engine.insert(A)
    rank.engine.settle()
    assert rank.engine.match(request(A)).best_match_node != rank.engine.cache.tree_core.root_node.id
    rank.tier.verification.trust.lose("a test")
    other = request(A)
    other.init_next_round_input(rank.engine.cache, cow_mamba=False)
    assert other.prefix_len == 0 and rank.engine.cache.request_ready(other)
    rank.prefill(other, 0, len(A))
    assert other.skip_radix_cache_insert, "its KV must not be exchanged for what lies in the tree"
    rank.drain()
    scheduler.busy = True
    scheduler.idle()
    assert scheduler.flushes == 0
    scheduler.busy = False
    scheduler.idle()
    scheduler.idle()
    assert scheduler.flushes == 1 and not rank.tier.verification.trust.tree_doubted
    rank.engine.insert(A)
    assert rank.engine.match(request(A)).best_match_node != rank.engine.cache.tree_core.root_node.id
    again = request(tokens((8, 300)))
    rank.prefill(again, 0, 300)
    assert not again.skip_radix_cache_insert
    rank.drain()
    assert not list(rank.store.entries())


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
    rank.store._disk.read_faults.append("eio")
    scheduler.settle()
    assert skipped(rank) == {Unverified.READ_FAILED: 1} and rank.counters.mismatches == 0
    rank.check_idle()


@pytest.mark.parametrize("reading", [False, True])
def test_a_flush_in_the_middle(rank, scheduler, reading) -> None:
    restored(rank)
    start(scheduler)
    scheduler.compute(4.0)
    if reading:
        rank.store._disk.reads_allowed.clear()
        rank.tier.tick()
        assert rank.store.outstanding == 1
    scheduler.flush_cache()
    rank.store._disk.reads_allowed.set()
    scheduler.settle()
    assert skipped(rank) == {Unverified.CACHE_RESET: 1} and rank.counters.verified == 0
    rank.check_idle()


def test_a_share_of_them() -> None:
    rank = Rank(Alone(), verify_rate=0.0)
    for _ in range(5):
        restored(rank)
    assert not rank.tier.verification.as_json()["pending"] and skipped(rank) == {}
    rank.store.close()


def test_another_rank_found_it(rank, scheduler, caplog) -> None:
    restored(rank)
    start(scheduler)
    rank.tier.verification._agreement = SimpleNamespace(minimum=lambda values: [min(-1, v) for v in values])
    scheduler.compute(3.0)
    scheduler.settle()
    assert rank.counters.mismatches == 1 and "on another rank" in caplog.text


# The note


def wait_note(folder) -> Quarantine:
    import threading

    for thread in threading.enumerate():
        if thread.name == "histate-note":
            thread.join(10)
    found = read_quarantine(folder / "quarantined.json")
    assert found is not None
    return found


def test_the_next_run_knows(rank, tmp_path, caplog) -> None:
    trust = Trust(rank.store, tmp_path, Alone())
    assert not trust.as_json()["quarantined"]
    trust.lose("the state is wrong")
    trust.lose("and once more")
    assert wait_note(tmp_path).why == "the state is wrong"
    assert caplog.text.count("HISTATE ALARM") == 1 and str(tmp_path) in caplog.text
    later = Trust(rank.store, tmp_path, Alone())
    assert later.as_json() == trust.as_json() and later.as_json()["quarantine_reason"] == "the state is wrong"
    assert not later.tree_doubted, "nothing of this run came from it"


def test_one_rank_with_a_note_is_enough(rank, tmp_path) -> None:
    trust = Trust(rank.store, tmp_path, SimpleNamespace(minimum=lambda values: [-1 for _ in values]))
    assert trust.as_json()["quarantined"] and "another rank" in wait_note(tmp_path).why
