"""Life of entries, records and slabs, one behaviour per test."""

from __future__ import annotations

import time

import pytest

from sglang_histate.store import DropReason, EntryState, MissReason, PutResult, ReadTicket, StoreError
from sglang_histate.store.faults import from_environment
from sglang_histate.store.roots import BreakerRules

from .conftest import LAYOUT, SLAB, key, open_store, put, settle, wait_finished
from .fakes import FakeDisk


@pytest.fixture
def store(disk: FakeDisk):
    store = open_store(disk=disk)
    yield store
    disk.writes_allowed.set()
    disk.reads_allowed.set()
    store.close()
    assert disk.closed
    assert disk.largest_offset <= len(disk.content) == 4096 + 4 * SLAB


def all_back(store) -> None:
    """After a settle, nothing may be held by anything but live entries."""
    stats = store.stats()
    assert stats.buffers_free == stats.buffers_total
    assert stats.slabs_used == stats.entries
    assert stats.entries_writing == stats.writes_queued == stats.reads_in_flight == 0


def read(store, number: int) -> ReadTicket:
    ticket = store.begin_read(key(number))
    assert isinstance(ticket, ReadTicket), ticket
    settle(store)
    return ticket


def test_put_then_read(store):
    assert put(store, 7) is PutResult.STORED
    entry = store.lookup(key(7))
    assert entry.state is EntryState.WRITING and entry.at_token == 448
    (write,) = settle(store).writes
    assert write.key == key(7) and write.drop_reason is None and entry.state is EntryState.LIVE
    ticket = read(store, 7)
    assert ticket.ok and not ticket.shared and (ticket.record.payload == 7).all()
    assert ticket.record.payload.size == LAYOUT.payload_bytes and ticket.record.payload.flags.writeable
    store.release(ticket)
    store.release(ticket)
    all_back(store)


def test_a_record_being_written_serves_reads_without_the_disk(store, disk):
    disk.writes_allowed.clear()
    put(store, 1)
    tickets = [store.begin_read(key(1)) for _ in range(3)]
    assert all(ticket.shared and ticket.ok is None for ticket in tickets), "only a commit completes a read"
    assert store.stats().buffers_free == 3
    assert store.completed() == (0, 3)
    assert list(store.poll().reads) == tickets
    assert all(ticket.ok and (ticket.record.payload == 1).all() for ticket in tickets)
    disk.writes_allowed.set()
    settle(store)
    assert store.stats().buffers_free == 3, "readers still hold it"
    for ticket in tickets:
        store.release(ticket)
    all_back(store)


def test_shared_read_survives_a_failed_write(store, disk):
    disk.writes_allowed.clear()
    disk.write_faults.append("enospc")
    put(store, 1)
    ticket = store.begin_read(key(1))
    disk.writes_allowed.set()
    (write,) = settle(store).writes
    assert write.drop_reason is DropReason.WRITE_ERROR and store.lookup(key(1)) is None
    assert ticket.ok and (ticket.record.payload == 1).all()
    store.release(ticket)
    all_back(store)


def test_least_recently_used_goes_first_and_never_one_in_use(store, disk):
    for number in range(4):
        put(store, number)
        settle(store)
    store.touch(key(0))
    ticket = store.begin_read(key(1))
    put(store, 4)  # evicts 2: 1 is being read, 0 was touched
    assert [store.lookup(key(n)) is not None for n in range(5)] == [True, True, False, True, True]
    settle(store)
    store.release(ticket)
    assert store.stats().drops == {DropReason.EVICTED: 1}
    all_back(store)


def test_no_slab_when_all_are_in_use(disk):
    store = open_store(disk=disk, slabs=2, record_buffers=4)
    disk.writes_allowed.clear()
    assert [put(store, n) for n in range(3)] == [PutResult.STORED, PutResult.STORED, PutResult.NO_SLAB]
    assert store.stats().buffers_free == 2
    disk.writes_allowed.set()
    settle(store)
    assert put(store, 3) is PutResult.STORED
    settle(store)
    all_back(store)
    store.close()


def test_already_stored_touches(store):
    for number in range(4):
        put(store, number)
        settle(store)
    assert put(store, 0) is PutResult.ALREADY_STORED
    put(store, 9)
    settle(store)
    assert store.lookup(key(0)) is not None and store.lookup(key(1)) is None
    all_back(store)


