"""Purging: what is gone is gone from index and disk, and what is not of the namespace stays."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from sglang_histate.store import DropReason, MissReason, PutResult, RecordKind, StoreError, namespace_of
from sglang_histate.store.purge import purge_all, purge_namespace
from sglang_histate.store.quarantine import QUARANTINE_FILE, Quarantine, write_quarantine
from sglang_histate.store.snapshot import Snapshot
from sglang_histate.store.survey import SlabFile, SlabState, survey

from .conftest import chores_done, fill_extent, key, open_store, page_keys, settle
from .fakes import FakeDisk

ONE, TWO = namespace_of(None, "one"), namespace_of(None, "two")


def put(store, number: int, namespace: bytes) -> None:
    """A checkpoint and the KV that it needs, one page."""
    record = store.acquire_record()
    record.payload[:] = 0xF0 | number  # no zeros beside it: keys are searched for in the file
    assert store.put(key(number), 64, record, namespace=namespace) is PutResult.STORED
    record = store.acquire_record()
    fill_extent(record, 1, 0xF0 | number)
    found = store.put_extent(page_keys(number, 1), 64, record, parent=bytes(32), namespace=namespace)
    assert found is PutResult.STORED
    settle(store)


def numbers(store) -> set[int]:
    return {int.from_bytes(entry.key, "big") for entry in store.entries()}


def filled(slabs: int = 16, **where):
    store = open_store(slabs=slabs, **where)
    for number, namespace in ((1, ONE), (2, TWO), (3, ONE), (4, bytes(16))):
        put(store, number, namespace)
    return store


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def slab_file(root: Path, flags: int = os.O_RDWR) -> SlabFile:
    (path,) = survey(root).files
    return SlabFile.open(root, path, flags)


@pytest.mark.parametrize("namespace", [ONE, bytes(16)])
def test_a_namespace_of_an_open_store(disk: FakeDisk, namespace) -> None:
    store = filled(disk=disk)
    before = numbers(store)
    gone = {entry.key for entry in store.entries() if entry.namespace == namespace}
    layout = store.layout
    headers = [layout.slab_offset(entry.slab) for entry in store.entries() if entry.namespace == namespace]
    assert store.purge(namespace) == 2 * len(gone) == len(headers)
    assert store.stats().kinds[RecordKind.KV].drops == {DropReason.PURGED: len(gone)}
    chores_done(store)
    purges = store.stats().purges
    assert (purges.asked, purges.done, purges.failed, purges.erased) == (1, 1, 0, 2 * len(gone))
    # Keys of tests are nearly all zeros, so they are not searched for: a checksum after zeros may look like one.
    assert not any(any(disk.content[at : at + layout.header_bytes]) for at in headers), (
        "the hashes are off the disk"
    )
    # As after kill -9: nothing comes back.
    again = FakeDisk()
    again.content = bytearray(disk.content)
    left = numbers(open_store(slabs=16, disk=again))
    assert left == before - {int.from_bytes(entry, "big") for entry in gone}


def test_everything_of_an_open_store(disk: FakeDisk) -> None:
    store = filled(disk=disk)
    assert store.purge(None) == 8 and not list(store.entries())
    put(store, 9, ONE)  # what comes later stays
    chores_done(store)
    assert store.stats().purges.erased == 8
    store.close()
    assert numbers(open_store(slabs=16, disk=disk)) == {9}


def test_what_had_left_the_index_is_erased_too(disk: FakeDisk) -> None:
    store = filled(disk=disk)
    store.drop(key(1)), store.drop(key(1), kind=RecordKind.KV)
    assert store.purge(ONE) == 2
    chores_done(store)
    assert store.stats().purges.erased == 4


def test_a_write_in_flight_and_a_read_in_flight(disk: FakeDisk) -> None:
    store = filled(disk=disk)
    disk.reads_allowed.clear()
    disk.writes_allowed.clear()
    ticket = store.begin_read(key(1))
    other = store.begin_read(key(2))
    record = store.acquire_record()
    record.payload[:] = 7
    store.put(key(7), 64, record, namespace=ONE)
    assert disk.write_entered.wait(10)
    assert store.purge(ONE) == 5
    disk.reads_allowed.set()
    disk.writes_allowed.set()
    chores_done(store)
    settle(store)
    assert ticket.ok is False and ticket.miss_reason is MissReason.CLEARED
    assert other.ok is True
    store.release(other)
    assert store.stats().buffers_free == store.stats().buffers_total
    assert key(7) not in bytes(disk.content), "it was on its way and would have come back"


def test_a_disk_that_refuses_is_counted(disk: FakeDisk, caplog) -> None:
    store = filled(disk=disk)
    disk.write_faults.append("eio")
    store.purge(ONE)
    chores_done(store)
    assert store.stats().purges.failed == 1 and not store.lookup(key(1))
    assert bytes(disk.content).count(ONE) == 1, "the others are gone all the same"
    store.purge(ONE)
    chores_done(store)
    assert (store.stats().purges.failed, store.stats().purges.erased) == (1, 1)


def test_a_header_that_cannot_be_read_goes_too(disk: FakeDisk) -> None:
    store = filled(disk=disk)
    disk.read_faults.append("eio")
    store.purge(namespace_of(None, "nobody"))
    chores_done(store)
    assert store.stats().purges.erased == 1


def test_the_scheduler_thread_never_waits(disk: FakeDisk) -> None:
    store = filled(disk=disk)
    disk.reads_allowed.clear()
    done = threading.Event()
    store.purge(ONE)
    assert store.stats().purges.done == 0
    disk.reads_allowed.set()
    store._roots[0].writer.do(done.set)
    assert done.wait(10) and store.stats().purges.done == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_namespace_of_a_closed_store(root: Path, overwrite) -> None:
    store = filled(root=root)
    record = store.acquire_record()
    record.payload[:] = 0xA7
    store.put(key(5), 64, record, namespace=ONE)
    settle(store)
    store.close()
    with slab_file(root) as file:
        seen: list[int] = []
        assert purge_namespace(file, ONE, overwrite=overwrite, progress=seen.append) == 5
        assert sum(seen) == 16
        states = [slab.state for slab in file.headers()]
        assert states.count(SlabState.RECORD) == 4
        content = file.path.read_bytes()
        assert (bytes([0xA7]) * 4096 in content) is not overwrite
        snapshot = Snapshot.parse((file.path.parent / "stats.snap").read_bytes(), store.fingerprint)
    assert isinstance(snapshot, Snapshot) and {name.hash for name in snapshot.names} == {key(2), key(4)}
    again = open_store(root, slabs=16)
    assert numbers(again) == {2, 4} and again.recovery.order.value == "used"
    again.close()


def test_a_whole_closed_store(root: Path) -> None:
    filled(root=root).close()
    (path,) = survey(root).files
    write_quarantine(path.with_name(QUARANTINE_FILE), Quarantine(0.0, "a test"))
    with slab_file(root) as file:
        again = os.dup(file.fd)
        assert purge_all(file, overwrite=False, progress=lambda _: None) == 8
    assert files(root) == []
    content = os.pread(again, 1 << 20, 0)
    os.close(again)
    assert all(key(number) not in content for number in range(1, 5)) and not any(content[:4096])


def test_strangers_stay(root: Path) -> None:
    filled(root=root).close()
    (path,) = survey(root).files
    (path.parent / "notes.txt").write_text("mine")
    with SlabFile.open(root, path, os.O_RDWR) as file:
        purge_all(file, overwrite=False, progress=lambda _: None)
    assert files(root)[-1].endswith("notes.txt")


def test_an_open_store_is_refused_and_untouched(root: Path) -> None:
    store = filled(root=root)
    before = slab_file(root, os.O_RDONLY).path.read_bytes()
    for purge in (
        lambda file: purge_all(file, overwrite=True, progress=lambda _: None),
        lambda file: purge_namespace(file, ONE, overwrite=True, progress=lambda _: None),
    ):
        with slab_file(root) as file, pytest.raises(StoreError, match="in use by another process"):
            assert file.holder == os.getpid()
            purge(file)
    assert slab_file(root, os.O_RDONLY).path.read_bytes() == before
    store.close()


def test_another_format_version_is_refused(root: Path) -> None:
    filled(root=root).close()
    (path,) = survey(root).files
    content = bytearray(path.read_bytes())
    content[8] = 9
    path.write_bytes(content)
    with slab_file(root) as file, pytest.raises(StoreError, match="no store of format 3 and stays"):
        purge_all(file, overwrite=False, progress=lambda _: None)
    assert path.read_bytes() == bytes(content)


def test_a_disk_that_fails_is_one_sentence(root: Path, monkeypatch) -> None:
    filled(root=root).close()

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    with slab_file(root) as file:
        monkeypatch.setattr(os, "pwritev", broken)
        with pytest.raises(StoreError, match="purged only in part"):
            purge_namespace(file, ONE, overwrite=False, progress=lambda _: None)


def test_a_store_in_quarantine_can_be_purged(disk: FakeDisk) -> None:
    store = filled(disk=disk)
    store.quarantine()
    assert store.purge(ONE) == 0  # the index is empty already
    chores_done(store)
    assert store.stats().purges.erased == 4 and ONE not in bytes(disk.content)
