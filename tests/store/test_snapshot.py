"""`stats.snap`: the order of use outlives the process, and nothing depends on the file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import xxhash

from sglang_histate.store import CheckpointStore, Fingerprint, Key, RecordKind
from sglang_histate.store.snapshot import Snapshot, SnapshotFile, SnapshotState

from .conftest import LAYOUT, chores_done, key, open_store, put, put_extent, settle, wait_finished
from .fakes import FakeDisk

KV, CHECKPOINT = RecordKind.KV, RecordKind.CHECKPOINT
FINGERPRINT = Fingerprint.of({"model": "test"}, LAYOUT)


@pytest.fixture
def file(tmp_path: Path) -> SnapshotFile:
    return SnapshotFile(tmp_path / "stats.snap")


def opened(disk: FakeDisk, file: SnapshotFile, **changes) -> CheckpointStore:
    return open_store(disk=disk, snapshots=file, keep_unrestorable=True, slabs=6, **changes)


def filled(disk: FakeDisk, file: SnapshotFile, *numbers: int) -> CheckpointStore:
    store = opened(disk, file)
    for number in numbers:
        put(store, number)
        settle(store)
    return store


def crashed(disk: FakeDisk, file: SnapshotFile, **changes) -> CheckpointStore:
    """Open the disk as it is now; what the older store does later is not seen."""
    copy = FakeDisk()
    copy.content = bytearray(disk.content)
    return opened(copy, file, **changes)


def keys(store: CheckpointStore) -> list[int]:
    return [int.from_bytes(entry.key, "big") for entry in store.entries()]


def test_golden_bytes():
    snapshot = Snapshot(3, 5 << 40, (Key(key(1)), Key(key(2), KV)), written=(20_000, 7 << 32))
    packed = snapshot.pack(FINGERPRINT)
    golden = (
        b"HISNAP\0\0"
        + bytes.fromhex("02000000")
        + FINGERPRINT.digest
        + bytes.fromhex("0300000000000000 0000000000050000")
        + bytes.fromhex("204e000000000000 0000000007000000 0200000000000000")
        + b"\1" + key(1) + b"\2" + key(2)
    )  # fmt: skip
    assert packed == golden + xxhash.xxh3_64_intdigest(golden).to_bytes(8, "little")
    assert Snapshot.parse(packed, FINGERPRINT) == snapshot


def test_closing_keeps_the_order_of_use(disk, file):
    store = filled(disk, file, 1, 2, 3, 4)
    store.touch(key(2))
    store.touch(key(1))
    store.close()
    again = opened(disk, file)
    assert keys(again) == [3, 4, 2, 1] and again.recovery.order is SnapshotState.USED
    put(again, 5)
    put(again, 6)
    put(again, 7)  # 3 was used least recently
    assert keys(again) == [4, 2, 1, 5, 6, 7]
    wait_finished(again)
    again.close()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert os.listdir(file.path.parent) == ["stats.snap"]


def test_what_is_newer_than_the_snapshot_comes_after_it_and_what_it_had_dropped_before(disk, file):
    store = filled(disk, file, 1, 2, 3, 4)
    store.drop(key(3))  # its slab is not used again
    store.touch(key(1))
    store.snapshot()
    chores_done(store)
    store.touch(key(4))  # too late
    put_extent(store, 5)  # takes the slab of 3
    put(store, 6)
    settle(store)
    store.drop(key(6))
    again = crashed(disk, file)
    assert keys(again) == [2, 4, 1, 5, 6]
    store.close()
    again.close()


def test_dropped_before_the_snapshot_goes_first(disk, file):
    store = filled(disk, file, 1, 2, 3)
    store.drop(key(3))
    store.snapshot()
    chores_done(store)
    again = crashed(disk, file)
    assert keys(again) == [3, 1, 2]
    store.close()
    again.close()


def test_a_fresh_snapshot_follows_at_once(disk, file):
    """The older one counts for the first open after its run only; a crash right after that must not lose it."""
    store = filled(disk, file, 1, 2, 3)
    store.touch(key(1))
    store.close()
    again = opened(disk, file)
    chores_done(again)
    third = crashed(disk, file)
    assert keys(third) == [2, 3, 1] and third.recovery.order is SnapshotState.USED
    again.close()
    third.close()


@pytest.mark.parametrize(
    ("harm", "state"),
    [
        (lambda path: path.unlink(), SnapshotState.MISSING),
        (lambda path: path.write_bytes(b""), SnapshotState.TORN),
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), SnapshotState.TORN),
        (lambda path: path.write_bytes(bytes(200)), SnapshotState.TORN),
        (lambda path: path.write_bytes(path.read_bytes()[:80] + b"x" + path.read_bytes()[81:]), SnapshotState.TORN),
        (lambda path: path.write_bytes(Snapshot(1, 0, ()).pack(Fingerprint(b"{}"))), SnapshotState.FOREIGN),
        (lambda path: path.write_bytes(Snapshot(9, 0, ()).pack(FINGERPRINT)), SnapshotState.STALE),
        (lambda path: (path.unlink(), path.mkdir()), SnapshotState.UNREADABLE),
        (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), SnapshotState.UNREADABLE),
    ],
)  # fmt: skip
def test_a_bad_one_costs_the_order_only(disk, file, harm, state):
    store = filled(disk, file, 1, 2, 3)
    store.touch(key(1))
    store.close()
    harm(file.path)
    again = opened(disk, file)
    assert keys(again) == [1, 2, 3] and again.recovery.order is state
    again.close()


def test_a_half_written_one_is_cleaned_up(disk, file):
    filled(disk, file, 1, 2).close()
    aside = file.path.with_name("stats.snap.tmp")
    aside.write_bytes(b"half")
    opened(disk, file).close()
    assert not aside.exists()


def test_one_that_cannot_be_written_is_a_log_line(disk, file, caplog):
    store = filled(disk, file, 1)
    file.path.with_name("stats.snap.tmp").mkdir()
    store.snapshot()
    chores_done(store)
    assert "could not write down its state" in caplog.text
    put(store, 2)
    settle(store)
    store.close()
    assert disk.closed


def test_calls_in_between_do_not_pile_up(disk, file):
    store = filled(disk, file, 1)
    disk.writes_allowed.clear()
    put(store, 2)
    written = []
    replace = file.replace
    file.replace = lambda content: (written.append(len(content)), replace(content))
    for _ in range(5):
        store.snapshot()
    disk.writes_allowed.set()
    settle(store)
    chores_done(store)
    assert len(written) == 1
    store.snapshot()
    chores_done(store)
    assert len(written) == 2
    store.close()


def test_beside_the_real_file(root: Path):
    store = open_store(root, keep_unrestorable=True)
    for number in (1, 2, 3):
        put(store, number)
        settle(store)
    store.touch(key(1))
    store.close()
    (snap,) = root.glob("*/*/stats.snap")
    assert sorted(os.listdir(snap.parent)) == ["slabs.dat", "stats.snap"]
    assert stat.S_IMODE(snap.stat().st_mode) == 0o600
    again = open_store(root, keep_unrestorable=True)
    assert keys(again) == [2, 3, 1] and again.recovery.clean
    again.close()