def test_pool_exhausted(store):
    records = [store.acquire_record() for _ in range(4)]
    assert store.acquire_record() is None
    store.release_record(records.pop())
    assert put(store, 1) is PutResult.STORED
    settle(store)
    spare = store.acquire_record()
    assert store.begin_read(key(1)) is MissReason.NO_BUFFER
    for record in [*records, spare]:
        store.release_record(record)
    assert store.begin_read(key(2)) is MissReason.ABSENT
    assert store.stats().misses == {MissReason.NO_BUFFER: 1, MissReason.ABSENT: 1}
    all_back(store)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("eio", MissReason.IO_ERROR),
        (("short", 4096), MissReason.SHORT_READ),
        (("flip", 8), MissReason.CORRUPT_HEADER),
        (("flip", 30), MissReason.CORRUPT_HEADER),
        (("flip", 4096), MissReason.CORRUPT_SEGMENT),
        (("flip", 4096 + LAYOUT.payload_bytes - 1), MissReason.CORRUPT_SEGMENT),
    ],
)
def test_bad_reads_are_misses(store, disk, fault, reason):
    put(store, 1)
    settle(store)
    disk.read_faults.append(fault)
    ticket = read(store, 1)
    assert ticket.ok is False and ticket.miss_reason is reason and ticket.record is None
    assert store.lookup(key(1)) is None
    assert store.stats().drops == {DropReason.READ_FAILED: 1}
    all_back(store)


def test_a_lost_write_does_not_bring_back_the_record_before_it(store, disk):
    """Same key, same slab, valid checksums, but the generation is the old one."""
    put(store, 1, fill=10)
    settle(store)
    slab = store.lookup(key(1)).slab
    store.drop(key(1))
    disk.write_faults.append(("tear", 0))
    put(store, 1, fill=20)
    settle(store)
    assert store.lookup(key(1)).slab == slab
    assert read(store, 1).miss_reason is MissReason.WRONG_GENERATION


def test_slabs_that_change_places_are_noticed(store, disk):
    for number in (1, 2):
        put(store, number)
        settle(store)
    first, second = (4096 + store.lookup(key(n)).slab * SLAB for n in (1, 2))
    disk.content[first : first + SLAB] = disk.content[second : second + SLAB]
    assert read(store, 1).miss_reason is MissReason.WRONG_GENERATION


def test_file_of_another_model_is_noticed(store, disk):
    other_disk = FakeDisk()
    other = open_store(disk=other_disk, fingerprint={"model": "other"})
    for each in (store, other):
        put(each, 1)
        settle(each)
    disk.content[4096:] = other_disk.content[4096:]
    other.close()
    assert read(store, 1).miss_reason is MissReason.WRONG_FINGERPRINT


def test_cancel(store, disk):
    put(store, 1)
    settle(store)
    disk.reads_allowed.clear()
    running, queued = store.begin_read(key(1)), store.begin_read(key(1))
    for ticket in (running, queued):
        store.cancel_read(ticket)
    assert store.stats().buffers_free == 2
    disk.reads_allowed.set()
    assert settle(store).reads == ()
    assert running.ok is False and store.lookup(key(1)) is not None
    late = read(store, 1)
    store.cancel_read(late)
    all_back(store)


def test_clear_with_everything_in_flight(store, disk):
    put(store, 1)
    settle(store)
    disk.writes_allowed.clear()
    disk.reads_allowed.clear()
    put(store, 2)
    put(store, 3)
    from_disk, from_memory = store.begin_read(key(1)), store.begin_read(key(2))
    before = store.completed()
    store.clear()
    assert store.stats().entries == 0 and store.lookup(key(2)) is None
    assert store.stats().slabs_used == 3 and store.stats().buffers_free == 1
    assert put(store, 2) is PutResult.STORED, "a new entry of the same key is another entry"
    assert store.completed() >= before
    disk.writes_allowed.set()
    disk.reads_allowed.set()
    done = settle(store)
    assert [write.drop_reason for write in done.writes] == [DropReason.CLEARED, DropReason.CLEARED, None]
    assert list(done.reads) == [from_disk, from_memory]
    assert {ticket.miss_reason for ticket in done.reads} == {MissReason.CLEARED}
    assert store.lookup(key(2)).state is EntryState.LIVE
    all_back(store)


def test_removed_while_read(store):
    put(store, 1)
    settle(store)
    ticket = store.begin_read(key(1))
    assert store.drop(key(1)) and not store.drop(key(1))
    assert store.stats().slabs_used == 1, "not free while it is read"
    settle(store)
    assert ticket.ok and (ticket.record.payload == 1).all()
    store.release(ticket)
    all_back(store)


