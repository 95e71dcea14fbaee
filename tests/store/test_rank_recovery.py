"""Ranks that find different things on their disks begin with the same index and go on alike."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_histate.store import LossReason, RecordKind, Recovered
from sglang_histate.store.layout import epoch_of
from sglang_histate.store.snapshot import SnapshotFile

from .conftest import LAYOUT, chores_done, key, open_store, put, put_extent, settle
from .fakes import FakeDisk

KV = RecordKind.KV


class Meeting:
    """What an adapter does with a process group, among threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._said: list[object] = [None] * ranks
        self.calls: list[str] = []

    def _exchange(self, rank: int, what: object) -> list:
        self._said[rank] = what
        self._barrier.wait()
        everything = list(self._said)
        self._barrier.wait()
        return everything

    def agree(self, rank: int, found: list[Recovered]) -> list[Recovered]:
        self.calls.append("agree")
        everything = self._exchange(rank, found)
        common = set.intersection(*map(set, everything))
        return [entry for entry in everything[0] if entry in common]

    def agree_epoch(self, rank: int, epoch: int) -> int:
        self.calls.append("epoch")
        return max(self._exchange(rank, epoch))


def open_all(disks: list[FakeDisk], files: list[SnapshotFile | None] | None = None, **changes):
    meeting = Meeting(len(disks))
    settings = {"slabs": 8, "keep_unrestorable": True} | changes

    def opened(rank: int):
        return open_store(
            disk=disks[rank],
            snapshots=files[rank] if files else None,
            agree=lambda found: meeting.agree(rank, found),
            agree_epoch=lambda epoch: meeting.agree_epoch(rank, epoch),
            **settings,
        )

    with ThreadPoolExecutor(len(disks)) as pool:
        stores = list(pool.map(opened, range(len(disks))))
    assert sorted(meeting.calls) == ["agree"] * len(disks) + ["epoch"] * len(disks)
    check(stores)
    return stores


def check(stores) -> None:
    states = [store.logical_state() for store in stores]
    assert all(state == states[0] for state in states)
    generations = [[entry.generation for entry in store.entries()] for store in stores]
    assert all(one == generations[0] for one in generations)


def keys(store) -> list[int]:
    return [int.from_bytes(entry.key, "big") for entry in store.entries()]


def put_everywhere(stores, *numbers: int) -> None:
    for number in numbers:
        for store in stores:
            put(store, number)
            settle(store)


def close_all(stores) -> None:
    for store in stores:
        store.close()


@pytest.fixture
def disks() -> list[FakeDisk]:
    return [FakeDisk(), FakeDisk()]


def tear(disk: FakeDisk, slab: int) -> None:
    disk.content[LAYOUT.slab_offset(slab) + 512] ^= 0xFF


def test_different_slabs_are_torn(disks):
    stores = open_all(disks)
    put_everywhere(stores, 1, 2, 3, 4, 5)
    at = {number: stores[0].lookup(key(number)).slab for number in (1, 2, 3, 4, 5)}
    close_all(stores)
    tear(disks[0], at[2])
    tear(disks[1], at[4])
    stores = open_all(disks)
    assert keys(stores[0]) == [1, 3, 5]
    for store in stores:
        assert store.recovery.losses == {LossReason.UNSOUND: 1, LossReason.OTHER_RANK: 1}
        assert store.stats().slabs_used == 3
    put_everywhere(stores, 2, 6, 7, 8, 9, 10)
    check(stores)
    close_all(stores)
    stores = open_all(disks)
    assert keys(stores[0]) == [3, 5, 2, 6, 7, 8, 9, 10]
    close_all(stores)


