"""Counters and the snapshot of them. Numbers only: nothing here decides anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from .reasons import DropReason, MissReason, PutResult


@dataclass(frozen=True)
class StoreStats:
    """Totals count since open. `used` includes slabs whose write or last read is still in flight."""

    slab_bytes: int
    slabs_used: int
    slabs_total: int
    bytes_used: int
    bytes_total: int
    file_bytes: int
    entries: int
    entries_writing: int
    buffers_free: int
    buffers_total: int
    writes_queued: int  # submitted, not committed
    reads_in_flight: int  # submitted, not committed
    breaker_open: bool
    direct_io: bool
    reads_ok: int  # committed and handed over
    reads_shared: int  # of those that began: served from a record still being written
    bytes_written: int  # slabs, header and padding included
    bytes_read: int
    puts: Mapping[PutResult, int]
    misses: Mapping[MissReason, int]
    drops: Mapping[DropReason, int]


@dataclass
class Counters:
    reads_ok: int = 0
    reads_shared: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    puts: Counter[PutResult] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)
    drops: Counter[DropReason] = field(default_factory=Counter)
