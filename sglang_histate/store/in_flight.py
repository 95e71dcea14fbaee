"""Writes and reads of one store that are not committed, and what their agreed outcomes change.

Owns both queues. Everything here runs on the scheduler thread; an outcome is applied once all ranks have agreed
on it, so index, slabs and buffers change alike on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from .breaker import Breaker
from .events import EventLog
from .index import Entry, EntryState
from .kinds import RecordKind
from .layout import RecordLayout
from .occupancy import Occupancy
from .operations import ReadTicket, Uncommitted, WriteOperation, WriteOutcome
from .reasons import DropReason, MissReason
from .records import RecordPool
from .stats import KindCounters


class InFlight:
    def __init__(
        self,
        layout: RecordLayout,
        records: RecordPool,
        occupancy: Occupancy,
        breaker: Breaker,
        counters: Mapping[RecordKind, KindCounters],
        events: EventLog,
    ) -> None:
        self.writes: Uncommitted[WriteOperation] = Uncommitted()
        self.reads: Uncommitted[ReadTicket] = Uncommitted()
        self.layout = layout
        self._records = records
        self._occupancy = occupancy
        self._breaker = breaker
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
        entry = operation.entry
        entry.record = None
        self._records.release(operation.record)
        if operation.abandoned is not None:
            self._counters[entry.kind].cancelled[operation.abandoned.agreed] += 1
            self._occupancy.free_if_unused(entry)
            return WriteOutcome(entry.key, entry.kind, entry.at_token, operation.abandoned)
        if self._breaker.record(ok):
            self._events.warn(
                "breaker", "several writes in a row failed; the next ones are refused for a while"
            )
        if ok:
            entry.state = EntryState.LIVE
            self._counters[entry.kind].bytes_written += self._transfer_bytes(entry)
            return WriteOutcome(entry.key, entry.kind, entry.at_token, None)
        reason = operation.failure or DropReason.OTHER_RANK
        self._events.warn(
            "write", "a %s record could not be written (%s) and was dropped", entry.kind.value, reason.value
        )
        self.drop(entry, reason)
        return WriteOutcome(entry.key, entry.kind, entry.at_token, reason)

    def commit_read(self, ok: bool) -> ReadTicket:
        """Apply the outcome of the oldest read."""
        ticket = self.reads.take()
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
        if not ok and entry.state is not EntryState.GONE:
            self.drop(entry, DropReason.READ_FAILED)
        else:
            self._occupancy.free_if_unused(entry)
        ticket.ok = ticket.miss_reason is None and not ticket.cancelled
        if ticket.ok:
            count.reads_ok += 1
            count.bytes_read += 0 if ticket.shared else self._transfer_bytes(entry)
        else:
            if ticket.miss_reason is not None:
                count.misses[ticket.miss_reason] += 1
            self.release(ticket)
        return ticket

    def _transfer_bytes(self, entry: Entry) -> int:
        return self.layout.transfer_bytes(entry.kind, entry.n_pages)
