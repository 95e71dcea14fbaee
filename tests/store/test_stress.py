"""The real file under load: many reads and writes of both kinds at once, every byte checked."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np

from sglang_histate.store import NO_PARENT, MissReason, PutResult, ReadTicket, RecordKind, RecordLayout

from .conftest import key, open_store, page_keys

LAYOUT = RecordLayout((200_000, 1000) * 4, kv_page_bytes=130_000)  # six pages per extent


def pattern(number: int, version: int, size: int) -> np.ndarray:
    return np.random.default_rng([number, version]).integers(0, 256, size, dtype=np.uint8)


def put(store, kind: RecordKind, number: int, version: int, record) -> PutResult:
    """Store a record whose bytes, and for an extent the number of pages, follow from `version`."""
    if kind is RecordKind.CHECKPOINT:
        record.payload[:] = pattern(number, version, LAYOUT.payload_bytes)
        return store.put(key(number), version, record)
    n_pages = 1 + version % LAYOUT.pages_per_extent
    content = pattern(number, version, n_pages * LAYOUT.kv_page_bytes)
    record.kv_pages[:n_pages] = content.reshape(n_pages, -1)
    return store.put_extent(page_keys(number, n_pages), version, record, parent=NO_PARENT)


def holds(ticket: ReadTicket, number: int, version: int) -> bool:
    if ticket.kind is RecordKind.CHECKPOINT:
        return bool((ticket.record.payload == pattern(number, version, LAYOUT.payload_bytes)).all())
    content = ticket.record.kv_pages[: ticket.n_pages].reshape(-1)
    return ticket.n_pages == 1 + version % LAYOUT.pages_per_extent and bool(
        (content == pattern(number, version, content.size)).all()
    )


def test_real_disk_under_load(root: Path):
    size_bytes = 4096 + 8 * LAYOUT.slab_bytes + 100
    store = open_store(root, layout=LAYOUT, size_bytes=size_bytes, record_buffers=6, reader_threads=4)
    (file,) = root.glob("*/*/slabs.dat")
    draw = random.Random(1)
    version: dict[tuple[int, RecordKind], int] = {}
    waiting: dict[ReadTicket, tuple[int, int]] = {}
    hits = stored = 0
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline and hits < 400:
        number, kind = draw.randrange(6), draw.choice(list(RecordKind))
        if draw.random() < 0.4:
            if (record := store.acquire_record()) is not None:
                if draw.random() < 0.3:
                    store.drop(key(number), kind=kind)
                fresh = version.get((number, kind), 0) + 1
                if put(store, kind, number, fresh, record) is PutResult.STORED:
                    version[number, kind] = fresh
                    stored += 1
        else:
            ticket = store.begin_read(key(number), kind=kind)
            if isinstance(ticket, ReadTicket):
                waiting[ticket] = (number, version[number, kind])
        for ticket in store.poll().reads:
            number, at = waiting.pop(ticket)
            assert ticket.ok, ticket.miss_reason
            assert holds(ticket, number, at), "a dirty read"
            assert ticket.at_token == at
            store.release(ticket)
            hits += 1
        if draw.random() < 0.05:
            time.sleep(0.002)
        assert file.stat().st_size <= size_bytes
    assert hits > 20 and stored > 10
    assert store.stats().reads_shared < store.stats().reads_ok + len(waiting), "some came from the file"
    settle_by = time.monotonic() + 10
    while store.stats().writes_queued or store.stats().reads_in_flight:
        for ticket in store.poll().reads:
            store.release(ticket)
        assert time.monotonic() < settle_by
        time.sleep(0.001)
    stats = store.stats()
    assert stats.buffers_free == stats.buffers_total and stats.slabs_used == stats.entries
    assert stats.misses.keys() <= {MissReason.ABSENT, MissReason.NO_BUFFER}
    assert all(part.reads_ok > 5 for part in stats.kinds.values())
    store.close()
