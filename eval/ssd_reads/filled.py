"""A store with records of Qwen3.5-9B's size on a real file, written and opened again as a server would do it.

Checkpoints have `layers` segments of 2 MiB (fp32 state) + 48 KiB (window); extents are as many KV pages of 2 MiB as fit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.store import (
    NO_PARENT,
    CheckpointStore,
    Entry,
    Fingerprint,
    PutResult,
    Record,
    RecordKind,
    RecordLayout,
    WriteLimits,
)
from sglang_histate.store.opening import slab_file

KV_PAGE_BYTES = 2 << 20
PAGE_TOKENS = 64
BUFFERS = 20  # what --histate-inflight-size of 1 GiB holds of these records
READER_THREADS = 4  # default of --histate-read-threads
QUEUE_AGE_S = 2.0  # default of --histate-write-queue-age
SPARE_SLABS = 16  # for what is written while others are read
RANK = "tp0of1-pp0of1"


@dataclass(frozen=True)
class Sizes:
    layers: int
    records: int  # of each kind

    @property
    def layout(self) -> RecordLayout:
        states = StateLayout(
            tuple(range(self.layers)), (32, 128, 128), torch.float32, (8192, 3), torch.bfloat16
        )
        return states.record_layout(KV_PAGE_BYTES)

    @property
    def identity(self) -> dict[str, str]:
        return {"model": "ssd_bench read"}

    @property
    def file_bytes(self) -> int:
        return self.layout.file_bytes(2 * self.records + SPARE_SLABS)

    def path(self, folder: Path) -> Path:
        """Return where the slab file lies."""
        return slab_file(folder, Fingerprint.of(self.identity, self.layout), RANK)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def finite_bytes(size_bytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return bytes that no disk can compress and that are finite as fp32 and as bf16."""
    words = np.random.default_rng(seed).integers(1 << 16, size=-(-size_bytes // 2), dtype=np.uint16)
    words &= 0xBFFF  # the exponent's first bit, of either type: only without it nothing is infinite
    return words.view(np.uint8)[:size_bytes]


def filled(folder: Path, sizes: Sizes, write_rate: int) -> CheckpointStore:
    """Write `records` checkpoints and as many extents to a new file, then open it as the next run would."""
    store = opened(folder, sizes, None)
    content = finite_bytes(2 * sizes.layout.payload_bytes, seed=1)
    number = 0
    for kind in RecordKind:
        for _ in range(sizes.records):
            number += 1
            write(store, number, kind, content[4096 * number :])
    while store.outstanding:
        store.poll()
        time.sleep(0.001)
    store.close(60.0)
    return opened(folder, sizes, write_rate)


def opened(folder: Path, sizes: Sizes, write_rate: int | None) -> CheckpointStore:
    return CheckpointStore.open(
        roots=[folder],
        fingerprint=sizes.identity,
        rank_name=RANK,
        size_bytes=sizes.file_bytes,
        layout=sizes.layout,
        record_buffers=BUFFERS,
        reader_threads=READER_THREADS,
        keep_unrestorable=True,
        write_limits=WriteLimits(write_rate, queue_age_s=QUEUE_AGE_S if write_rate else None),
    )


def write(store: CheckpointStore, number: int, kind: RecordKind, content: npt.NDArray[np.uint8]) -> None:
    """Put a record with these bytes, once a buffer is free."""
    while store.records.free_for_writes == 0:
        store.poll()
        time.sleep(0.001)
    record = store.acquire_record()
    assert record is not None
    record.payload[:] = content[: len(record.payload)]
    if kind is RecordKind.CHECKPOINT:
        result = store.put(key(number), PAGE_TOKENS * number, record)
    else:
        pages = store.layout.pages_per_extent
        names = tuple(key((number << 32) + page) for page in range(pages))
        result = store.put_extent(names, PAGE_TOKENS * pages, record, parent=NO_PARENT)
    assert result is PutResult.STORED, result


def in_file_order(store: CheckpointStore, kind: RecordKind) -> list[Entry]:
    """Return the entries of one kind as they lie in the file."""
    return sorted((entry for entry in store.entries() if entry.kind is kind), key=lambda entry: entry.slab)


def content_of(record: Record, entry: Entry) -> npt.NDArray[np.uint8]:
    """Return what a restore copies: the state, or the pages one after the other."""
    if entry.kind is RecordKind.CHECKPOINT:
        return record.payload
    return record.kv_pages[: entry.n_pages].reshape(-1)
