"""How a record goes out: from its slab, from the buffer that is being written, or from one that is not stored at all.

Owns nothing: reads in flight are in `in_flight.py`. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Mapping

from .in_flight import InFlight
from .index import Entry, EntryState
from .kinds import Key, RecordKind
from .layout import NO_NAMESPACE, NO_PARENT
from .occupancy import NO_SLAB, Occupancy
from .operations import Deliver, ReadTicket
from .reader import Reader
from .reasons import MissReason
from .records import Record, RecordPool
from .stats import KindCounters


class Readout:
    def __init__(
        self,
        records: RecordPool,
        occupancy: Occupancy,
        in_flight: InFlight,
        reader: Reader,
        counters: Mapping[RecordKind, KindCounters],
    ) -> None:
        self._records = records
        self._occupancy = occupancy
        self._reads = in_flight.reads
        self._reader = reader
        self._counters = counters
        self.closed = False
        self.quarantined = False

    def begin(self, name: Key, deliver: Deliver | None) -> ReadTicket | MissReason:
        """See `CheckpointStore.begin_read`."""
        found = self._begin(name, deliver)
        if isinstance(found, MissReason):
            self._counters[name.kind].misses[found] += 1
        return found

    def lend(self, name: Key, at_token: int, record: Record, deliver: Deliver) -> ReadTicket:
        """See `CheckpointStore.lend`."""
        entry = Entry(
            name.hash,
            name.kind,
            at_token,
            NO_PARENT,
            (),
            NO_NAMESPACE,
            NO_SLAB,
            generation=0,
            state=EntryState.GONE,
        )
        return self._submit(ReadTicket(name.hash, at_token, record, True, entry=entry, deliver=deliver))

    def _begin(self, name: Key, deliver: Deliver | None) -> ReadTicket | MissReason:
        if self.closed or self.quarantined:
            return MissReason.CLOSED if self.closed else MissReason.QUARANTINED
        entry = self._occupancy.index.get(name)
        if entry is None:
            return MissReason.ABSENT
        shared = entry.record is not None
        record = self._records.share(entry.record) if entry.record is not None else self._records.acquire()
        if record is None:
            return MissReason.NO_BUFFER
        self._occupancy.index.touch(name)
        return self._submit(
            ReadTicket(name.hash, entry.at_token, record, shared, entry=entry, deliver=deliver)
        )

    def _submit(self, ticket: ReadTicket) -> ReadTicket:
        ticket.entry.pins += 1
        self._reads.submit(ticket)
        self._counters[ticket.entry.kind].reads_shared += ticket.shared
        if ticket.shared and ticket.deliver is None:
            ticket.finish(None)
        else:
            self._reader.submit(ticket)
        return ticket
