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
from .reasons import MissReason
from .records import Record, RecordPool
from .roots import Roots
from .stats import KindCounters


class Readout:
    def __init__(
        self,
        records: RecordPool,
        occupancy: Occupancy,
        in_flight: InFlight,
        roots: Roots,
        counters: Mapping[RecordKind, KindCounters],
    ) -> None:
        self._records = records
        self._occupancy = occupancy
        self._reads = in_flight.reads
        self._roots = roots
        self._counters = counters
        self.closed = False
        self.quarantined = False

    def begin(self, name: Key, deliver: Deliver | None) -> ReadTicket | MissReason:
        """See `CheckpointStore.begin_read`."""
        found = self._begin(name, deliver)
        if isinstance(found, MissReason):
            self._counters[name.kind].misses[found] += 1
        return found

    def lookup(self, name: Key) -> Entry | None:
        """See `CheckpointStore.lookup`."""
        entry = self._occupancy.index.get(name)
        if entry is not None and entry.record is None:
            root = self._roots.of(entry.slab)
            if not root.readable:
                root.hidden_lookups += 1
                return None
        return entry

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
        return self._submit(entry, at_token, record, deliver, shared=True)

    def _begin(self, name: Key, deliver: Deliver | None) -> ReadTicket | MissReason:
        if self.closed or self.quarantined:
            return MissReason.CLOSED if self.closed else MissReason.QUARANTINED
        entry = self._occupancy.index.get(name)
        if entry is None:
            return MissReason.ABSENT
        shared = entry.record is not None
        if not shared and not self._roots.of(entry.slab).readable:
            return MissReason.ROOT_DOWN
        record = self._records.share(entry.record) if entry.record is not None else self._records.acquire()
        if record is None:
            return MissReason.NO_BUFFER
        self._occupancy.index.touch(name)
        return self._submit(entry, entry.at_token, record, deliver, shared=shared)

    def _submit(
        self, entry: Entry, at_token: int, record: Record, deliver: Deliver | None, *, shared: bool
    ) -> ReadTicket:
        # What needs no disk does not wait for one either.
        root = self._roots.in_service() if shared else self._roots.of(entry.slab)
        ticket = ReadTicket(entry.key, at_token, record, shared, root.number, entry=entry, deliver=deliver)
        entry.pins += 1
        self._reads.submit(ticket)
        self._counters[entry.kind].reads_shared += shared
        if shared and deliver is None:
            ticket.finish(None)
        else:
            root.reader.submit(ticket)
        return ticket
