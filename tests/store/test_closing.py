"""How a store ends: in order when the disk lets it, soon in any case."""

from __future__ import annotations

import threading
import time

import pytest

from sglang_histate.store import DropReason, LossReason
from sglang_histate.store.blocks import Superblock

from .conftest import key, open_store, put, put_extent, settle, wait_finished
from .fakes import FakeDisk


def opened(disk: FakeDisk, **changes):
    return open_store(disk=disk, keep_unrestorable=True, **changes)


def keys(store) -> list[int]:
    return [int.from_bytes(entry.key, "big") for entry in store.entries()]


def is_clean(disk: FakeDisk) -> bool:
    return Superblock.parse(bytes(disk.content[:4096])).clean


def test_what_was_submitted_is_written_first(disk):
    store = opened(disk, record_buffers=8)
    disk.writes_allowed.clear()
    for number in (1, 2):
        put(store, number)
        put_extent(store, number)
    threading.Timer(0.2, disk.writes_allowed.set).start()
    store.close()
    assert disk.closed and is_clean(disk)
    again = opened(disk)
    assert keys(again) == [1, 1, 2, 2] and again.recovery.clean
    again.close()


def test_but_not_beyond_the_deadline(disk, caplog):
    store = opened(disk)
    write_at = disk.write_at
    disk.write_at = lambda *a: (time.sleep(0.15), write_at(*a))[1]
    for number in (1, 2, 3, 4):
        put(store, number)
    started = time.monotonic()
    store.close(deadline_s=0.2)
    assert 0.2 <= time.monotonic() - started < 1.2
    assert "could not be written before" in caplog.text and disk.closed and not is_clean(disk)
    disk.write_at = write_at
    again = opened(disk)
    assert keys(again) in ([1], [1, 2]) and not again.recovery.clean
    again.close()


@pytest.mark.parametrize("deadline_s", [0.0, 0.3])
def test_a_stuck_disk_does_not_keep_it(disk, deadline_s, caplog):
    store = opened(disk)
    disk.writes_allowed.clear()
    disk.write_entered.clear()
    put(store, 1)
    assert disk.write_entered.wait(5)
    started = time.monotonic()
    store.close(deadline_s)
    assert time.monotonic() - started < deadline_s + 1
    assert not disk.closed and "did not end" in caplog.text
    assert store.stats().drops == {DropReason.CLOSED: 1}
    disk.writes_allowed.set()
    wait_finished(store)


def test_records_of_dropped_entries_are_not_waited_for(disk):
    store = opened(disk)
    disk.writes_allowed.clear()
    disk.write_entered.clear()
    put(store, 1)
    assert disk.write_entered.wait(5)
    put(store, 2)
    store.drop(key(2))
    disk.writes_allowed.set()
    store.close()
    again = opened(disk)
    assert keys(again) == [1]
    again.close()


def test_a_disk_that_fails_at_the_end(disk, caplog):
    store = opened(disk)
    put(store, 1)
    settle(store)
    disk.write_faults.append("eio")
    store.close()
    assert "could not be left in order" in caplog.text and disk.closed and not is_clean(disk)
    again = opened(disk)
    assert keys(again) == [1] and again.recovery.losses == {}
    again.close()


def test_clear_and_close_at_once(disk):
    store = opened(disk)
    put(store, 1)
    settle(store)
    put(store, 2)
    store.clear()
    store.close()
    again = opened(disk)
    assert keys(again) == [] and set(again.recovery.losses) == {LossReason.CLEARED}
    again.close()
