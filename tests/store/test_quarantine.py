"""A store that is not trusted any more: nothing goes in or out, the file stays as it was, and the note survives."""

from __future__ import annotations

import os
import stat

import pytest

from sglang_histate.store import DropReason, EntryState, MissReason, PutResult, RecordKind
from sglang_histate.store.quarantine import Quarantine, read_quarantine, write_quarantine
from sglang_histate.store.wrong_states import WrongStatesDisk

from .conftest import LAYOUT, chores_done, key, open_store, put, put_extent, settle, wait_finished


@pytest.fixture
def store(disk):
    made = open_store(disk=disk, keep_unrestorable=True, record_buffers=8)
    yield made
    made.close()


def test_nothing_comes_out_and_nothing_goes_in(store, disk) -> None:
    put(store, 1)
    put_extent(store, 2)
    settle(store)
    before = bytes(disk.content)
    store.quarantine()
    assert not list(store.entries())
    assert store.begin_read(key(1)) is MissReason.QUARANTINED
    assert store.begin_read(key(2), kind=RecordKind.KV) is MissReason.QUARANTINED
    assert put(store, 3) is put_extent(store, 4) is PutResult.QUARANTINED
    assert store.claim_record(key(5), None) is PutResult.QUARANTINED
    store.clear()  # /flush_cache
    chores_done(store)
    assert put(store, 6) is PutResult.QUARANTINED
    assert bytes(disk.content) == before and store.records.free == store.records.total
    assert store.stats().drops[DropReason.QUARANTINED] == 2


def test_what_is_under_way_ends_without_effect(store, disk) -> None:
    put(store, 1)
    settle(store)
    disk.reads_allowed.clear()
    disk.writes_allowed.clear()
    ticket = store.begin_read(key(1))
    put(store, 2)
    put(store, 3)  # the writer has not begun with it
    disk.write_entered.wait(10)
    store.quarantine()
    disk.reads_allowed.set()
    disk.writes_allowed.set()
    wait_finished(store)
    store.poll()
    assert ticket.ok is False and ticket.miss_reason is MissReason.CLEARED
    assert not list(store.entries()) and store.records.free == store.records.total
    assert store.stats().slabs_used == 0


def test_the_file_is_as_it_was_for_who_opens_it_next(store, disk) -> None:
    put(store, 1)
    settle(store)
    store.quarantine()
    store.close()
    again = open_store(disk=disk, keep_unrestorable=True)
    assert [entry.state for entry in again.entries()] == [EntryState.LIVE]
    again.close()


def test_the_note(tmp_path) -> None:
    file = tmp_path / "quarantined.json"
    assert read_quarantine(file) is None
    note = Quarantine(1_800_000_000.5, "layer 3 differs")
    write_quarantine(file, note)
    assert read_quarantine(file) == note and note.since == "2027-01-15T08:00:00Z"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    write_quarantine(file, Quarantine(1.0, "something else"))
    assert read_quarantine(file) == note, "what was found first stays"


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"since_s": "x", "why": 1}', b"\xff", None])
def test_a_note_that_cannot_be_understood_counts(tmp_path, content) -> None:
    file = tmp_path / "quarantined.json"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    found = read_quarantine(file)
    assert found is not None and "cannot be read" in found.why


def test_a_note_is_not_written_through_a_link(tmp_path) -> None:
    os.symlink(tmp_path / "elsewhere", tmp_path / "quarantined.json")
    write_quarantine(tmp_path / "quarantined.json", Quarantine(1.0, "x"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_disk_that_writes_wrong_states_passes_every_check(disk, tmp_path) -> None:
    switch = tmp_path / "wrong"
    store = open_store(disk=WrongStatesDisk(disk, LAYOUT, switch), keep_unrestorable=True, record_buffers=8)
    put(store, 3, fill=7)
    settle(store)
    switch.touch()
    put(store, 1, fill=7)
    put_extent(store, 2, fill=9)
    settle(store)
    state, kv, right = (
        store.begin_read(key(1)),
        store.begin_read(key(2), kind=RecordKind.KV),
        store.begin_read(key(3)),
    )
    settle(store)
    assert state.ok and kv.ok and right.ok and set(right.record.payload.tolist()) == {7}
    assert bytes(state.record.payload[:8]) == bytes([7, 7, 7, 135] * 2)
    assert set(state.record.payload[5000:].tolist()) == {7} and kv.record.kv_pages[0][3] == 9
    store.close()
