"""Works on a real store at random until it is killed. `python -m tests.store.kill_child ROOT JOURNAL SEED`.

The journal has one line for each thing that the parent may rely on, written with one `write` call, which a
killed process cannot take back:

    ready EPOCH               the store is open; lines of an older run do not count any more
    = KIND NUMBER GENERATION  the record was found
    + KIND NUMBER GENERATION  the record is in its slab now
    - KIND NUMBER             it is not in the index any more; its slab may be overwritten
    cleared GENERATION        nothing up to this generation may come back
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np

from sglang_histate.store import (
    NO_PARENT,
    CheckpointStore,
    PutResult,
    ReadTicket,
    Record,
    RecordKind,
    RecordLayout,
    writer,
)
from sglang_histate.store.layout import epoch_of

LAYOUT = RecordLayout((30_000, 3000), kv_page_bytes=9000)  # three pages per extent
SLABS, NUMBERS = 12, 30


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def page_keys(number: int) -> tuple[bytes, ...]:
    return (
        *(key(1000 * number + 1000 + page) for page in range(number % LAYOUT.pages_per_extent)),
        key(number),
    )


def content(kind: RecordKind, number: int) -> np.ndarray:
    """Return the bytes of a record: ``[content_bytes]``. They follow from its name."""
    size = LAYOUT.content_bytes(kind, len(page_keys(number)))
    return np.random.default_rng([number, kind is RecordKind.KV]).integers(0, 256, size, dtype=np.uint8)


def bytes_of(kind: RecordKind, number: int, record: Record) -> np.ndarray:
    if kind is RecordKind.CHECKPOINT:
        return record.payload
    return record.kv_pages[: len(page_keys(number))].reshape(-1)


def open_store(root: Path, **changes) -> CheckpointStore:
    settings = dict(
        roots=[root],
        allow_any_filesystem=True,
        fingerprint={"model": "kill"},
        rank_name="tp0of1-pp0of1",
        size_bytes=4096 + SLABS * LAYOUT.slab_bytes,
        layout=LAYOUT,
        record_buffers=6,
        keep_unrestorable=True,
    )
    return CheckpointStore.open(**(settings | changes))


class Child:
    def __init__(self, root: Path, journal: Path, seed: int) -> None:
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._draw = random.Random(seed)
        self._store = open_store(root, on_gone=lambda hashed, kind, _: self._gone(hashed, kind))
        self._say(f"ready {epoch_of(self._store._intake.newest)}")
        for entry in self._store.entries():
            self._say(f"= {entry.kind} {int.from_bytes(entry.key, 'big')} {entry.generation}")
        self._reading: list[ReadTicket] = []

    def _say(self, line: str) -> None:
        os.write(self._journal, (line + "\n").encode())

    def _gone(self, hashed: bytes, kind: RecordKind) -> None:
        self._say(f"- {kind} {int.from_bytes(hashed, 'big')}")

    def step(self) -> None:
        draw, store = self._draw, self._store
        number, kind, action = draw.randrange(NUMBERS), draw.choice(list(RecordKind)), draw.random()
        if action < 0.5:
            self._put(kind, number)
        elif action < 0.8:
            ticket = store.begin_read(key(number), kind=kind)
            if isinstance(ticket, ReadTicket):
                self._reading.append(ticket)
        elif action < 0.85:
            store.drop(key(number), kind=kind)
        elif action < 0.9:
            store.snapshot()
        elif action < 0.905:
            self._clear()
        else:
            time.sleep(0.001)
        self._commit()

    def _put(self, kind: RecordKind, number: int) -> None:
        record = self._store.acquire_record()
        if record is None:
            return
        bytes_of(kind, number, record)[:] = content(kind, number)
        if kind is RecordKind.CHECKPOINT:
            result = self._store.put(key(number), number, record)
        else:
            result = self._store.put_extent(page_keys(number), number, record, parent=NO_PARENT)
        assert result in (PutResult.STORED, PutResult.ALREADY_STORED, PutResult.NO_SLAB), result

    def _clear(self) -> None:
        self._store.clear()
        newest, done = self._store._intake.newest, threading.Event()
        self._store._roots[0].writer.do(done.set)
        done.wait()
        self._say(f"cleared {newest}")

    def _commit(self) -> None:
        committed = self._store.poll()
        for write in committed.writes:
            entry = self._store.lookup(write.key, write.kind)
            if write.drop_reason is None and entry is not None:
                self._say(f"+ {write.kind} {int.from_bytes(write.key, 'big')} {entry.generation}")
        for ticket in committed.reads:
            number = int.from_bytes(ticket.key, "big")
            if ticket.ok:
                assert (bytes_of(ticket.kind, number, ticket.record) == content(ticket.kind, number)).all()
            self._store.release(ticket)


if __name__ == "__main__":
    writer.PIECE_BYTES = 4096  # many moments at which a record is half written
    child = Child(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    while True:
        child.step()
