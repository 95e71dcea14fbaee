"""The real file under load: many reads and writes at once, every byte checked."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np

from sglang_histate.store import PutResult, ReadTicket, RecordLayout

from .conftest import key, open_store


def test_real_disk_under_load(root: Path):
    layout = RecordLayout((200_000, 1000) * 4)
    size_bytes = 4096 + 8 * layout.slab_bytes + 100
    store = open_store(root, layout=layout, size_bytes=size_bytes, record_buffers=6, reader_threads=4)
    (file,) = root.glob("*/*/slabs.dat")
    draw = random.Random(1)
    version: dict[int, int] = {}
    waiting: dict[ReadTicket, tuple[int, int]] = {}
    hits = stored = 0

    def pattern(number: int, at: int) -> np.ndarray:
        return np.random.default_rng([number, at]).integers(0, 256, layout.payload_bytes, dtype=np.uint8)

    deadline = time.monotonic() + 6
    while time.monotonic() < deadline and hits < 400:
        number = draw.randrange(12)
        if draw.random() < 0.4:
            if (record := store.acquire_record()) is not None:
                if draw.random() < 0.3:
                    store.drop(key(number))
                fresh = version.get(number, 0) + 1
                record.payload[:] = pattern(number, fresh)
                if store.put(key(number), fresh, record) is PutResult.STORED:
                    version[number] = fresh
                    stored += 1
        else:
            ticket = store.begin_read(key(number))
            if isinstance(ticket, ReadTicket):
                waiting[ticket] = (number, version[number])
        for ticket in store.poll().reads:
            number, at = waiting.pop(ticket)
            assert ticket.ok, ticket.miss_reason
            assert (ticket.record.payload == pattern(number, at)).all(), "a dirty read"
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
    assert (
        stats.buffers_free == stats.buffers_total
        and stats.slabs_used == stats.entries
        and not stats.misses.keys()
        - {
            "absent",
            "no_buffer",
        }
    )
    store.close()
