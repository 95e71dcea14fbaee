"""KV extents in the slabs of checkpoints: their names, their chain, partial ones, and what a bad one is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sglang_histate.store import (
    NO_PARENT,
    DropReason,
    EntryState,
    MissReason,
    PutResult,
    ReadTicket,
    RecordKind,
    RecordLayout,
)
from sglang_histate.store.blocks import SlabHeader

from .conftest import LAYOUT, SLAB, is_extent, key, open_store, page_keys, put, put_extent, settle
from .fakes import FakeDisk

KV, CHECKPOINT = RecordKind.KV, RecordKind.CHECKPOINT


@pytest.fixture
def store(disk: FakeDisk):
    store = open_store(disk=disk)
    yield store
    disk.writes_allowed.set()
    disk.reads_allowed.set()
    store.close()


def read(store, number: int, kind: RecordKind = KV) -> ReadTicket:
    ticket = store.begin_read(key(number), kind=kind)
    assert isinstance(ticket, ReadTicket), ticket
    settle(store)
    return ticket


def all_back(store) -> None:
    stats = store.stats()
    assert stats.buffers_free == stats.buffers_total
    assert stats.bytes_used <= stats.bytes_peak <= stats.bytes_total
    assert stats.slabs_used == stats.entries == sum(part.slabs_used for part in stats.kinds.values())


@pytest.mark.parametrize("n_pages", [1, 2, 3, 4])
def test_put_then_read(store, disk, n_pages):
    assert put_extent(store, 7, n_pages, fill=50) is PutResult.STORED
    (write,) = settle(store).writes
    assert (write.key, write.kind, write.drop_reason) == (key(7), KV, None)
    ticket = read(store, 7)
    assert ticket.ok and not ticket.shared and ticket.kind is KV and ticket.n_pages == n_pages
    assert is_extent(ticket.record, n_pages, 50)
    assert ticket.record.kv_pages.shape == (4, 3000) and ticket.record.kv_pages.flags.writeable
    store.release(ticket)
    all_back(store)


@pytest.mark.parametrize("n_pages", [1, 2, 3, 4])
def test_only_the_pages_there_are_are_written_and_read(store, disk, n_pages):
    transfers = []
    write_at, read_at = disk.write_at, disk.read_at
    disk.write_at = lambda b, at: (transfers.append((len(b[0]), at)), write_at(b, at))[1]
    disk.read_at = lambda b, at: (transfers.append((len(b[0]), at)), read_at(b, at))[1]
    put_extent(store, 1, n_pages)
    settle(store)
    ticket = read(store, 1)
    wanted = 4096 + {1: 4096, 2: 8192, 3: 12288, 4: 12288}[n_pages]
    offset = 4096 + ticket.entry.slab * SLAB
    assert transfers == [(wanted, offset)] * 2
    part = store.stats().kinds[KV]
    assert part.bytes_written == part.bytes_read == wanted
    assert part.content_bytes == 3000 * n_pages and part.bytes_used == SLAB
    header = SlabHeader.parse(bytes(disk.content[offset : offset + 4096]))
    assert header.kind is KV and header.n_pages == n_pages and header.content_bytes == 3000 * n_pages
    store.release(ticket)


def test_a_short_extent_in_the_slab_of_a_long_one(store, disk):
    put_extent(store, 1, 4, fill=10)
    settle(store)
    store.drop(key(1), kind=KV)
    put_extent(store, 1, 2, fill=90)
    settle(store)
    ticket = read(store, 1)
    assert ticket.ok and ticket.n_pages == 2 and is_extent(ticket.record, 2, 90)
    store.release(ticket)


def test_one_hash_names_a_checkpoint_and_an_extent(store):
    put(store, 1, fill=11)
    put_extent(store, 1, 3, fill=70)
    settle(store)
    assert store.lookup(key(1)).kind is CHECKPOINT and store.lookup(key(1), KV).kind is KV
    state, extent = read(store, 1, CHECKPOINT), read(store, 1, KV)
    assert (state.record.payload == 11).all() and is_extent(extent.record, 3, 70)
    store.release(state)
    store.release(extent)
    assert store.drop(key(1)) and not store.drop(key(1))
    assert store.lookup(key(1)) is None and store.lookup(key(1), KV) is not None
    assert store.drop(key(1), DropReason.ORPHANED, kind=KV)
    assert store.begin_read(key(1), kind=KV) is MissReason.ABSENT
    kinds = store.stats().kinds
    assert kinds[CHECKPOINT].drops == {DropReason.REMOVED: 1} and kinds[KV].drops == {DropReason.ORPHANED: 1}
    assert kinds[KV].misses == {MissReason.ABSENT: 1} and kinds[CHECKPOINT].misses == {}
    all_back(store)


def test_extents_chain(store, disk):
    """From the last page back to the first, with nothing but the hash that each extent keeps of its parent."""
    put_extent(store, 4, 4)
    put_extent(store, 8, 4, parent=key(4))
    put_extent(store, 9, 1, parent=key(8))
    settle(store)
    walked, at = [], key(9)
    while at != NO_PARENT:
        entry = store.lookup(at, KV)
        walked.append((entry.at_token // 64, entry.n_pages))
        offset = 4096 + entry.slab * SLAB
        assert SlabHeader.parse(bytes(disk.content[offset : offset + 4096])).parent == entry.parent
        at = entry.parent
    assert walked == [(9, 1), (8, 4), (4, 4)]


def test_a_longer_extent_with_the_same_key_must_be_put_after_a_drop(store):
    put_extent(store, 4, 1, fill=5, parent=key(3))
    settle(store)
    assert put_extent(store, 4, 4, fill=6) is PutResult.ALREADY_STORED
    assert (store.lookup(key(4), KV).n_pages, store.lookup(key(4), KV).parent) == (1, key(3))
    store.drop(key(4), kind=KV)
    assert put_extent(store, 4, 4, fill=6) is PutResult.STORED
    settle(store)
    ticket = read(store, 4)
    assert ticket.n_pages == 4 and is_extent(ticket.record, 4, 6)
    store.release(ticket)
    all_back(store)


def test_an_extent_being_written_serves_reads(store, disk):
    disk.writes_allowed.clear()
    put_extent(store, 1, 2, fill=30)
    heard = []
    ticket = store.begin_read(key(1), lambda record, parts: heard.append(is_extent(record, 2, 30)), kind=KV)
    assert ticket.shared and store.lookup(key(1), KV).state is EntryState.WRITING
    while store.completed()[1] == 0:
        pass
    store.poll()
    assert ticket.ok and heard == [True]
    disk.writes_allowed.set()
    settle(store)
    store.release(ticket)
    all_back(store)


def test_deliver_sees_verified_pages_only(store, disk):
    put_extent(store, 1, 3, fill=30)
    settle(store)
    heard = []
    for fault in (None, ("flip", 4096 + 7000)):
        if fault:
            disk.read_faults.append(fault)
        ticket = store.begin_read(
            key(1), lambda record, parts: heard.append(is_extent(record, 3, 30)), kind=KV
        )
        settle(store)
        store.release(ticket)
    assert heard == [True] and ticket.miss_reason is MissReason.CORRUPT_PAGE
    all_back(store)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("eio", MissReason.IO_ERROR),
        (("short", 8192), MissReason.SHORT_READ),
        (("flip", 12), MissReason.CORRUPT_HEADER),
        (("flip", 70), MissReason.CORRUPT_HEADER),
        (("flip", 4096), MissReason.CORRUPT_PAGE),
        (("flip", 4096 + 3000), MissReason.CORRUPT_PAGE),
        (("flip", 4096 + 8999), MissReason.CORRUPT_PAGE),
        (("flip", 4096 + 9000), None),  # the padding of three pages
    ],
)
def test_bad_reads_are_misses(store, disk, fault, reason):
    put_extent(store, 1, 3)
    settle(store)
    disk.read_faults.append(fault)
    ticket = read(store, 1)
    assert ticket.miss_reason is reason and ticket.ok is (reason is None)
    assert (store.lookup(key(1), KV) is None) == (reason is not None)
    store.release(ticket)
    all_back(store)


@pytest.mark.parametrize("sectors", range(26))
def test_a_write_torn_at_any_sector_is_never_delivered(store, disk, sectors):
    """The slab held an older extent of the same key and length, so every tear leaves sound older pages behind."""
    put_extent(store, 1, 3, fill=10)
    settle(store)
    store.drop(key(1), kind=KV)
    disk.write_faults.append(("tear", sectors))
    put_extent(store, 1, 3, fill=200)
    settle(store)
    ticket = read(store, 1)
    if sectors == 0:
        assert ticket.miss_reason is MissReason.WRONG_GENERATION
    elif sectors < 8:  # of 512 bytes: the header is a mixture
        assert ticket.miss_reason is MissReason.CORRUPT_HEADER
    else:  # the header is new, the last of the 9000 bytes are not
        assert ticket.miss_reason is MissReason.CORRUPT_PAGE
    assert ticket.ok is False and ticket.record is None
    all_back(store)


def _header_at(disk: FakeDisk, slab: int) -> tuple[int, SlabHeader]:
    offset = 4096 + slab * SLAB
    header = SlabHeader.parse(bytes(disk.content[offset : offset + 4096]))
    assert header is not None
    return offset, header


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(kind=CHECKPOINT, parent=NO_PARENT, page_keys=()), MissReason.WRONG_KIND),
        (dict(key=key(2), page_keys=page_keys(2, 3)), MissReason.WRONG_KEY),
        (dict(page_keys=(key(7), key(8), key(1))), MissReason.WRONG_KEY),
        (dict(namespace=bytes(15) + b"1"), MissReason.WRONG_KEY),
        (dict(parent=key(2)), MissReason.WRONG_KEY),
        (dict(at_token=128), MissReason.WRONG_KEY),
        (dict(part_sums=(1, 2), page_keys=page_keys(1, 3)[1:]), MissReason.WRONG_KEY),
        (dict(content_bytes=6000), MissReason.WRONG_LENGTH),
        (dict(generation=1), MissReason.WRONG_GENERATION),
        (dict(fingerprint_half=bytes(16)), MissReason.WRONG_FINGERPRINT),
        (dict(part_sums=(1, 2, 3)), MissReason.CORRUPT_PAGE),
    ],
)
def test_a_sound_header_of_something_else(store, disk, change, reason):
    put_extent(store, 1, 3)
    settle(store)
    offset, header = _header_at(disk, store.lookup(key(1), KV).slab)
    disk.content[offset : offset + 4096] = dataclasses.replace(header, **change).pack(4096)
    assert read(store, 1).miss_reason is reason
    assert store.stats().kinds[KV].misses == {reason: 1}
    assert store.stats().kinds[KV].drops == {DropReason.READ_FAILED: 1}
    all_back(store)


def test_an_extent_where_a_checkpoint_should_be(store, disk):
    put(store, 1)
    settle(store)
    offset, header = _header_at(disk, store.lookup(key(1)).slab)
    disk.content[offset : offset + 4096] = dataclasses.replace(
        header, kind=KV, page_keys=page_keys(1, 3)
    ).pack(4096)
    assert read(store, 1, CHECKPOINT).miss_reason is MissReason.WRONG_KIND


def test_stats_by_kind_add_up(store, disk):
    disk.write_faults.extend([None, "enospc"])
    for step in (lambda: put(store, 1), lambda: put_extent(store, 2, 2), lambda: put_extent(store, 3, 2)):
        step()
        settle(store)
    put_extent(store, 3, 2)
    ticket = read(store, 3)
    stats = store.stats()
    states, extents = stats.kinds[CHECKPOINT], stats.kinds[KV]
    assert (states.entries, states.slabs_used, states.bytes_used, states.content_bytes) == (1, 1, SLAB, 9396)
    assert (extents.entries, extents.slabs_used, extents.bytes_used, extents.content_bytes) == (
        1,
        1,
        SLAB,
        6000,
    )
    assert extents.puts == {PutResult.STORED: 2, PutResult.ALREADY_STORED: 1}
    assert extents.drops == {DropReason.WRITE_ERROR: 1} and states.drops == {}
    assert stats.puts == {PutResult.STORED: 3, PutResult.ALREADY_STORED: 1}
    assert stats.bytes_written == states.bytes_written + extents.bytes_written == SLAB + 4096 + 8192
    assert (extents.reads_ok, states.reads_ok, stats.reads_ok) == (1, 0, 1)
    store.drop(key(3), kind=KV)
    assert store.stats().kinds[KV].slabs_used == 0
    store.release(ticket)
    store.clear()
    part = store.stats().kinds[CHECKPOINT]
    assert (part.entries, part.slabs_used, part.content_bytes) == (0, 0, 0)
    all_back(store)


def test_a_slab_stays_taken_while_a_dropped_extent_is_read(store, disk):
    put_extent(store, 1, 2)
    settle(store)
    disk.reads_allowed.clear()
    ticket = store.begin_read(key(1), kind=KV)
    assert store.drop(key(1), kind=KV)
    part = store.stats().kinds[KV]
    assert (part.entries, part.slabs_used, part.content_bytes) == (0, 1, 6000)
    disk.reads_allowed.set()
    settle(store)
    assert ticket.ok and is_extent(ticket.record, 2, 1)
    store.release(ticket)
    all_back(store)


@pytest.mark.parametrize("n_pages", [0, 5])
def test_extents_that_do_not_fit_are_a_defect_of_the_caller(store, n_pages):
    record = store.acquire_record()
    with pytest.raises(AssertionError):
        store.put_extent(tuple(map(key, range(n_pages))), 64, record, parent=NO_PARENT)
    store.release_record(record)


def test_a_layout_without_kv_takes_no_extents():
    store = open_store(disk=FakeDisk(), layout=RecordLayout(LAYOUT.segment_bytes))
    record = store.acquire_record()
    assert record.kv_pages.shape == (0, 0)
    with pytest.raises(AssertionError):
        store.put_extent((key(1),), 64, record, parent=NO_PARENT)
    store.close()


def test_on_the_real_file(root: Path):
    """Pages larger than a checkpoint, several pieces per write, and O_DIRECT where the file system has it."""
    layout = RecordLayout((5000,), kv_page_bytes=5 << 20)
    store = open_store(root, layout=layout, size_bytes=4096 + 3 * layout.slab_bytes, record_buffers=3)
    put_extent(store, 1, 1, fill=33)
    put(store, 1, fill=44)
    settle(store)
    state, extent = read(store, 1, CHECKPOINT), read(store, 1, KV)
    assert (state.record.payload == 44).all() and is_extent(extent.record, 1, 33)
    for ticket in (state, extent):
        store.release(ticket)
    assert store.stats().kinds[CHECKPOINT].bytes_written == 4096 + 8192
    store.close()