def test_the_usable_is_decided_after_the_agreement(disks):
    """Both ranks have the checkpoint, each has another half of its KV."""
    stores = open_all(disks)
    for store in stores:
        put_extent(store, 4, 4)
        put_extent(store, 8, 4, parent=key(4))
        settle(store)
        put(store, 8)
        put(store, 4)
        settle(store)
    at = [stores[0].lookup(key(number), KV).slab for number in (4, 8)]
    close_all(stores)
    tear(disks[1], at[1])
    stores = open_all(disks, keep_unrestorable=False)
    assert [(entry.kind, entry.key) for entry in stores[0].entries()] == [
        (KV, key(4)),
        (RecordKind.CHECKPOINT, key(4)),
    ]
    assert stores[0].recovery.losses == {LossReason.OTHER_RANK: 1, LossReason.NO_KV: 1}
    close_all(stores)


def test_a_rank_whose_file_was_lost_catches_up(disks):
    for number in (1, 2, 3):
        stores = open_all(disks)
        put_everywhere(stores, number)
        close_all(stores)
    disks[1] = FakeDisk()
    stores = open_all(disks)
    assert keys(stores[0]) == []
    put_everywhere(stores, 4)
    assert {epoch_of(store.lookup(key(4)).generation) for store in stores} == {4}
    close_all(stores)
    stores = open_all(disks)
    assert keys(stores[0]) == [4], "written in one epoch on both"
    close_all(stores)


def test_a_clear_that_only_one_rank_wrote_down(disks):
    stores = open_all(disks)
    put_everywhere(stores, 1, 2)
    disks[1].write_faults.append("eio")
    for store in stores:
        store.clear()
        chores_done(store)
    copies = [FakeDisk(), FakeDisk()]
    for copy, disk in zip(copies, disks, strict=True):
        copy.content = bytearray(disk.content)
    close_all(stores)
    stores = open_all(copies)
    assert keys(stores[0]) == []
    assert stores[1].recovery.losses == {LossReason.OTHER_RANK: 2}
    close_all(stores)


def test_one_order_of_use_for_all(disks, tmp_path: Path):
    files = [SnapshotFile(tmp_path / str(rank)) for rank in range(2)]
    stores = open_all(disks, files)
    put_everywhere(stores, 1, 2, 3)
    for store in stores:
        store.touch(key(1))
    close_all(stores)
    files[1].path.write_bytes(b"torn")
    stores = open_all(disks, files)
    assert keys(stores[1]) == keys(stores[0]) == [2, 3, 1]
    close_all(stores)
    files[0].path.unlink()
    stores = open_all(disks, files)
    assert keys(stores[1]) == keys(stores[0]) == [1, 2, 3]
    close_all(stores)


def test_without_keep_the_ranks_meet_all_the_same(disks):
    stores = open_all(disks)
    put_everywhere(stores, 1)
    close_all(stores)
    stores = open_all(disks, keep=False)
    assert keys(stores[0]) == []
    close_all(stores)


def test_any_damage_on_any_rank():
    draw = random.Random(3)
    for _ in range(25):
        disks = [FakeDisk() for _ in range(3)]
        for _ in range(3):
            stores = open_all(disks, keep_unrestorable=draw.random() < 0.5)
            for _ in range(draw.randrange(12)):
                number, kind = draw.randrange(9), draw.random()
                for store in stores:
                    (put if kind < 0.6 else put_extent)(store, number)
                    settle(store)
            check(stores)
            close_all(stores)
            for disk in disks:
                for _ in range(draw.choice([0, 1, 3])):
                    disk.content[draw.randrange(len(disk.content))] ^= 1 << draw.randrange(8)


def test_an_agreement_on_what_a_rank_does_not_have_is_a_defect(disks):
    store = open_all(disks[:1])[0]
    put(store, 1)
    settle(store)
    store.close()
    (entry,) = open_all(disks[:1])[0].entries()
    stranger = Recovered(key(9), RecordKind.CHECKPOINT, 64, bytes(32), (), bytes(16), 5, 9)
    with pytest.raises(AssertionError):
        open_store(disk=disks[0], slabs=8, agree=lambda found: [*found, stranger])
    assert entry.key == key(1)
