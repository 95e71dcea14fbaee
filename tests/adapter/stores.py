"""A checkpoint store on a disk in memory, driven the way the scheduler thread drives it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from sglang_histate.adapter.ranking import Ranking
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.store import NO_NAMESPACE, CheckpointStore, PutResult, WriteLimits
from sglang_histate.store.roots import BreakerRules
from tests.store.fakes import FakeDisk


def open_store(
    layout: StateLayout,
    *,
    disk: Any = None,
    slabs: int = 64,
    buffers: int = 16,
    threads: int = 2,
    kv_page_bytes: int = 0,
    ranking: Ranking | None = None,
    limits: WriteLimits | None = None,
) -> CheckpointStore:
    record = layout.record_layout(kv_page_bytes)
    store = CheckpointStore.open(
        roots=[Path("unused")],
        fingerprint={"model": "test"},
        rank_name="tp0of1-pp0of1",
        size_bytes=4096 + slabs * record.slab_bytes,
        layout=record,
        record_buffers=buffers,
        reader_threads=threads,
        write_limits=limits,
        disks=[FakeDisk() if disk is None else disk],
        breakers=BreakerRules(
            read_failures=1000
        ),  # reads that fail are tried, not what comes after many of them
        **({} if ranking is None else ranking.store_hooks()),
    )
    if ranking is not None:
        ranking.connect(store)
    return store


def fake_disk(store: CheckpointStore) -> FakeDisk:
    disk = store._roots[0].disk
    assert isinstance(disk, FakeDisk)
    return disk


def put(
    store: CheckpointStore,
    layout: StateLayout,
    key: bytes,
    position: int,
    value: float,
    namespace: bytes = NO_NAMESPACE,
) -> None:
    """Store a checkpoint whose numbers are all `value`."""
    record = store.acquire_record()
    assert record is not None
    for views in layout.record_views(record.payload):
        for part, tensor in zip(
            views.temporal, layout.codec.encode(torch.full((1, *layout.temporal_shape), value)), strict=True
        ):
            part.copy_(tensor[0])
        views.conv.fill_(value)
    assert store.put(key, position, record, namespace=namespace) is PutResult.STORED


def wait_threads(store: CheckpointStore, timeout_s: float = 20.0) -> None:
    """Wait until the threads have nothing left to do, without committing anything."""
    committed = store._writes.committed_count, store._reads.committed_count
    wanted = committed[0] + len(store._writes), committed[1] + len(store._reads)
    deadline = time.monotonic() + timeout_s
    while store.completed() != wanted:
        assert time.monotonic() < deadline, "the threads did not finish"
        time.sleep(0.0005)
