"""What is there after a restart, what is not, and what the store says about it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from sglang_histate.store import (
    NO_PARENT,
    EntryState,
    Fingerprint,
    LossReason,
    MissReason,
    PutResult,
    ReadTicket,
    RecordKind,
    RecordLayout,
    StoreError,
)
from sglang_histate.store.block_zero import BlockZero
from sglang_histate.store.blocks import SlabHeader, Superblock
from sglang_histate.store.layout import epoch_of
from sglang_histate.store.striping import Striping

from .conftest import (
    LAYOUT,
    SLAB,
    chores_done,
    is_extent,
    key,
    open_store,
    page_keys,
    put,
    put_extent,
    settle,
)
from .fakes import FakeDisk

KV, CHECKPOINT = RecordKind.KV, RecordKind.CHECKPOINT
TENANT = bytes(range(16))


def reopen(disk: FakeDisk, **changes):
    """Open what is on the disk now, as after a crash: the older store, if there is one, is forgotten."""
    copy = FakeDisk()
    copy.content = bytearray(disk.content)
    return copy, open_store(disk=copy, **({"keep_unrestorable": True} | changes))


def filled(disk: FakeDisk, *numbers: int, **changes):
    store = open_store(disk=disk, keep_unrestorable=True, **changes)
    for number in numbers:
        assert put(store, number) is PutResult.STORED
        settle(store)
    return store


def keys(store) -> list[int]:
    return [int.from_bytes(entry.key, "big") for entry in store.entries()]


def read_ok(store, number: int, kind: RecordKind = CHECKPOINT, fill: int | None = None) -> bool:
    ticket = store.begin_read(key(number), kind=kind)
    assert isinstance(ticket, ReadTicket), ticket
    settle(store)
    if ticket.ok:
        fill = number if fill is None else fill
        whole = is_extent(ticket.record, ticket.n_pages, fill) if kind is KV else None
        assert (ticket.record.payload == fill).all() if whole is None else whole, "a dirty read"
    store.release(ticket)
    return bool(ticket.ok)


def edit_header(disk: FakeDisk, slab: int, **changes) -> None:
    at = LAYOUT.slab_offset(slab)
    header = SlabHeader.parse(bytes(disk.content[at : at + 4096]))
    disk.content[at : at + 4096] = dataclasses.replace(header, **changes).pack(4096)


def test_everything_is_back(disk):
    store = open_store(disk=disk)
    record = store.acquire_record()
    record.payload[:] = 9
    store.put(key(9), 640, record, namespace=TENANT)
    record = store.acquire_record()
    record.kv_pages[:3] = 70
    names = page_keys(9, 3)
    store.put_extent(names, 640, record, parent=NO_PARENT, namespace=TENANT)
    settle(store)
    before = [entry.logical() for entry in store.entries()]
    heard = []
    _, again = reopen(disk, keep_unrestorable=False, on_present=lambda *name: heard.append(name))
    assert [entry.logical() for entry in again.entries()] == before
    assert heard == [(key(9), CHECKPOINT), (key(9), KV)]
    entry = again.lookup(key(9), KV)
    assert entry.state is EntryState.LIVE and entry.page_keys == names and entry.namespace == TENANT
    assert (again.recovery.checkpoints, again.recovery.extents) == (1, 1)
    assert again.recovery.losses == {} and not again.recovery.clean
    assert read_ok(again, 9)
    ticket = again.begin_read(key(9), kind=KV)
    settle(again)
    assert ticket.ok and (ticket.record.kv_pages[:3] == 70).all()
    again.release(ticket)
    stats = again.stats()
    assert stats.slabs_used == stats.entries == 2 and stats.bytes_peak == 2 * SLAB
    assert stats.kinds[KV].recovered == stats.kinds[CHECKPOINT].recovered == 1
    assert stats.kinds[KV].content_bytes == 9000
    for each in (store, again):
        each.close()


def test_generations_rise_and_free_slabs_are_used(disk):
    store = filled(disk, 1, 2)
    newest = max(entry.generation for entry in store.entries())
    copy, again = reopen(disk)
    taken = {entry.slab for entry in again.entries()}
    put(again, 3)
    put(again, 4)
    settle(again)
    fresh = [entry for entry in again.entries() if entry.key in (key(3), key(4))]
    assert all(entry.generation > newest for entry in fresh)
    assert taken.isdisjoint(entry.slab for entry in fresh) and again.stats().slabs_used == 4
    assert put(again, 5) is PutResult.STORED  # the oldest gives way
    settle(again)
    assert keys(again) == [2, 3, 4, 5]
    _, third = reopen(copy)
    assert keys(third) == [2, 3, 4, 5] and all(read_ok(third, number) for number in (2, 3, 4, 5))
    for each in (store, again, third):
        each.close()


def test_epochs_rise_above_what_was_seen_even_without_a_superblock(disk):
    for number in (1, 2, 3):
        store = filled(disk, number)
        seen = store.lookup(key(number)).generation
        store.close()
    disk.content[0:4096] = bytes(4096)
    _, again = reopen(disk)
    assert again.recovery.losses == {LossReason.SUPERBLOCK: 3} and keys(again) == []
    put(again, 2)
    assert epoch_of(seen) == 3 and epoch_of(again.lookup(key(2)).generation) == 4
    again.close()


@pytest.mark.parametrize("sectors", range(9))
def test_a_superblock_torn_anywhere_is_the_old_one_or_the_new_one(disk, sectors):
    """A crash while a store is opened: what was there is there at the next try."""
    filled(disk, 1, 2).close()
    disk.write_faults.append(("tear", sectors))
    open_store(disk=disk, keep_unrestorable=True)
    _, again = reopen(disk)
    assert sorted(keys(again)) == [1, 2]
    again.close()


@pytest.mark.parametrize("sectors", range(26))
def test_a_write_torn_at_any_sector(disk, sectors):
    """The slab held another record: either that one is back, or neither, or a read of the new one misses."""
    store = filled(disk, 1)
    store.drop(key(1))
    disk.write_faults.append(("tear", sectors))
    put_extent(store, 2, 3, fill=200)
    settle(store)
    _, again = reopen(disk)
    if sectors == 0:
        assert keys(again) == [1] and read_ok(again, 1)
    elif sectors < 8:
        assert keys(again) == [] and again.recovery.losses == {LossReason.UNSOUND: 1}
    else:
        assert keys(again) == [2] and not read_ok(again, 2, KV)
        assert again.stats().misses == {MissReason.CORRUPT_PAGE: 1}
        assert keys(again) == [] and again.stats().slabs_used == 0
    store.close()
    again.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(fingerprint_half=bytes(16)), LossReason.OTHER_FINGERPRINT),
        (dict(part_sums=(1, 2)), LossReason.OTHER_LAYOUT),
        (dict(content_bytes=9395), LossReason.OTHER_LAYOUT),
        (dict(parent=key(7)), LossReason.OTHER_LAYOUT),
        (dict(kind=KV, part_sums=(1,) * 5, page_keys=page_keys(1, 5)), LossReason.OTHER_LAYOUT),
        (dict(kind=KV, part_sums=(1,) * 3, page_keys=page_keys(7, 3)), LossReason.UNSOUND),
    ],
)
def test_sound_headers_of_something_else(disk, change, reason):
    store = filled(disk, 1, 2)
    edit_header(disk, store.lookup(key(1)).slab, **change)
    _, again = reopen(disk)
    assert keys(again) == [2] and again.recovery.losses == {reason: 1}
    assert again.stats().slabs_used == 1
    store.close()
    again.close()


def test_another_format_version_is_named(disk):
    store = filled(disk, 1, 2)
    disk.content[LAYOUT.slab_offset(0) + 8] = 4
    _, again = reopen(disk)
    assert keys(again) == [2] and again.recovery.losses == {LossReason.OTHER_VERSION: 1}
    disk.content[8] = 4  # and in the superblock: nobody knows what it means
    _, third = reopen(disk)
    assert keys(third) == [] and LossReason.SUPERBLOCK in third.recovery.losses
    for each in (store, again, third):
        each.close()


def test_headers_that_cannot_be_read(disk):
    store = filled(disk, 1, 2)
    copy = FakeDisk()
    copy.content = bytearray(disk.content)
    copy.read_faults.extend([None, "eio", ("short", 512)])  # the superblock is well
    again = open_store(disk=copy, keep_unrestorable=True)
    assert keys(again) == [] and again.recovery.losses == {LossReason.READ_ERROR: 2}
    store.close()
    again.close()


def test_one_key_twice(disk):
    store = filled(disk, 1, 2)
    slab = store.lookup(key(2)).slab
    edit_header(disk, slab, key=key(1))
    _, again = reopen(disk)
    assert keys(again) == [1] and again.lookup(key(1)).slab == slab
    assert again.recovery.losses == {LossReason.DUPLICATE: 1} and again.stats().slabs_used == 1
    store.close()
    again.close()


def test_slabs_that_changed_places_are_served_from_where_they_are(disk):
    store = filled(disk, 1, 2)
    first, second = (LAYOUT.slab_offset(store.lookup(key(n)).slab) for n in (1, 2))
    content = disk.content
    content[first : first + SLAB], content[second : second + SLAB] = (
        content[second : second + SLAB],
        content[first : first + SLAB],
    )
    _, again = reopen(disk)
    assert read_ok(again, 1) and read_ok(again, 2)
    content[first : first + SLAB] = content[second : second + SLAB]  # and one twice
    _, third = reopen(disk)
    assert len(keys(third)) == 1 and third.recovery.losses == {LossReason.DUPLICATE: 1}
    assert read_ok(third, keys(third)[0])
    for each in (store, again, third):
        each.close()


def test_a_dropped_record_may_come_back_and_is_verified_like_any_other(disk):
    store = filled(disk, 1, 2)
    disk.content[LAYOUT.slab_offset(store.lookup(key(1)).slab) + 5000] ^= 1
    assert not read_ok(store, 1) and keys(store) == [2]
    _, again = reopen(disk)
    assert keys(again) == [1, 2] and not read_ok(again, 1) and read_ok(again, 2)
    assert keys(again) == [2]
    store.close()
    again.close()


@pytest.mark.parametrize("slabs", [2, 3, 6])
def test_another_size(disk, slabs, root):
    store = filled(disk, 1, 2, 3)
    at = {number: store.lookup(key(number)).slab for number in (1, 2, 3)}
    _, again = reopen(disk, slabs=slabs)
    assert set(keys(again)) == {number for number, slab in at.items() if slab < slabs}
    assert all(read_ok(again, number) for number in keys(again))
    lost = {LossReason.CUT_OFF: 4 - slabs} if slabs < 4 else {}
    assert again.recovery.losses == lost and again.stats().slabs_total == slabs
    put(again, 9)
    settle(again)
    assert read_ok(again, 9)
    store.close()
    again.close()


@pytest.mark.parametrize("left", [0, 100, 4096, 4096 + SLAB, 4096 + SLAB + 4096 + 600])
def test_a_file_that_was_cut(root: Path, left):
    store = open_store(root, keep_unrestorable=True)
    for number in (1, 2):
        put(store, number)
        settle(store)
    store.close()
    (file,) = root.glob("*/*/slabs.dat")
    with file.open("r+b") as content:
        content.truncate(left)
    again = open_store(root, keep_unrestorable=True)
    hits = [number for number in keys(again) if read_ok(again, number)]
    assert hits == ([1] if left >= 4096 + SLAB else [])
    assert file.stat().st_size == 4096 + 4 * SLAB and again.stats().slabs_used == again.stats().entries
    again.close()


def test_a_file_of_another_model(disk):
    filled(disk, 1, 2).close()
    _, other = reopen(disk, fingerprint={"model": "other"})
    assert keys(other) == [] and set(other.recovery.losses) == {LossReason.OTHER_FINGERPRINT}
    other.close()
    _, other = reopen(disk, layout=RecordLayout((5000, 300, 4096), kv_page_bytes=2999))
    assert keys(other) == []
    other.close()


def test_not_kept_is_gone_for_good(disk):
    filled(disk, 1, 2).close()
    copy, empty = reopen(disk, keep=False)
    assert keys(empty) == [] and empty.recovery.losses == {LossReason.NOT_KEPT: 2}
    put(empty, 3)
    settle(empty)
    copy, again = reopen(copy)
    assert keys(again) == [3] and again.recovery.losses == {LossReason.CLEARED: 1}
    empty.close()
    again.close()


def test_a_crash_before_the_superblock_of_an_open_without_keep(disk):
    """The new superblock comes last, so such an open has not happened."""
    filled(disk, 1, 2).close()
    disk.write_faults.append("eio")
    with pytest.raises(StoreError):
        open_store(disk=disk, keep=False)
    _, again = reopen(disk)
    assert keys(again) == [1, 2]
    again.close()


def test_a_crash_between_the_probe_and_the_first_superblock(disk):
    """The probe left a superblock by whose rule nothing counts. What is written from then on does."""
    filled(disk, 1).close()
    fingerprint = Fingerprint.of({"model": "test"}, LAYOUT)
    disk.content[:4096] = BlockZero(disk, Striping(LAYOUT, 4), 0, fingerprint).page()
    copy, store = reopen(disk)
    assert keys(store) == [] and store.recovery.losses == {LossReason.CLEARED: 1}
    put(store, 2)
    settle(store)
    _, again = reopen(copy)
    assert keys(again) == [2]
    store.close()
    again.close()


def test_cleared_is_gone_for_good(disk):
    store = filled(disk, 1, 2)
    store.clear()
    put(store, 3)
    settle(store)
    _, again = reopen(disk)
    assert keys(again) == [3] and again.recovery.losses == {LossReason.CLEARED: 1}
    _, third = reopen(again._roots[0].disk)
    assert keys(third) == [3], "what oldest_valid says is handed on"
    for each in (store, again, third):
        each.close()


def test_no_record_gets_ahead_of_a_clear(disk):
    """The clear cannot be written down at first: nothing that comes after it is either, until it can."""
    store = filled(disk, 1, 2)
    disk.write_faults.extend(["eio", "eio"])
    store.clear()
    assert put(store, 3) is PutResult.STORED
    settle(store)
    assert keys(store) == [], "its write failed with the one of the superblock"
    _, again = reopen(disk)
    assert keys(again) == [1, 2], "as before the clear"
    put(store, 4)
    settle(store)
    _, third = reopen(disk)
    assert keys(third) == [4]
    for each in (store, again, third):
        each.close()


def test_a_clear_that_could_not_be_written_is_tried_again_at_close(disk):
    store = filled(disk, 1, 2)
    disk.write_faults.append(("short", 3))
    store.clear()
    chores_done(store)
    store.close()
    _, again = reopen(disk)
    assert keys(again) == [] and again.recovery.losses == {LossReason.CLEARED: 2}
    again.close()


def test_the_log_says_what_was_found(disk, caplog):
    store = filled(disk, 1, 2, 3)
    put_extent(store, 4, 2)
    settle(store)
    store.close()
    disk.content[LAYOUT.slab_offset(0) + 100] ^= 1
    with caplog.at_level(logging.INFO, "sglang_histate.store"):
        _, again = reopen(disk, keep_unrestorable=False)
    (line,) = (r.getMessage() for r in caplog.records if "recovered" in r.getMessage())
    assert line.startswith("recovered 0 checkpoints and 0 extents in 0.")
    assert "dropped: 1 no_checkpoint, 2 no_kv, 1 unsound; last shutdown in order" in line
    again.close()


def test_opening_marks_the_store_as_open(disk):
    store = filled(disk, 1)
    store.close()
    assert Superblock.parse(bytes(disk.content[:4096])).clean
    _, again = reopen(disk)
    assert again.recovery.clean
    _, third = reopen(again._roots[0].disk)
    assert not third.recovery.clean
    again.close()
    third.close()
