"""Who makes room, and who hears of it: `choose_victim`, `on_present`, `on_gone`."""

from __future__ import annotations

import pytest

from sglang_histate.store import DropReason, Key, MissReason, PutResult, RecordKind

from .conftest import key, open_store, put, put_extent, settle
from .fakes import FakeDisk

KV, CHECKPOINT = RecordKind.KV, RecordKind.CHECKPOINT


class Ears:
    """Writes down what the store announces, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple] = []
        self.present: dict[Key, None] = {}

    def on_present(self, hashed: bytes, kind: RecordKind) -> None:
        self.heard.append(("present", int.from_bytes(hashed, "big"), kind))
        assert Key(hashed, kind) not in self.present
        self.present[Key(hashed, kind)] = None

    def on_gone(self, hashed: bytes, kind: RecordKind, reason: DropReason) -> None:
        self.heard.append((reason, int.from_bytes(hashed, "big"), kind))
        del self.present[Key(hashed, kind)]

    def take(self) -> list[tuple]:
        heard, self.heard = self.heard, []
        return heard


@pytest.fixture
def ears() -> Ears:
    return Ears()


def listening(disk: FakeDisk, ears: Ears, **changes):
    return open_store(disk=disk, on_present=ears.on_present, on_gone=ears.on_gone, **changes)


def test_least_recently_used_over_both_kinds(disk, ears):
    store = listening(disk, ears, slabs=3)
    put(store, 1)
    put_extent(store, 1)
    put(store, 2)
    settle(store)
    store.touch(key(1))
    ears.take()
    put_extent(store, 5)
    settle(store)
    assert ears.take() == [(DropReason.EVICTED, 1, KV), ("present", 5, KV)]
    store.touch(key(2), KV)  # not there: no effect
    put_extent(store, 6)
    assert ears.take() == [(DropReason.EVICTED, 2, CHECKPOINT), ("present", 6, KV)]
    settle(store)
    assert store.stats().kinds[KV].drops == {DropReason.EVICTED: 1}
    store.close()


def test_the_policy_decides(disk, ears):
    asked = []

    def choose() -> Key | None:
        asked.append(len(ears.present))
        return Key(key(2), KV)

    store = listening(disk, ears, slabs=3, choose_victim=choose)
    put(store, 1)
    put_extent(store, 2)
    put(store, 2)
    settle(store)
    assert asked == [], "nobody must go while a slab is free"
    assert put(store, 3) is PutResult.STORED
    settle(store)
    assert asked == [3] and store.lookup(key(2), KV) is None and store.lookup(key(2)) is not None
    store.drop(key(1))
    assert put(store, 4) is PutResult.STORED and asked == [3]
    settle(store)
    store.close()


def test_a_policy_that_keeps_everything(disk, ears):
    store = listening(disk, ears, slabs=1, choose_victim=lambda: None)
    put(store, 1)
    settle(store)
    assert put_extent(store, 2) is PutResult.NO_SLAB
    assert list(ears.present) == [Key(key(1))]
    assert store.stats().buffers_free == 4
    store.close()


def test_a_victim_in_use_is_refused(disk, ears, caplog):
    victim = Key(key(1), KV)
    store = listening(disk, ears, slabs=1, choose_victim=lambda: victim)
    assert not store.replaceable(victim)
    disk.writes_allowed.clear()
    put_extent(store, 1)
    assert not store.replaceable(victim), "it is being written"
    assert put(store, 2) is PutResult.BAD_VICTIM
    disk.writes_allowed.set()
    settle(store)
    assert store.replaceable(victim)
    ticket = store.begin_read(*victim[:1], kind=KV)
    assert not store.replaceable(victim), "it is being read"
    assert put(store, 2) is PutResult.BAD_VICTIM
    settle(store)
    assert store.replaceable(victim), "the record is held by its reader, the slab is not"
    assert put(store, 2) is PutResult.STORED
    assert ticket.ok and (ticket.record.kv_pages[0] == 1).all()
    assert put(store, 3) is PutResult.BAD_VICTIM, "not in the index any more"
    assert store.stats().kinds[CHECKPOINT].puts == {PutResult.BAD_VICTIM: 3, PutResult.STORED: 1}
    assert "in use" in caplog.text
    store.release(ticket)
    settle(store)
    assert store.stats().buffers_free == 4
    store.close()


def test_callbacks_may_look_things_up(disk):
    seen = []
    store = open_store(
        disk=disk,
        slabs=1,
        choose_victim=lambda: next(name for name in (Key(key(1)), Key(key(2))) if store.replaceable(name)),
        on_present=lambda hashed, kind: seen.append(store.lookup(hashed, kind).at_token),
        on_gone=lambda hashed, kind, reason: seen.append(store.lookup(hashed, kind)),
    )
    put(store, 1)
    settle(store)
    put(store, 2)
    assert seen == [64, None, 128]
    settle(store)
    store.close()


def test_every_way_to_leave_is_announced_once(disk, ears):
    store = listening(disk, ears, slabs=4)
    put(store, 1)
    assert ears.take() == [("present", 1, CHECKPOINT)], "visible while it is being written"
    settle(store)
    assert ears.take() == []

    disk.read_faults.append("eio")
    tickets = [store.begin_read(key(1)), store.begin_read(key(1))]
    settle(store)
    assert ears.take() == [(DropReason.READ_FAILED, 1, CHECKPOINT)]
    for ticket in tickets:
        store.release(ticket)

    for fault in ("enospc", ("short", 3)):
        disk.write_faults.append(fault)
        put_extent(store, 2)
        settle(store)
        assert ears.take() == [("present", 2, KV), (DropReason.WRITE_FAILED, 2, KV)]
    assert store.stats().drops[DropReason.WRITE_ERROR] == store.stats().drops[DropReason.SHORT_WRITE] == 1

    disk.writes_allowed.clear()
    put_extent(store, 3)
    put(store, 3)
    store.drop(key(3), DropReason.ORPHANED, kind=KV)
    store.clear()
    disk.writes_allowed.set()
    settle(store)
    assert ears.take() == [
        ("present", 3, KV),
        ("present", 3, CHECKPOINT),
        (DropReason.ORPHANED, 3, KV),
        (DropReason.CLEARED, 3, CHECKPOINT),
    ]
    assert put(store, 3) is PutResult.STORED
    assert put(store, 3) is PutResult.ALREADY_STORED
    settle(store)
    store.close()
    assert ears.take() == [("present", 3, CHECKPOINT), (DropReason.CLOSED, 3, CHECKPOINT)]
    assert not ears.present
    assert store.begin_read(key(3)) is MissReason.CLOSED


def test_nothing_is_announced_before_the_commit(disk, ears):
    store = listening(disk, ears, slabs=2)
    disk.write_faults.append("eio")
    put(store, 1)
    while store.completed()[0] == 0:
        pass
    assert ears.take() == [("present", 1, CHECKPOINT)] and store.lookup(key(1)) is not None
    store.poll()
    assert ears.take() == [(DropReason.WRITE_FAILED, 1, CHECKPOINT)]
    store.close()


def test_the_agreed_reason_hides_what_only_one_rank_saw():
    details = {
        *(DropReason.WRITE_ERROR, DropReason.SHORT_WRITE, DropReason.TIMED_OUT, DropReason.OTHER_RANK),
        *(DropReason.NOT_FINITE, DropReason.INTERNAL),
    }
    for reason in DropReason:
        assert reason.agreed is (DropReason.WRITE_FAILED if reason in details else reason)
