"""Writes and reads of one store that are not committed, and what their agreed outcomes change.

Owns both queues. Everything here runs on the scheduler thread; an outcome is applied once all ranks have agreed
on it, so index, slabs, buffers and breakers change alike on every rank. After a failure on any rank a thread may
still hang there: then buffer and slab come back later, see `overdue.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from .events import EventLog
from .index import Entry, EntryState
from .kinds import RecordKind
from .layout import RecordLayout
from .occupancy import Occupancy
from .operations import Question, ReadTicket, Uncommitted, WriteOperation, WriteOutcome
from .overdue import Overdue
from .reasons import DropReason, MissReason
from .records import Record, RecordPool
from .roots import Roots
from .stats import KindCounters


class InFlight:
    def __init__(
        self,
        layout: RecordLayout,
        records: RecordPool,
        occupancy: Occupancy,
        roots: Roots,
        counters: Mapping[RecordKind, KindCounters],
        events: EventLog,
    ) -> None:
        self.writes: Uncommitted[WriteOperation] = Uncommitted()
        self.reads: Uncommitted[ReadTicket | Question] = Uncommitted()
        self.overdue = Overdue(roots, self.writes, self.reads, events)
        self.layout = layout
        self._records = records
        self._occupancy = occupancy
        self._roots = roots
        self._counters = counters
        self._events = events

    def drop(self, entry: Entry, reason: DropReason) -> None:
        """Take `entry` out of the index. If it is being written, that write has no effect any more."""
        if entry.record is not None:
            write = next(write for write in self.writes if write.entry is entry)
            write.abandoned = reason
        self._occupancy.drop(entry, reason)

    def release(self, ticket: ReadTicket) -> None:
        """Give back the buffer of a read, if it has one still."""
        if ticket.record is not None:
            self._records.release(ticket.record)
            ticket.record = None

    def commit_write(self, ok: bool) -> WriteOutcome:
        """Apply the outcome of the oldest write."""
        operation = self.writes.take()
        self._counters[operation.entry.kind].timings.add_write(operation)
        entry, root = operation.entry, self._roots.of(operation.entry.slab)
        reason: DropReason | None
        if operation.abandoned is not None:
            reason = operation.abandoned
            self._counters[entry.kind].cancelled[reason.agreed] += 1
            if operation.is_try:
                root.writes.forget_try()
        else:
            reason = None if ok else operation.failure or DropReason.OTHER_RANK
            root.wrote(ok, reason, was_try=operation.is_try)
        if ok:
            self._let_go(entry, operation.record)
        if reason is None:
            entry.state = EntryState.LIVE
            self._counters[entry.kind].bytes_written += self._transfer_bytes(entry)
        elif operation.abandoned is None:
            self._events.warn(
                "write",
                "a %s record could not be written (%s) and was dropped",
                entry.kind.value,
                reason.value,
            )
            self._occupancy.drop(entry, reason)
        if not ok:
            self.overdue.hold(operation, root, lambda: self._let_go(entry, operation.record))
        return WriteOutcome(entry.key, entry.kind, entry.at_token, reason)

    def commit_read(self, ok: bool) -> ReadTicket | None:
        """Apply the outcome of the oldest read, or the answer to a question; return the read."""
        ticket = self.reads.take()
        if not isinstance(ticket, ReadTicket):
            ticket.answered(ok)
            return None
        entry = ticket.entry
        count = self._counters[entry.kind]
        entry.pins -= 1
        if ticket.cleared:
            ticket.miss_reason = MissReason.CLEARED  # also if it failed: it may have been erased meanwhile
        elif not ok:
            ticket.miss_reason = ticket.failure or MissReason.OTHER_RANK
            self._events.warn(
                "read",
                "a %s record could not be read (%s) and was dropped",
                entry.kind.value,
                ticket.miss_reason.value,
            )
        if not ticket.shared:
            count.timings.add_read(ticket)
        if not (ticket.shared or ticket.cancelled or ticket.cleared):
            self._roots[ticket.root].read(ok, ticket.miss_reason)
        if not ok and entry.state is not EntryState.GONE:
            self.drop(entry, DropReason.READ_FAILED)
        else:
            self._occupancy.free_if_unused(entry)
        ticket.ok = ticket.miss_reason is None and not ticket.cancelled
        if ticket.ok:
            count.reads_ok += 1
            count.bytes_read += 0 if ticket.shared else self._transfer_bytes(entry)
            return ticket
        if ticket.miss_reason is not None:
            count.misses[ticket.miss_reason] += 1
        record, ticket.record = ticket.record, None
        if record is not None and ok:
            self._records.release(record)
        elif record is not None:
            self.overdue.hold(ticket, self._roots[ticket.root], lambda: self._records.release(record))
        return ticket

    def _let_go(self, entry: Entry, record: Record) -> None:
        """No thread writes `record` to the slab of `entry` any more."""
        entry.record = None
        self._records.release(record)
        self._occupancy.free_if_unused(entry)

    def _transfer_bytes(self, entry: Entry) -> int:
        return self.layout.transfer_bytes(entry.kind, entry.n_pages)