def test_breaker_counts_puts(disk):
    store = open_store(disk=disk, breakers=BreakerRules(write_failures=3, pause_puts=2))
    disk.write_faults.extend(["eio"] * 4)
    for number in range(3):
        assert put(store, number) is PutResult.STORED
        settle(store)
    assert store.stats().breaker_open
    assert [put(store, 10), put(store, 11)] == [PutResult.BREAKER_OPEN] * 2
    assert put(store, 12) is PutResult.STORED, "let through to see whether the disk is back"
    settle(store)
    assert [put(store, 13), put(store, 14)] == [PutResult.BREAKER_OPEN] * 2, "it was not"
    assert put(store, 15) is PutResult.STORED
    settle(store)
    assert put(store, 16) is PutResult.STORED
    settle(store)
    assert read(store, 15).ok
    store.close()


def test_closed_store_answers_politely(store, disk):
    put(store, 1)
    spare = store.acquire_record()
    store.close()
    store.close()
    assert store.put(key(2), 64, spare) is PutResult.CLOSED
    assert store.begin_read(key(1)) is MissReason.CLOSED
    assert store.lookup(key(1)) is None and store.acquire_record() is None
    store.poll()
    all_back(store)


def test_close_is_quick_with_a_stuck_disk(disk):
    store = open_store(disk=disk)
    disk.writes_allowed.clear()
    disk.write_entered.clear()
    put(store, 1)
    assert disk.write_entered.wait(5)
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 3 and not disk.closed
    disk.writes_allowed.set()


def test_writer_waits_for_reads(store, disk, monkeypatch):
    monkeypatch.setattr("sglang_histate.store.writer.YIELD_TO_READS_S", 10)  # the machine may be busy
    put(store, 1)
    settle(store)
    order = []
    write_at, read_at = disk.write_at, disk.read_at
    disk.write_at = lambda *a: (order.append("write"), write_at(*a))[1]
    disk.read_at = lambda *a: (time.sleep(0.02), order.append("read"), read_at(*a))[2]
    ticket = store.begin_read(key(1))
    put(store, 2)
    settle(store)
    assert order == ["read", "write"] and ticket.ok
    store.release(ticket)


def test_writer_is_not_starved_by_reads(store, disk):
    put(store, 1)
    settle(store)
    disk.reads_allowed.clear()
    ticket = store.begin_read(key(1))
    put(store, 2)
    deadline = time.monotonic() + 5
    while store.completed()[0] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    disk.reads_allowed.set()
    settle(store)
    store.release(ticket)


def test_faults_from_the_environment(disk):
    assert from_environment(disk, "tp0", LAYOUT, environment={}) is disk
    broken = from_environment(
        disk,
        "tp0",
        LAYOUT,
        environment={"HISTATE_TEST_DISK_FAULT_RATE": "1", "HISTATE_TEST_DISK_DELAY_MS": "1"},
    )
    store = open_store(disk=disk, breakers=BreakerRules(read_failures=99))
    store._roots[0].reader._disk = broken
    for number in range(8):
        put(store, number)
        settle(store)
        ticket = read(store, number)
        assert ticket.miss_reason in (
            MissReason.IO_ERROR, MissReason.CORRUPT_HEADER, MissReason.CORRUPT_SEGMENT, None
        )  # fmt: skip
        assert ticket.ok is (ticket.miss_reason is None)  # a flip in the padding is harmless
        store.release(ticket)
    assert len(store.stats().misses) >= 2
    all_back(store)
    store.close()


def test_defect_in_a_thread_is_a_loud_miss(store, disk, caplog):
    put(store, 1)
    settle(store)
    disk.read_faults.append(("short", None))  # makes the fake raise TypeError
    ticket = read(store, 1)
    assert ticket.miss_reason is MissReason.INTERNAL and "defect in the reader" in caplog.text
    put(store, 2)
    settle(store)
    assert read(store, 2).ok


def test_log_is_rate_limited(store, disk, caplog):
    for number in range(5):
        put(store, number % 3)
        settle(store)
        disk.read_faults.append("eio")
        read(store, number % 3)
    assert caplog.text.count("could not be read") == 1


def test_open_reports_a_dead_disk(disk):
    disk.write_faults.append("eio")
    with pytest.raises(StoreError):
        open_store(disk=disk)


def test_wait_finished_does_not_commit(store):
    put(store, 1)
    wait_finished(store)
    assert store.lookup(key(1)).state is EntryState.WRITING
    assert store.outcomes(1, 0) == ([True], [])
    store.commit([False], [])
    store.poll()
    assert store.lookup(key(1)) is None and store.stats().drops == {DropReason.OTHER_RANK: 1}
    all_back(store)
