from __future__ import annotations

import time
from pathlib import Path

import pytest

from sglang_histate.store import CheckpointStore, RecordLayout

LAYOUT = RecordLayout((5000, 300, 4096))  # header 4096, payload 9396, slab 16384
SLAB = LAYOUT.slab_bytes


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def open_store(root: Path = Path("unused"), *, slabs: int = 4, **changes) -> CheckpointStore:
    settings = dict(
        root=root,
        fingerprint={"model": "test"},
        rank_name="tp0of1-pp0of1",
        size_bytes=4096 + slabs * SLAB,
        layout=LAYOUT,
        record_buffers=4,
    )
    return CheckpointStore.open(**(settings | changes))


def wait_finished(store: CheckpointStore, timeout_s: float = 10.0) -> None:
    """Wait until the threads are idle, without committing anything."""
    deadline = time.monotonic() + timeout_s
    stats = store.stats()
    committed = store.logical_state()[3]
    wanted = (committed[0] + stats.writes_queued, committed[2] + stats.reads_in_flight)
    while store.completed() != wanted:
        assert time.monotonic() < deadline, "the threads did not finish"
        time.sleep(0.0002)


def settle(store: CheckpointStore):
    wait_finished(store)
    return store.poll()


def put(store: CheckpointStore, number: int, fill: int | None = None):
    record = store.acquire_record()
    assert record is not None
    record.payload[:] = number % 251 if fill is None else fill
    return store.put(key(number), 64 * number, record)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ssd"
