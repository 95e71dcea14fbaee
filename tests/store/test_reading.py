"""A record that is read in many pieces: whatever order they land in, each part is verified, then delivered, once."""

from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.store import MissReason, RecordKind
from sglang_histate.store import reader as reader_module
from sglang_histate.store.layout import PAGE_BYTES
from sglang_histate.store.reading import piece_ends

from .conftest import LAYOUT, is_extent, key, open_store, put, put_extent, settle
from .fakes import FakeDisk

PIECE = 4096
CHECKPOINT, KV = RecordKind.CHECKPOINT, RecordKind.KV
PARTS = {CHECKPOINT: LAYOUT.segment_bytes, KV: LAYOUT.part_bytes(KV, 4)}
PIECES = 4  # header and three of content, for either kind


def all_back(store) -> None:
    stats = store.stats()
    assert stats.buffers_free == stats.buffers_total and stats.reads_in_flight == 0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(reader_module, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(reader_module, "LEAST_PIECE_BYTES", PIECE)


class Shuffled(FakeDisk):
    """Lets reads that wait at the same time go on in a random order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.waiting: list[int] = []
        self.shuffling = False
        self.pieces = 0

    def read_at(self, buffers, offset: int) -> int:
        if not self.shuffling:
            return super().read_at(buffers, offset)
        with self.changed:
            self.waiting.append(offset)
            self.pieces += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.waiting) >= reader_module.PIECES_AT_ONCE, 0.001)
            self.waiting.remove(offset)
            later = self.random.random() * 0.002
        threading.Event().wait(later)
        return super().read_at(buffers, offset)


@given(total=st.integers(1, 300 << 20), most=st.integers(1, 4096), least=st.integers(1, 64))
def test_pieces_follow_each_other_and_shrink_at_the_end(total: int, most: int, least: int) -> None:
    most, least = most * PAGE_BYTES, least * PAGE_BYTES
    ends = piece_ends(total, most, least)
    sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    assert ends[-1] == total and all(end % PAGE_BYTES == 0 for end in ends[:-1])
    assert all(least <= size <= max(most, least) for size in sizes[:-1])
    assert sizes == sorted(sizes, reverse=True), "none is larger than the one before"
    assert 0 < sizes[-1] <= 2 * least or len(sizes) == 1, "what is verified last is small"


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("kind", [CHECKPOINT, KV])
def test_parts_come_once_and_in_order(kind: RecordKind, threads: int) -> None:
    disk = Shuffled(seed=threads)
    store = open_store(disk=disk, reader_threads=threads)
    put(store, 1) if kind is CHECKPOINT else put_extent(store, 1, 4, fill=1)
    settle(store)
    disk.shuffling = True
    for _ in range(20):
        heard: list[int] = []

        def deliver(record, parts, heard=heard) -> None:
            assert (record.payload == 1).all() if kind is CHECKPOINT else is_extent(record, parts.stop, 1)
            heard += parts

        record = store.begin_read(key(1), deliver, kind=kind)
        settle(store)
        assert record.ok and heard == list(range(len(PARTS[kind]))), record
        store.release(record)
    assert disk.pieces == 20 * PIECES
    all_back(store)
    store.close()


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([CHECKPOINT, KV]),
    fault=st.sampled_from(["eio", "short", "flip"]),
    piece=st.integers(0, PIECES - 1),
    position=st.integers(0, PIECE - 1),
)
def test_one_bad_piece_is_a_miss(kind: RecordKind, fault: str, piece: int, position: int) -> None:
    """With one thread the pieces are read in order, so what came before the bad one is delivered and nothing else."""
    disk = FakeDisk()
    store = open_store(disk=disk, reader_threads=1)
    put(store, 1) if kind is CHECKPOINT else put_extent(store, 1, 4, fill=1)
    settle(store)
    disk.read_faults.extend([None] * piece)
    disk.read_faults.append("eio" if fault == "eio" else (fault, position))
    heard: list[int] = []
    ticket = store.begin_read(key(1), lambda record, parts: heard.extend(parts), kind=kind)
    settle(store)
    place = piece * PIECE + position - LAYOUT.header_bytes
    if fault == "flip" and place >= sum(PARTS[kind]):
        assert ticket.ok, "padding is nobody's"
    else:
        assert ticket.ok is False and heard == list(range(len(heard)))
        end = LAYOUT.header_bytes + sum(PARTS[kind][: len(heard)])
        assert end <= piece * PIECE + (position if fault == "flip" else 0) or not heard
        expected = {"eio": MissReason.IO_ERROR, "short": MissReason.SHORT_READ}
        assert fault == "flip" or ticket.miss_reason is expected[fault]
        assert store.lookup(key(1), kind) is None
    store.release(ticket)
    all_back(store)
    store.close()


@pytest.mark.parametrize("ending", ["cancel", "clear", "close"])
def test_an_end_between_two_pieces(ending: str) -> None:
    disk = FakeDisk()
    store = open_store(disk=disk, reader_threads=1)
    put(store, 1)
    settle(store)
    disk.reads_allowed.clear()
    heard: list[int] = []
    ticket = store.begin_read(key(1), lambda record, parts: heard.extend(parts))
    if ending == "cancel":
        store.cancel_read(ticket)
    elif ending == "clear":
        store.clear()
    else:
        closing = threading.Thread(target=store.close)
        closing.start()
        while not store._roots[0].reader._stopping:
            time.sleep(0.001)
    disk.reads_allowed.set()
    if ending == "close":
        closing.join()
        assert disk.closed, "the piece under way has ended"
    settle(store)
    assert not ticket.ok and heard == []
    assert (
        ticket.miss_reason
        is {"cancel": None, "clear": MissReason.CLEARED, "close": MissReason.CLOSED}[ending]
    )
    store.close()


def test_a_failed_delivery_ends_the_read() -> None:
    store = open_store(disk=FakeDisk())
    put(store, 1)
    settle(store)
    heard: list[int] = []

    def fail(record, parts) -> None:
        heard.extend(parts)
        raise ValueError("no room")

    ticket = store.begin_read(key(1), fail)
    settle(store)
    assert ticket.miss_reason is MissReason.INTERNAL and heard == [0, 1]
    all_back(store)
    store.close()
