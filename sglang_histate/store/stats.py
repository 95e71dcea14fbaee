"""Counters by kind of record, and what is made of them for a status. Numbers only: nothing here decides anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from .disk import FilePlace
from .kinds import RecordKind
from .layout import RecordLayout
from .overdue import Overdue
from .reasons import DropReason, MissReason, PutResult
from .records import RecordPool
from .roots import Roots, RootStats
from .slabs import SlabPool
from .timings import Timings


@dataclass(frozen=True)
class WriteStats:
    """The limits on writes and what of them is used, at the last time that the ranks agreed on. None: no limit."""

    bytes_per_s: int | None
    burst_bytes: int | None
    bytes_now: int | None  # could be written at once
    bytes_per_day: int | None
    bytes_today: int  # admitted in this UTC day, also by an older run
    price: float  # 0: everything is written; towards 1: only what is worth most
    wait_s: float  # that one more write is expected to wait


@dataclass
class PurgeStats:
    """Purges since open. Those that were asked for and are not done are still in the writer's queue.

    All but `asked` may differ by rank.
    """

    asked: int = 0
    done: int = 0
    failed: int = 0  # done, but the disk refused to let some records go
    erased: int = 0  # records on the disk, also those that the index did not have any more


@dataclass(frozen=True)
class KindStats:
    """One kind's part of the file and of the counters. Totals count since open."""

    entries: int
    slabs_used: int
    bytes_used: int  # whole slabs
    content_bytes: int  # what lies in these slabs, without headers and padding
    reads_ok: int
    reads_shared: int
    bytes_written: int
    bytes_read: int
    puts: Mapping[PutResult, int]
    misses: Mapping[MissReason, int]
    drops: Mapping[DropReason, int]
    cancelled: Mapping[DropReason, int]  # writes that had no effect, by what became of the record meanwhile
    recovered: int  # left by an older run
    timings: Timings  # go on after this


@dataclass(frozen=True)
class StoreStats:
    """Totals count since open. `used` includes slabs whose write or last read is still in flight.

    Each total is over both kinds; `kinds` has the parts.
    """

    slab_bytes: int
    slabs_used: int
    slabs_total: int
    bytes_used: int
    bytes_total: int
    bytes_peak: int  # the most that were ever used at once
    file_bytes: int
    entries: int
    entries_writing: int
    buffers_free: int
    buffers_total: int
    writes_queued: int  # submitted, not committed
    reads_in_flight: int  # submitted, not committed
    breaker_open: bool  # of any root
    direct_io: bool  # in all roots
    files_lost: int  # roots whose file this rank would not find after a restart
    roots: tuple[RootStats, ...]
    reads_ok: int  # committed and handed over
    reads_shared: int  # of those that began: served from a record still being written
    bytes_written: int  # header and padding of each record included
    bytes_read: int
    puts: Mapping[PutResult, int]
    misses: Mapping[MissReason, int]
    drops: Mapping[DropReason, int]
    cancelled: Mapping[DropReason, int]
    writes: WriteStats
    purges: PurgeStats
    kinds: Mapping[RecordKind, KindStats]


@dataclass
class KindCounters:
    """`entries`, `slabs` and `content_bytes` say what there is now, the others count since open."""

    entries: int = 0
    slabs: int = 0
    content_bytes: int = 0
    recovered: int = 0
    reads_ok: int = 0
    reads_shared: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    puts: Counter[PutResult] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)
    drops: Counter[DropReason] = field(default_factory=Counter)
    cancelled: Counter[DropReason] = field(default_factory=Counter)
    timings: Timings = field(default_factory=Timings)

    def snapshot(self, slab_bytes: int) -> KindStats:
        return KindStats(
            entries=self.entries,
            slabs_used=self.slabs,
            bytes_used=self.slabs * slab_bytes,
            content_bytes=self.content_bytes,
            reads_ok=self.reads_ok,
            reads_shared=self.reads_shared,
            bytes_written=self.bytes_written,
            bytes_read=self.bytes_read,
            puts=dict(self.puts),
            misses=dict(self.misses),
            drops=dict(self.drops),
            cancelled=dict(self.cancelled),
            recovered=self.recovered,
            timings=self.timings,
        )


def new_counters() -> dict[RecordKind, KindCounters]:
    return {kind: KindCounters() for kind in RecordKind}


def gather(
    layout: RecordLayout,
    roots: Roots,
    overdue: Overdue,
    slabs: SlabPool,
    records: RecordPool,
    counters: Mapping[RecordKind, KindCounters],
    *,
    entries: int,
    entries_writing: int,
    writes_queued: int,
    reads_in_flight: int,
    writes: WriteStats,
    purges: PurgeStats,
) -> StoreStats:
    both, used = total(counters), slabs.total - slabs.free
    each = tuple(root.stats(slabs.free_in(root.number), *overdue.stuck(root)) for root in roots)
    return StoreStats(
        slab_bytes=layout.slab_bytes,
        slabs_used=used,
        slabs_total=slabs.total,
        bytes_used=used * layout.slab_bytes,
        bytes_total=slabs.total * layout.slab_bytes,
        bytes_peak=slabs.peak * layout.slab_bytes,
        file_bytes=roots.striping.total_bytes,
        entries=entries,
        entries_writing=entries_writing,
        buffers_free=records.free,
        buffers_total=records.total,
        writes_queued=writes_queued,
        reads_in_flight=reads_in_flight,
        breaker_open=roots.ailing,
        direct_io=all(root.direct_io for root in each),
        files_lost=sum(root.file_place is not FilePlace.PRESENT for root in each),
        roots=each,
        reads_ok=both.reads_ok,
        reads_shared=both.reads_shared,
        bytes_written=both.bytes_written,
        bytes_read=both.bytes_read,
        puts=dict(both.puts),
        misses=dict(both.misses),
        drops=dict(both.drops),
        cancelled=dict(both.cancelled),
        writes=writes,
        purges=purges,
        kinds={kind: part.snapshot(layout.slab_bytes) for kind, part in counters.items()},
    )


def total(counters: Mapping[RecordKind, KindCounters]) -> KindCounters:
    """Return the sums over the kinds."""
    both = KindCounters()
    for part in counters.values():
        both.entries += part.entries
        both.slabs += part.slabs
        both.content_bytes += part.content_bytes
        both.recovered += part.recovered
        both.reads_ok += part.reads_ok
        both.reads_shared += part.reads_shared
        both.bytes_written += part.bytes_written
        both.bytes_read += part.bytes_read
        both.puts += part.puts
        both.misses += part.misses
        both.drops += part.drops
        both.cancelled += part.cancelled
    return both
