"""The SSD tier of one rank: checkpoints by key, in one file of fixed slabs.

Owns the index, the slabs and the record buffers. Does not decide what is captured, nor what a checkpoint
means.

Every rank has its own store and all ranks make the same calls in the same order on their scheduler threads.
What a caller can see or influence (index, order of use, slabs, buffers) changes only inside these calls;
threads merely note how an operation ended. A caller with several ranks takes the minimum of `completed()`
over the ranks, the logical AND of `outcomes()`, and hands the same lists to `commit()` everywhere. With one
rank `poll()` does all three.

    record = store.acquire_record()          fill record.payload
    store.put(key, at_token, record)         visible at once; the record is the store's now
    ticket = store.begin_read(key)           a ReadTicket or a MissReason; nothing blocks
    store.poll()                             ticket.ok is True or False now
    store.release(ticket)                    after use of ticket.record.payload

The store begins empty each time it is opened. Open it after the process has forked its children: a child
would hold the lock and could not use the buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .breaker import Breaker
from .disk import Disk
from .events import EventLog
from .index import Entry, EntryState, Index
from .layout import KEY_BYTES, Fingerprint, RecordLayout, generation
from .opening import open_disk, start_epoch
from .operations import Committed, Deliver, ReadTicket, Uncommitted, WriteOperation, WriteOutcome
from .reader import Reader, ReadGate
from .reasons import DropReason, MissReason, PutResult
from .records import Record, RecordPool
from .slabs import SlabPool
from .stats import Counters, StoreStats
from .writer import Writer

CLOSE_TIMEOUT_S = 2.0
OnDrop = Callable[[Entry, DropReason], None]


class CheckpointStore:
    """See the module docstring. Built by `open`; one thread calls it, nothing blocks but `close`."""

    def __init__(
        self,
        *,
        disk: Disk,
        layout: RecordLayout,
        fingerprint: Fingerprint,
        records: RecordPool,
        slab_count: int,
        epoch: int,
        reader_threads: int,
        breaker: Breaker,
        clock: Callable[[], float],
        on_drop: OnDrop | None,
    ) -> None:
        self.layout = layout
        self.fingerprint = fingerprint
        self.records = records
        self._disk = disk
        self._epoch = epoch
        self._clock = clock
        self._on_drop = on_drop
        self._breaker = breaker
        self._slabs = SlabPool(slab_count)
        self._index = Index()
        self._writes: Uncommitted[WriteOperation] = Uncommitted()
        self._reads: Uncommitted[ReadTicket] = Uncommitted()
        self._writes_submitted = 0
        self._counters = Counters()
        self._events = EventLog()
        self._closed = False
        gate = ReadGate()
        self._reader = Reader(disk, layout, fingerprint, gate, reader_threads)
        self._writer = Writer(disk, layout, fingerprint, gate)

    @classmethod
    def open(
        cls,
        *,
        root: Path,
        fingerprint: Mapping[str, Any],
        rank_name: str,
        size_bytes: int,
        layout: RecordLayout,
        record_buffers: int,
        reader_threads: int = 4,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
        breaker_failures: int = 3,
        breaker_refused_puts: int = 64,
        on_drop: OnDrop | None = None,
    ) -> CheckpointStore:
        """Create or take over `<root>/<fingerprint>/<rank_name>/slabs.dat` with at most `size_bytes`.

        `fingerprint` holds every fact that must match before bytes may be used again (JSON types only).
        `disk` replaces the file in tests; then `root` is not touched. `clock` only stamps headers. `on_drop`
        hears of every entry that leaves the index, on the calling thread; it must not call the store.

        Raises:
            StoreError: the directory or the size cannot be used; the text names the flag and the way out.
            ValueError: no record buffer.
        """
        identity = Fingerprint.of(fingerprint, layout)
        records = RecordPool(layout, record_buffers)
        slab_count = layout.slab_count(size_bytes)
        if disk is None:
            disk, epoch = open_disk(root, rank_name, size_bytes, layout, identity, records)
        else:
            disk.preallocate(layout.file_bytes(slab_count))
            epoch = start_epoch(disk, layout, slab_count, identity, records)
        return cls(
            disk=disk,
            layout=layout,
            fingerprint=identity,
            records=records,
            slab_count=slab_count,
            epoch=epoch,
            reader_threads=reader_threads,
            breaker=Breaker(breaker_failures, breaker_refused_puts),
            clock=clock,
            on_drop=on_drop,
        )

    def lookup(self, key: bytes) -> Entry | None:
        """Return the entry of `key`, without any effect."""
        return self._index.get(key)

    def touch(self, key: bytes) -> None:
        """Make `key` the most recently used one, if it is there."""
        if self._index.get(key) is not None:
            self._index.touch(key)

    def acquire_record(self) -> Record | None:
        """Return a record to fill, or None when all are in use. Hand it to `put` or to `release_record`."""
        return None if self._closed else self.records.acquire()

    def release_record(self, record: Record) -> None:
        """Give back a record that was not put."""
        self.records.release(record)

    def put(self, key: bytes, at_token: int, record: Record) -> PutResult:
        """Store `record` under `key`. It is the store's from here on, whatever the result.

        The least recently used entry gives up its slab if none is free; entries in use are never taken.
        Puts that the breaker refuses count towards its end.
        """
        assert len(key) == KEY_BYTES, f"a key has {KEY_BYTES} bytes"
        assert record.refs == 1, "only a record fresh from acquire_record can be put"
        result = self._admit(key)
        self._counters.puts[result] += 1
        if result is not PutResult.STORED:
            self.records.release(record)
            return result
        slab = self._slabs.acquire()
        assert slab is not None
        self._writes_submitted += 1
        entry = Entry(key, at_token, slab, generation(self._epoch, self._writes_submitted), record=record)
        self._index.insert(entry)
        operation = WriteOperation(entry, record, captured_at_us=int(self._clock() * 1e6))
        self._writes.submit(operation)
        self._writer.submit(operation)
        return result

    def begin_read(self, key: bytes, deliver: Deliver | None = None) -> ReadTicket | MissReason:
        """Start reading `key`, and touch it. The entry keeps its slab until the read is committed.

        `deliver(record)` runs on a reader thread once the bytes are verified and before the read counts as
        completed; if it raises, the read is a miss. It must not call the store.
        """
        entry = self._index.get(key)
        if self._closed:
            return self._miss(MissReason.CLOSED)
        if entry is None:
            return self._miss(MissReason.ABSENT)
        shared = entry.record is not None
        record = self.records.share(entry.record) if entry.record is not None else self.records.acquire()
        if record is None:
            return self._miss(MissReason.NO_BUFFER)
        entry.pins += 1
        self._index.touch(key)
        ticket = ReadTicket(key, entry.at_token, record, shared, entry=entry, deliver=deliver)
        self._reads.submit(ticket)
        self._counters.reads_shared += shared
        if shared and deliver is None:
            ticket.finish(None)
        else:
            self._reader.submit(ticket)
        return ticket

    def cancel_read(self, ticket: ReadTicket) -> None:
        """Give up on a read. Its buffer comes back when the read is committed, or now if it was."""
        if ticket.ok is None:
            ticket.cancelled = True
        else:
            self.release(ticket)

    def release(self, ticket: ReadTicket) -> None:
        """The caller is done with `ticket.record`. Harmless for a read that failed or was released before."""
        assert ticket.ok is not None, "not committed yet: use cancel_read"
        if ticket.record is not None:
            self.records.release(ticket.record)
            ticket.record = None

    def remove(self, key: bytes) -> bool:
        """Take `key` out of the index, if it is there. Reads and writes in flight end as usual."""
        entry = self._index.get(key)
        if entry is not None:
            self._drop(entry, DropReason.REMOVED)
        return entry is not None

    def clear(self) -> None:
        """Drop every entry. Reads in flight will be misses; buffers and slabs in use come back at commit."""
        for entry in list(self._index):
            self._drop(entry, DropReason.CLEARED)
        for ticket in self._reads:
            ticket.cleared = True

    @property
    def outstanding(self) -> int:
        """How many writes and reads were submitted and not committed: the same on every rank."""
        return len(self._writes) + len(self._reads)

    def completed(self) -> tuple[int, int]:
        """Return how many writes and reads since open have finished here: prefixes, in submission order."""
        return self._writes.finished_count(), self._reads.finished_count()

    def outcomes(self, n_writes: int, n_reads: int) -> tuple[list[bool], list[bool]]:
        """Return which of the uncommitted writes and reads up to these counts succeeded here."""
        return self._writes.flags(n_writes), self._reads.flags(n_reads)

    def commit(self, write_ok: Sequence[bool], read_ok: Sequence[bool]) -> Committed:
        """Apply agreed outcomes to the oldest uncommitted writes and reads, in order."""
        writes = tuple(self._commit_write(ok) for ok in write_ok)
        reads = [self._commit_read(ok) for ok in read_ok]
        return Committed(writes, tuple(ticket for ticket in reads if not ticket.cancelled))

    def poll(self) -> Committed:
        """Commit all that has finished. For one rank only."""
        return self.commit(*self.outcomes(*self.completed()))

    def close(self) -> None:
        """Stop the threads (2 s at most), sync and unlock. Writes not yet done are lost; later calls miss."""
        if self._closed:
            return
        self._closed = True
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        self._writer.stop()
        self._reader.stop()
        ended = self._writer.join(deadline_s) and self._reader.join(deadline_s)
        for entry in list(self._index):
            self._drop(entry, DropReason.CLOSED)
        if not ended:
            self._events.warn(
                "close", "a read or write did not end in time; the slab file stays open until exit"
            )
            return
        try:
            self._disk.sync()
        except OSError as error:
            self._events.warn("sync", "the slab file could not be synced: %s", error)
        self._disk.close()

    def logical_state(self) -> tuple[object, ...]:
        """Return all that must be equal on every rank after the same calls.

        Entries by last use, free slabs, free buffers, counts of operations, and whether the breaker is open.
        """
        entries = tuple((e.key, e.at_token, e.state.value, e.slab, e.pins) for e in self._index)
        counts = (
            self._writes.committed_count,
            len(self._writes),
            self._reads.committed_count,
            len(self._reads),
        )
        return entries, self._slabs.free_ids(), self.records.free_ids(), counts, self._breaker.is_open

    def stats(self) -> StoreStats:
        layout, slabs, counters = self.layout, self._slabs, self._counters
        return StoreStats(
            slab_bytes=layout.slab_bytes,
            slabs_used=slabs.total - slabs.free,
            slabs_total=slabs.total,
            bytes_used=(slabs.total - slabs.free) * layout.slab_bytes,
            bytes_total=slabs.total * layout.slab_bytes,
            file_bytes=layout.file_bytes(slabs.total),
            entries=len(self._index),
            entries_writing=sum(write.abandoned is None for write in self._writes),
            buffers_free=self.records.free,
            buffers_total=self.records.total,
            writes_queued=len(self._writes),
            reads_in_flight=len(self._reads),
            breaker_open=self._breaker.is_open,
            direct_io=self._disk.direct,
            reads_ok=counters.reads_ok,
            reads_shared=counters.reads_shared,
            bytes_written=counters.bytes_written,
            bytes_read=counters.bytes_read,
            puts=dict(counters.puts),
            misses=dict(counters.misses),
            drops=dict(counters.drops),
        )

    def _admit(self, key: bytes) -> PutResult:
        """Decide about one put and make sure that a slab is free if the answer is STORED."""
        if self._closed:
            return PutResult.CLOSED
        if self._index.get(key) is not None:
            self._index.touch(key)
            return PutResult.ALREADY_STORED
        if not self._breaker.admits():
            return PutResult.BREAKER_OPEN
        if self._slabs.free == 0:
            victim = self._index.victim()
            if victim is None:
                return PutResult.NO_SLAB
            self._drop(victim, DropReason.EVICTED)
        return PutResult.STORED

    def _commit_write(self, ok: bool) -> WriteOutcome:
        operation = self._writes.take()
        entry = operation.entry
        entry.record = None
        self.records.release(operation.record)
        if operation.abandoned is not None:
            self._free_if_unused(entry)
            return WriteOutcome(entry.key, entry.at_token, operation.abandoned)
        if self._breaker.record(ok):
            self._events.warn(
                "breaker", "several writes in a row failed; the next ones are refused for a while"
            )
        if ok:
            entry.state = EntryState.LIVE
            self._counters.bytes_written += self.layout.slab_bytes
            return WriteOutcome(entry.key, entry.at_token, None)
        reason = operation.failure or DropReason.OTHER_RANK
        self._events.warn("write", "a checkpoint could not be written (%s) and was dropped", reason.value)
        self._drop(entry, reason)
        return WriteOutcome(entry.key, entry.at_token, reason)

    def _commit_read(self, ok: bool) -> ReadTicket:
        ticket = self._reads.take()
        entry = ticket.entry
        entry.pins -= 1
        if not ok:
            ticket.miss_reason = ticket.failure or MissReason.OTHER_RANK
            self._events.warn(
                "read", "a checkpoint could not be read (%s) and was dropped", ticket.miss_reason.value
            )
        elif ticket.cleared:
            ticket.miss_reason = MissReason.CLEARED
        if not ok and entry.state is not EntryState.GONE:
            self._drop(entry, DropReason.READ_FAILED)
        else:
            self._free_if_unused(entry)
        ticket.ok = ticket.miss_reason is None and not ticket.cancelled
        if ticket.ok:
            self._counters.reads_ok += 1
            self._counters.bytes_read += 0 if ticket.shared else self.layout.slab_bytes
        else:
            if ticket.miss_reason is not None:
                self._counters.misses[ticket.miss_reason] += 1
            self.release(ticket)
        return ticket

    def _drop(self, entry: Entry, reason: DropReason) -> None:
        self._index.remove(entry)
        self._counters.drops[reason] += 1
        if entry.record is not None:
            write = next(write for write in self._writes if write.entry is entry)
            write.abandoned = reason
        self._free_if_unused(entry)
        if self._on_drop is not None:
            self._on_drop(entry, reason)

    def _free_if_unused(self, entry: Entry) -> None:
        if entry.state is EntryState.GONE and not entry.in_use:
            self._slabs.release(entry.slab)

    def _miss(self, reason: MissReason) -> MissReason:
        self._counters.misses[reason] += 1
        return reason
