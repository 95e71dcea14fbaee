"""Checkpoints that the caller's rule does not let out of their record: not to the disk, not to a reader."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_histate.store import DropReason, MissReason, PutResult, RecordKind

from .conftest import LAYOUT, key, open_store, put, put_extent, settle
from .fakes import FakeDisk

BAD = 13


@pytest.fixture
def store(disk):
    layout = dataclasses.replace(LAYOUT, storable=lambda payload: bool((payload != BAD).all()))
    made = open_store(disk=disk, layout=layout)
    yield made
    made.close()


def test_it_is_dropped_and_counted_and_no_byte_of_it_is_written(store, disk: FakeDisk) -> None:
    settle(store)
    before = store.stats().bytes_written
    assert put(store, 1, BAD) is PutResult.STORED, "it is looked at on the writer's thread"
    (write,) = settle(store).writes
    assert (
        write.drop_reason is DropReason.NOT_FINITE and DropReason.NOT_FINITE.agreed is DropReason.WRITE_FAILED
    )
    stats = store.stats()
    assert store.lookup(key(1)) is None and stats.slabs_used == 0 and stats.bytes_written == before
    assert stats.drops[DropReason.NOT_FINITE] == 1 and store.records.free == store.records.total
    assert put(store, 1, 7) is PutResult.STORED
    settle(store)
    assert store.lookup(key(1)) is not None


def test_nobody_reads_it_from_memory_either(store, disk: FakeDisk) -> None:
    disk.writes_allowed.clear()
    put(store, 1, 7)
    put(store, 2, BAD)
    delivered = []
    good = store.begin_read(key(1), deliver=lambda record, parts: delivered.append(parts))
    bad = store.begin_read(key(2), deliver=lambda record, parts: delivered.append(parts))
    disk.writes_allowed.set()
    settle(store)
    assert good.shared and good.ok and bad.shared and bad.ok is False
    assert delivered == [range(len(LAYOUT.segment_bytes))]
    assert bad.miss_reason is MissReason.NOT_FINITE
    assert store.stats().misses[MissReason.NOT_FINITE] == 1
    store.release(good)
    assert store.lookup(key(2)) is None and store.records.free == store.records.total


def test_who_filled_a_record_can_keep_it_from_being_stored(store, disk: FakeDisk) -> None:
    """Whatever its bytes say: neither the disk nor a reader gets them. The buffer is as good as any other afterwards."""
    disk.writes_allowed.clear()
    before, delivered = store.stats().bytes_written, []
    record = store.acquire_record()
    record.payload[:] = 7
    record.sound = False
    assert store.put(key(1), 64, record) is PutResult.STORED
    read = store.begin_read(key(1), deliver=lambda record, parts: delivered.append(parts))
    disk.writes_allowed.set()
    settle(store)
    assert read.miss_reason is MissReason.NOT_FINITE and delivered == []
    stats = store.stats()
    assert stats.drops[DropReason.NOT_FINITE] == 1 and stats.bytes_written == before
    assert store.lookup(key(1)) is None and store.records.free == store.records.total
    for number in range(2, 2 + store.records.total):  # in every buffer
        assert put(store, number, 7) is PutResult.STORED
        settle(store)
        assert store.lookup(key(number)) is not None


def test_kv_is_not_asked_about(store) -> None:
    assert put_extent(store, 1, n_pages=1, fill=BAD) is PutResult.STORED
    settle(store)
    assert store.lookup(key(1), RecordKind.KV) is not None


def test_the_rule_is_no_part_of_the_layout(store) -> None:
    assert store.layout == LAYOUT
