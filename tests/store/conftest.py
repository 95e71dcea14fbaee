from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from sglang_histate.store import NO_PARENT, CheckpointStore, RecordLayout

from .fakes import FakeDisk

# header 4096, payload 9396, slab 16384; 4 KV pages per extent, not aligned to anything
LAYOUT = RecordLayout((5000, 300, 4096), kv_page_bytes=3000)
SLAB = LAYOUT.slab_bytes


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


def open_store(root: Path = Path("unused"), *, slabs: int = 4, **changes) -> CheckpointStore:
    if "disk" in changes:
        changes["disks"] = [changes.pop("disk")]
    settings = dict(
        roots=[root],
        fingerprint={"model": "test"},
        rank_name="tp0of1-pp0of1",
        size_bytes=4096 * len(changes.get("disks") or changes.get("roots") or [root]) + slabs * SLAB,
        layout=LAYOUT,
        record_buffers=4,
        allow_any_filesystem=True,  # wherever the temporary directories of this machine lie
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


def chores_done(store: CheckpointStore) -> None:
    """Wait until the writer thread has done all that it was given."""
    done = threading.Event()
    store._roots[0].writer.do(done.set)
    assert done.wait(10)


def put(store: CheckpointStore, number: int, fill: int | None = None):
    record = store.acquire_record()
    assert record is not None
    record.payload[:] = number % 251 if fill is None else fill
    return store.put(key(number), 64 * number, record)


def put_extent(
    store: CheckpointStore, number: int, n_pages: int = 4, fill: int | None = None, parent: bytes = NO_PARENT
):
    """Store an extent whose page i is filled with `fill` + i."""
    record = store.acquire_record()
    assert record is not None
    fill_extent(record, n_pages, number if fill is None else fill)
    return store.put_extent(page_keys(number, n_pages), 64 * number, record, parent=parent)


def page_keys(number: int, n_pages: int) -> tuple[bytes, ...]:
    """Names of the pages of the extent `key(number)`."""
    return (*(key(1000 * (number + 1) + page) for page in range(n_pages - 1)), key(number))


def fill_extent(record, n_pages: int, fill: int) -> None:
    for page in range(n_pages):
        record.kv_pages[page] = (fill + page) % 256


def is_extent(record, n_pages: int, fill: int) -> bool:
    return all((record.kv_pages[page] == (fill + page) % 256).all() for page in range(n_pages))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ssd"
