"""The SSD tier of one rank: checkpoints and KV extents by key, in fixed slabs of one file per root.

Owns the record buffers and all that is in flight. Does not decide what is captured, what a record means, nor
(given `choose_victim`) which one must go.

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

    store.put_extent(...)                    the same for record.kv_pages; then kind=RecordKind.KV in the other calls

A key is a page hash. Checkpoints and extents have separate key spaces; a call without `kind` means checkpoints.

What an older run left is taken over, see `open`. Open it after the process has forked its children: a child
would hold the lock and could not use the buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .admission import Admission, WriteLimits
from .clearing import Clearing
from .closing import CLOSE_DEADLINE_S, end_threads, shut
from .disk import Disk
from .events import EventLog
from .in_flight import InFlight
from .index import Entry
from .intake import Intake
from .kinds import Key, RecordKind
from .layout import NO_NAMESPACE, NO_PARENT, Fingerprint, RecordLayout
from .occupancy import ChooseVictim, Occupancy, OnGone, OnPresent
from .opening import Agree, AgreeEpoch, Opened, Place, RecoveryRules, open_files
from .operations import Committed, Deliver, ReadTicket
from .readout import Readout
from .reasons import DropReason, MissReason, PutResult
from .records import Record, RecordPool
from .roots import BreakerRules, Roots
from .snapshot import SnapshotFile
from .stats import StoreStats, gather, new_counters
from .striping import Striping
from .usage import Usage


class CheckpointStore:
    """See the module docstring. Built by `open`; one thread calls it, nothing blocks but `close`."""

    def __init__(
        self,
        *,
        opened: Opened,
        striping: Striping,
        fingerprint: Fingerprint,
        records: RecordPool,
        reader_threads: int,
        breakers: BreakerRules,
        admission: Admission,
        clock: Callable[[], float],
        choose_victim: ChooseVictim | None,
        on_present: OnPresent | None,
        on_gone: OnGone | None,
    ) -> None:
        self.layout = layout = striping.layout
        self.fingerprint = fingerprint
        self.records = records
        self.recovery = opened.report
        self.written_before = opened.written
        self._usage = Usage(opened, fingerprint, admission.budget)
        self.admission = admission
        events = self._events = EventLog()
        roots = self._roots = Roots.start(
            opened.files, striping, fingerprint, reader_threads, breakers, events
        )
        counters = self._counters = new_counters()
        self._occupancy = Occupancy(
            layout, roots, counters, events,
            choose_victim=choose_victim, on_present=on_present, on_gone=on_gone,
        )  # fmt: skip
        self._index = self._occupancy.index
        self._in_flight = InFlight(layout, records, self._occupancy, roots, counters, events)
        self._writes = self._in_flight.writes
        self._reads = self._in_flight.reads
        self._closed = False
        self._intake = Intake(
            opened.epoch, records, self._occupancy, self._in_flight, roots, admission, layout, counters, clock
        )
        self._readout = Readout(records, self._occupancy, self._in_flight, roots, counters)
        self._clearing = Clearing(self._index, self._in_flight, self._intake, roots)
        self._occupancy.recover(opened.recovered)
        if opened.recovered:
            self.snapshot()  # the one of the epoch before does not count any more

    @classmethod
    def open(
        cls,
        *,
        roots: Sequence[Path],
        fingerprint: Mapping[str, Any],
        rank_name: str,
        size_bytes: int,
        layout: RecordLayout,
        record_buffers: int,
        reader_threads: int = 4,
        keep: bool = True,
        agree: Agree | None = None,
        agree_epoch: AgreeEpoch | None = None,
        keep_unrestorable: bool = False,
        allow_any_filesystem: bool = False,
        disks: Sequence[Disk] = (),
        snapshots: SnapshotFile | None = None,
        clock: Callable[[], float] = time.time,
        breakers: BreakerRules | None = None,
        write_limits: WriteLimits | None = None,
        choose_victim: ChooseVictim | None = None,
        on_present: OnPresent | None = None,
        on_gone: OnGone | None = None,
    ) -> CheckpointStore:
        """Create or take over `<root>/<fingerprint>/<rank_name>/slabs.dat` in each root: `size_bytes` in all at most.

        `fingerprint` holds every fact that must match before bytes may be used again (JSON types only). Slabs
        go to the `roots` in turn; `breakers` says when a root is left alone. `disks` replace the files in tests,
        then the roots are not touched; `snapshots` the one beside the first. `clock` only stamps headers.

        `keep` takes over what an older run left, as far as it is sound, not cleared and restorable (a
        checkpoint with all KV before it, KV that such a checkpoint needs; `keep_unrestorable` keeps the
        rest). Payloads are verified by each read, not here. Without `keep` the store begins empty, and what
        was there does not come back either. Entries are LIVE, in the order of their last use, and announced
        by `on_present`, oldest first, before this returns: the store cannot be asked yet. `recovery` says
        what was found; `written_before`, which may differ by rank, is for `write_limits` (see `tick`).

        Several ranks need the same index: each rank's `agree(found)` is called once, also without `keep`,
        with what this rank has, and returns what all ranks have, in one order for all (say, that of the first
        rank). `agree_epoch(number)` is called once before it and returns the largest number of all ranks:
        without it a rank whose file was lost would never again write what the others recognise.

        The other three run inside calls of the scheduler thread. They may look things up and must not change
        the store. `choose_victim()` names the record that makes room when no slab is free: it must be
        `replaceable` and the same on every rank; None refuses the put. Without it the least recently used
        record of both kinds goes. `on_present(key, kind)` hears of each record that enters the index (at
        put or open), `on_gone(key, kind, reason)` of each that leaves it, with a reason that is the same on
        every rank.

        Raises:
            StoreError: the directory or the size cannot be used; the text names the flag and the way out.
            ValueError: no record buffer.
        """
        identity = Fingerprint.of(fingerprint, layout)
        records = RecordPool(layout, record_buffers)
        striping = Striping.of(layout, size_bytes, len(disks or roots))
        place = Place(roots, rank_name, size_bytes, allow_any_filesystem, disks, snapshots)
        rules = RecoveryRules(keep, agree, agree_epoch, keep_unrestorable)
        return cls(
            opened=open_files(place, striping, identity, records, rules),
            striping=striping,
            fingerprint=identity,
            records=records,
            reader_threads=reader_threads,
            breakers=breakers or BreakerRules(),
            admission=Admission(write_limits or WriteLimits(), layout),
            clock=clock,
            choose_victim=choose_victim,
            on_present=on_present,
            on_gone=on_gone,
        )

    def lookup(self, key: bytes, kind: RecordKind = RecordKind.CHECKPOINT) -> Entry | None:
        """Return the entry of `key`; None also while its root cannot be read. Changes nothing but a counter."""
        return self._readout.lookup(Key(key, kind))

    def find(self, key: bytes, kind: RecordKind = RecordKind.CHECKPOINT) -> Entry | None:
        """Return the entry of `key`, also while its root cannot be read. Changes nothing."""
        return self._index.get(Key(key, kind))

    def entries(self) -> Iterator[Entry]:
        """Yield all entries, least recently used first. The index must not change meanwhile."""
        return iter(self._index)

    def replaceable(self, name: Key) -> bool:
        """Say whether `choose_victim` may answer `name`: it is there, neither being written nor read."""
        return self._occupancy.replaceable(name)

    def touch(self, key: bytes, kind: RecordKind = RecordKind.CHECKPOINT) -> None:
        """Make `key` the most recently used one, if it is there."""
        if self._index.get(Key(key, kind)) is not None:
            self._index.touch(Key(key, kind))

    def acquire_record(self) -> Record | None:
        """Return a record to fill, or None when all are in use. Hand it to `put` or to `release_record`."""
        return None if self._closed else self.records.acquire()

    def claim_record(
        self, key: bytes, value: float | None, *, kind: RecordKind = RecordKind.CHECKPOINT, n_pages: int = 0
    ) -> Record | PutResult:
        """Return a record for `key` for which the write limits have given the bytes, or why it would be refused.

        `value`: tokens of recomputation that it saves per byte, None for any price. A claim in vain counts as a put.
        """
        return self._intake.claim(Key(key, kind), n_pages, value)

    def release_record(self, record: Record) -> None:
        """Give back a record that was not put."""
        self._intake.release(record)

    def put(self, key: bytes, at_token: int, record: Record, *, namespace: bytes = NO_NAMESPACE) -> PutResult:
        """Store the checkpoint in `record` under `key`. The record is the store's now, whatever the result.

        `namespace` (16 bytes) says who may use it: it is kept with the record and never looked at here. A
        record that nothing uses gives up its slab if none is free. A record that was not claimed is worth its
        `value`. Puts that the breaker refuses count towards its end.
        """
        return self._intake.put(Key(key), at_token, record, NO_PARENT, (), namespace)

    def put_extent(
        self,
        page_keys: tuple[bytes, ...],
        at_token: int,
        record: Record,
        *,
        parent: bytes,
        namespace: bytes = NO_NAMESPACE,
    ) -> PutResult:
        """Store the first pages of `record.kv_pages`, as many as `page_keys` names, like `put`.

        `page_keys` are the hashes of 1 to `layout.pages_per_extent` consecutive pages; the last one is the key
        and `at_token` its end. `parent` is the hash of the page before the first one, NO_PARENT at the start
        of a sequence. An extent with this key that is there already stays as it is, also if it has fewer
        pages: see `lookup`, and `drop` it first where that matters.
        """
        assert page_keys, "an extent has at least one page"
        return self._intake.put(
            Key(page_keys[-1], RecordKind.KV), at_token, record, parent, tuple(page_keys), namespace
        )

    def begin_read(
        self, key: bytes, deliver: Deliver | None = None, *, kind: RecordKind = RecordKind.CHECKPOINT
    ) -> ReadTicket | MissReason:
        """Start reading `key`, and touch it. The entry keeps its slab until the read is committed.

        `deliver(record, parts)` runs on a reader thread, for one run of parts after the other, once their bytes
        are verified and before the read counts as completed: segments of `layout.segment_bytes` or pages of
        `record.kv_pages`. If it raises, the read is a miss, and a miss may come after some parts were delivered. It
        must not call the store. Of an extent, `n_pages` of `record.kv_pages` are valid, see `lookup`.
        """
        return self._readout.begin(Key(key, kind), deliver)

    def lend(self, key: bytes, at_token: int, record: Record, deliver: Deliver) -> ReadTicket:
        """Hand a checkpoint that is not put to `deliver` on a reader thread, as a read of it would."""
        return self._readout.lend(Key(key), at_token, record, deliver)

    def cancel_read(self, ticket: ReadTicket) -> None:
        """Give up on a read. Its buffer comes back when the read is committed, or now if it was."""
        if ticket.ok is None:
            ticket.cancelled = True
        else:
            self.release(ticket)

    def release(self, ticket: ReadTicket) -> None:
        """The caller is done with `ticket.record`. Harmless for a read that failed or was released before."""
        assert ticket.ok is not None, "not committed yet: use cancel_read"
        self._in_flight.release(ticket)

    def drop(
        self,
        key: bytes,
        reason: DropReason = DropReason.REMOVED,
        *,
        kind: RecordKind = RecordKind.CHECKPOINT,
    ) -> bool:
        """Take `key` out of the index; return whether it was there. Reads and writes in flight end as usual."""
        entry = self._index.get(Key(key, kind))
        if entry is not None:
            self._in_flight.drop(entry, reason)
        return entry is not None

    def clear(self, reason: DropReason = DropReason.CLEARED) -> None:
        """Drop every entry. Reads in flight will be misses; buffers and slabs in use come back at commit.

        They do not come back after a restart either, once the writer thread has written that down: it does so
        next, and before any record that is put from now on (see `block_zero.py`).
        """
        self._clearing.clear(reason)

    def purge(self, namespace: bytes | None) -> int:
        """Drop every entry of `namespace` (None: of all) and erase its records from the disk; return how many were
        in the index. The writer thread erases them next, also what an earlier run left: see `stats().purges`.
        """
        dropped = self._clearing.purge(namespace)
        self.snapshot()
        return dropped

    def quarantine(self) -> None:
        """Use and write nothing any more. What is on the disk stays, to be looked at: see `quarantine.py`."""
        self._intake.quarantined = self._readout.quarantined = True
        self.clear(DropReason.QUARANTINED)

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
        ended = list(islice(self._writes, len(write_ok)))
        writes = tuple(self._in_flight.commit_write(ok) for ok in write_ok)
        self.admission.committed(ended, queued=len(self._writes) > 0)
        reads = [self._in_flight.commit_read(ok) for ok in read_ok]
        return Committed(writes, tuple(read for read in reads if read is not None and not read.cancelled))

    def tick(self, now_s: float) -> None:
        """It is `now_s`, seconds since 1970: the same on every rank, never falling. Before the first one,
        `admission.budget.restore` takes what the ranks made of `written_before`.

        Without it nothing that hangs is given up, and a root that failed is tried again only after enough puts."""
        self.admission.tick(now_s)
        if not self._closed:
            self._roots.tick(now_s, self._reads.submit)
            self._in_flight.overdue.tick(now_s)

    @property
    def restless(self) -> bool:
        """Whether `tick` has something to do though nothing is outstanding: a root or a buffer may come back."""
        return self._roots.ailing or self._in_flight.overdue.holds

    def poll(self) -> Committed:
        """Commit all that has finished. For one rank only."""
        done = self.commit(*self.outcomes(*self.completed()))
        while read_ok := self._reads.flags(self._reads.finished_count()):  # answers to questions
            done = Committed(done.writes, done.reads + self.commit([], read_ok).reads)
        return done

    def snapshot(self) -> None:
        """Have the order of use written to `stats.snap`, so that it outlives a crash. Never waits.

        For a caller that comes by about once a minute; one that comes before the last one is written is ignored.
        """
        if not self._closed and self._usage.wanted:
            self._roots[0].writer.do(self._usage.taken(self._index, self._intake.newest))

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Let the writes that were submitted end, for `deadline_s` seconds at most, and leave the file in order.

        Writes that take longer are lost, and so are reads; later calls miss. Then the threads get another half
        second for what they have begun. What was written is there at the next `open`, with its order of use.
        """
        if self._closed:
            return
        self._closed = self._intake.closed = self._readout.closed = True
        usage = self._usage.taken(self._index, self._intake.newest)
        ended = end_threads(self._roots, deadline_s)
        for entry in list(self._index):
            self._in_flight.drop(entry, DropReason.CLOSED)
        shut(ended, usage, self._events)

    def logical_state(self) -> tuple[object, ...]:
        """Return all that must be equal on every rank after the same calls: entries by last use, free slabs, free
        buffers, counts of operations, the breaker and the write limits."""
        entries = tuple(entry.logical() for entry in self._index)
        counts = (*self._writes.counts, *self._reads.counts)
        slabs, free = self._occupancy.slabs.free_ids(), self.records.free_ids()
        return entries, slabs, free, counts, self._roots.logical_state(), self.admission.logical()

    @property
    def fill(self) -> float:  # see `SlabPool.fill`
        return self._occupancy.slabs.fill

    def stats(self) -> StoreStats:
        return gather(
            self.layout,
            self._roots,
            self._in_flight.overdue,
            self._occupancy.slabs,
            self.records,
            self._counters,
            entries=len(self._index),
            entries_writing=sum(write.abandoned is None for write in self._writes),
            writes_queued=len(self._writes),
            reads_in_flight=len(self._reads),
            writes=self.admission.stats(self._writes),
            purges=self._clearing.stats(),
        )
