"""The limits on writes as the store keeps them: claims, what is given back, the queue, a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_histate.policy.write_budget import DAY_S
from sglang_histate.store import (
    CheckpointStore,
    DropReason,
    EntryState,
    MissReason,
    PutResult,
    Record,
    RecordKind,
    WriteLimits,
)
from sglang_histate.store.roots import BreakerRules
from sglang_histate.store.snapshot import SnapshotFile

from .conftest import LAYOUT, chores_done, key, open_store, put, settle, wait_finished
from .fakes import FakeDisk

KV = RecordKind.KV
SIZE = LAYOUT.transfer_bytes(RecordKind.CHECKPOINT, 0)
NOW = 20_000.0 * DAY_S


def limited(disk: FakeDisk, *, buffers: int = 8, slabs: int = 8, **limits) -> CheckpointStore:
    store = open_store(disk=disk, slabs=slabs, record_buffers=buffers, write_limits=WriteLimits(**limits))
    store.tick(NOW)
    return store


def claim(store: CheckpointStore, number: int, value: float | None = None) -> Record | PutResult:
    return store.claim_record(key(number), value)


def put_claimed(store: CheckpointStore, number: int, value: float | None = None) -> PutResult:
    record = claim(store, number, value)
    if isinstance(record, PutResult):
        return record
    record.payload[:] = number
    return store.put(key(number), 64 * number, record)


def today(store: CheckpointStore) -> int:
    return store.stats().writes.bytes_today


def test_without_limits_a_claim_is_a_record(disk):
    store = open_store(disk=disk)
    assert put_claimed(store, 1, 0.0) is PutResult.STORED
    settle(store)
    assert store.stats().writes.bytes_per_s is None and today(store) == SIZE
    store.close()
    assert claim(store, 2) is PutResult.CLOSED


def test_a_claim_is_paid_once_and_counts_as_a_put_only_in_vain(disk):
    store = limited(disk, bytes_per_day=2 * SIZE)
    first, second = claim(store, 1), claim(store, 2)
    assert isinstance(first, Record) and isinstance(second, Record)
    assert claim(store, 3) is PutResult.DAILY_CAP
    assert store.put(key(1), 64, first) is PutResult.STORED
    store.release_record(second)
    assert today(store) == SIZE and store.stats().buffers_free == 7
    assert put(store, 4) is PutResult.STORED and put(store, 5) is PutResult.DAILY_CAP
    assert store.stats().puts == {PutResult.DAILY_CAP: 2, PutResult.STORED: 2}
    wait_finished(store)
    store.close()


def test_a_put_that_is_refused_for_another_reason_costs_nothing(disk):
    store = limited(disk, bytes_per_day=4 * SIZE)
    assert put_claimed(store, 1) is PutResult.STORED
    assert put_claimed(store, 1) is PutResult.ALREADY_STORED
    assert put(store, 1) is PutResult.ALREADY_STORED
    assert today(store) == SIZE
    wait_finished(store)
    store.close()


def test_a_claim_needs_a_buffer_and_takes_no_bytes_without(disk):
    store = limited(disk, buffers=1, bytes_per_day=4 * SIZE)
    record = claim(store, 1)
    assert claim(store, 2) is PutResult.NO_BUFFER and today(store) == SIZE
    store.release_record(record)
    assert today(store) == 0
    store.close()


def test_a_rate_of_nothing_still_reads(disk):
    store = limited(disk, bytes_per_s=0)
    assert put_claimed(store, 1) is PutResult.WRITE_BUDGET and put(store, 1) is PutResult.WRITE_BUDGET
    assert store.begin_read(key(1)) is MissReason.ABSENT
    assert not store.admission.waits_for_time
    store.close()


def test_extents_cost_what_they_write(disk):
    store = limited(disk, bytes_per_day=10 * SIZE)
    record = store.claim_record(key(1), 1.0, kind=KV, n_pages=1)
    assert isinstance(record, Record)
    assert store.put_extent((key(1),), 64, record, parent=key(9)) is PutResult.STORED
    assert today(store) == LAYOUT.transfer_bytes(KV, 1) < SIZE
    settle(store)
    assert store.stats().bytes_written == today(store)
    store.close()


def test_nothing_is_claimed_while_writes_fail(disk):
    store = open_store(
        disk=disk, slabs=8, record_buffers=8, breakers=BreakerRules(write_failures=2, pause_puts=3)
    )
    disk.write_faults.extend(["eio", "eio"])
    for number in (1, 2):
        put(store, number)
    settle(store)
    assert [claim(store, number) for number in range(3, 6)] == [PutResult.BREAKER_OPEN] * 3
    record = claim(store, 6)
    assert isinstance(record, Record), "one is tried after as many refusals as of puts"
    assert store.put(key(6), 64, record) is PutResult.STORED
    settle(store)
    store.close()


def test_a_late_queue_gives_up_the_write_that_is_worth_least(disk):
    store = limited(disk, queue_age_s=2.0)
    disk.writes_allowed.clear()
    for number, value in enumerate((9.0, 3.0, 1.0, 5.0)):
        assert put_claimed(store, number, value) is PutResult.STORED
    store.tick(NOW + 3)
    assert store.stats().writes.wait_s == 3.0
    assert put_claimed(store, 10, 4.0) is PutResult.STORED
    assert store.lookup(key(2)) is None, "the one that was worth least"
    assert claim(store, 11, 3.0) is PutResult.QUEUE_AGE, "no better than what waits: not even copied"
    assert put_claimed(store, 12, 3.5) is PutResult.STORED and store.lookup(key(1)) is None
    disk.writes_allowed.set()
    settle(store)
    stats = store.stats()
    assert stats.drops == {DropReason.QUEUE_AGE: 2} and stats.cancelled == {DropReason.QUEUE_AGE: 2}
    assert stats.puts[PutResult.QUEUE_AGE] == 1
    assert {entry.state for entry in store.entries()} == {EntryState.LIVE}
    assert len(list(store.entries())) == 4 and stats.slabs_used == 4
    assert put_claimed(store, 13, 0.0) is PutResult.STORED, "nothing is late any more"
    wait_finished(store)
    store.close()


def test_a_record_claimed_in_time_may_be_late_when_it_is_put(disk):
    store = limited(disk, queue_age_s=2.0, bytes_per_day=100 * SIZE)
    disk.writes_allowed.clear()
    assert put_claimed(store, 1, 5.0) is PutResult.STORED
    record = claim(store, 2, 1.0)
    store.tick(NOW + 3)
    assert store.put(key(2), 64, record) is PutResult.QUEUE_AGE
    assert today(store) == SIZE and store.stats().buffers_free == 7
    disk.writes_allowed.set()
    wait_finished(store)
    store.close()


def test_writes_without_effect_are_counted_by_reason_and_not_made(disk):
    store = limited(disk)
    disk.writes_allowed.clear()
    disk.write_entered.clear()
    for number in range(1, 5):
        put(store, number)
    disk.write_entered.wait(10)  # the first one has begun
    store.drop(key(2), DropReason.ABORTED)
    store.drop(key(3), DropReason.ORPHANED)
    before = bytes(disk.content)
    disk.writes_allowed.set()
    settle(store)
    assert store.stats().cancelled == {DropReason.ABORTED: 1, DropReason.ORPHANED: 1}
    written = [n for n in range(4) if disk.content[LAYOUT.slab_offset(n) :][: LAYOUT.slab_bytes].strip(b"\0")]
    assert len(written) == 2 and before != bytes(disk.content)
    store.close()


def test_a_lent_record_is_delivered_and_comes_back(disk):
    store = limited(disk, bytes_per_s=0)
    record = store.acquire_record()
    record.payload[:] = 7
    heard = []
    ticket = store.lend(key(1), 64, record, lambda lent, parts: heard.append((int(lent.payload[0]), parts)))
    settle(store)
    assert ticket.ok and heard == [(7, range(len(LAYOUT.segment_bytes)))] and ticket.at_token == 64
    store.release(ticket)
    stats = store.stats()
    assert stats.buffers_free == stats.buffers_total and stats.slabs_used == 0 and stats.bytes_read == 0
    store.close()


def test_a_lent_record_whose_delivery_fails_comes_back_too(disk):
    store = limited(disk)

    def fail(record: Record, parts: range) -> None:
        raise ValueError("no room")

    ticket = store.lend(key(1), 64, store.acquire_record(), fail)
    settle(store)
    assert ticket.ok is False and store.stats().buffers_free == store.stats().buffers_total
    cleared = store.lend(key(1), 64, store.acquire_record(), lambda record, parts: None)
    store.clear()
    settle(store)
    assert cleared.miss_reason is MissReason.CLEARED
    assert store.stats().buffers_free == store.stats().buffers_total and store.stats().slabs_used == 0
    store.close()


def test_after_the_last_request_only_the_day_counts(disk):
    store = limited(disk, bytes_per_s=SIZE, bytes_per_day=6 * SIZE, queue_age_s=1.0)
    disk.writes_allowed.clear()
    for number in range(5):
        put(store, number)
    store.tick(NOW + 0.5)
    assert put(store, 5) is PutResult.WRITE_BUDGET
    store.admission.only_daily()
    assert put(store, 5) is PutResult.STORED and put(store, 6) is PutResult.DAILY_CAP
    disk.writes_allowed.set()
    wait_finished(store)
    store.close()


@pytest.fixture
def file(tmp_path: Path) -> SnapshotFile:
    return SnapshotFile(tmp_path / "stats.snap")


def reopened(disk: FakeDisk, file: SnapshotFile, now_s: float) -> CheckpointStore:
    store = open_store(
        disk=disk, snapshots=file, keep_unrestorable=True, write_limits=WriteLimits(bytes_per_day=3 * SIZE)
    )
    store.admission.budget.restore(*store.written_before)
    store.tick(now_s)
    return store


def test_the_bytes_of_a_day_are_counted_over_restarts(disk, file):
    store = reopened(disk, file, NOW)
    put(store, 1)
    put(store, 2)
    settle(store)
    store.close()
    again = reopened(disk, file, NOW + 600)
    assert put(again, 3) is PutResult.STORED and put(again, 4) is PutResult.DAILY_CAP
    settle(again)
    again.close()
    tomorrow = reopened(disk, file, NOW + DAY_S)
    assert today(tomorrow) == 0 and put(tomorrow, 4) is PutResult.STORED
    settle(tomorrow)
    tomorrow.close()


def test_a_crash_loses_the_bytes_since_the_last_snapshot_at_most(disk, file):
    store = reopened(disk, file, NOW)
    put(store, 1)
    put(store, 2)
    settle(store)
    store.snapshot()
    chores_done(store)
    put(store, 3)
    settle(store)
    copy = FakeDisk()
    copy.content = bytearray(disk.content)
    crashed = reopened(copy, file, NOW + 60)
    assert today(crashed) == 2 * SIZE
    # A second crash before anything was written, and before any other snapshot: the order is too old, the count is not.
    chores_done(crashed)
    again = FakeDisk()
    again.content = bytearray(copy.content)
    assert today(reopened(again, file, NOW + 120)) == 2 * SIZE
    store.close()
    crashed.close()
