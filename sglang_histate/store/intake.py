"""How a record comes in: the decision about a put, a slab, a generation, and the way to the writer.

Owns the generations of one run: each put that is taken gets the next one. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .admission import Admission
from .in_flight import InFlight
from .index import Entry
from .kinds import Key, RecordKind
from .layout import KEY_BYTES, NAMESPACE_BYTES, RecordLayout, generation
from .occupancy import Occupancy
from .operations import WriteOperation
from .reasons import DropReason, PutResult
from .records import Record, RecordPool
from .roots import Roots
from .stats import KindCounters


class Intake:
    def __init__(
        self,
        epoch: int,
        records: RecordPool,
        occupancy: Occupancy,
        in_flight: InFlight,
        roots: Roots,
        admission: Admission,
        layout: RecordLayout,
        counters: Mapping[RecordKind, KindCounters],
        clock: Callable[[], float],
    ) -> None:
        self._epoch = epoch
        self._records = records
        self._occupancy = occupancy
        self._in_flight = in_flight
        self._writes = in_flight.writes
        self._roots = roots
        self._admission = admission
        self._layout = layout
        self._counters = counters
        self._clock = clock
        self._taken = 0
        self.closed = False
        self.quarantined = False

    @property
    def newest(self) -> int:
        """Generation of the last record that was taken."""
        return generation(self._epoch, self._taken)

    def claim(self, name: Key, n_pages: int, value: float | None) -> Record | PutResult:
        """See `CheckpointStore.claim_record`."""
        found = self._claim(name, n_pages, value)
        if isinstance(found, PutResult):
            self._counters[name.kind].puts[found] += 1
        return found

    def release(self, record: Record) -> None:
        """Give back a record that was not put, and the bytes it might have cost."""
        if record.claim is not None:
            self._admission.give_back(record.claim)
            record.claim = None
        self._records.release(record)

    def put(
        self,
        name: Key,
        at_token: int,
        record: Record,
        parent: bytes,
        page_keys: tuple[bytes, ...],
        namespace: bytes,
    ) -> PutResult:
        """See `CheckpointStore.put`."""
        assert all(len(key) == KEY_BYTES for key in (name.hash, parent, *page_keys)), (
            f"a page hash has {KEY_BYTES} bytes"
        )
        assert len(page_keys) <= self._layout.pages_per_extent, (
            f"{len(page_keys)} pages do not fit into a slab"
        )
        assert len(namespace) == NAMESPACE_BYTES, f"a namespace has {NAMESPACE_BYTES} bytes"
        assert record.refs == 1, "only a record fresh from acquire_record can be put"
        result = self._admit(name, len(page_keys), record)
        self._counters[name.kind].puts[result] += 1
        if result is not PutResult.STORED:
            self.release(record)
            return result
        slab = self._occupancy.take_slab()
        root = self._roots.of(slab)
        self._taken += 1
        entry = Entry(
            name.hash, name.kind, at_token, parent, page_keys, namespace, slab, self.newest, record=record
        )
        claim, record.claim = record.claim, None
        operation = WriteOperation(
            entry, record, captured_at_us=int(self._clock() * 1e6), value=claim.value if claim else None
        )
        self._admission.submitted(operation, queued=len(self._writes) > 0)
        operation.is_try = root.writes.begin()
        self._writes.submit(operation)
        root.writer.submit(operation)
        self._occupancy.enter(entry)
        return result

    def _claim(self, name: Key, n_pages: int, value: float | None) -> Record | PutResult:
        if self.closed or self.quarantined:
            return PutResult.CLOSED if self.closed else PutResult.QUARANTINED
        if not self._roots.writable():
            self._roots.put()  # as a put would; one that was claimed before is asked again
            return PutResult.BREAKER_OPEN
        if self._admission.crowded_out(self._writes, value) is PutResult.QUEUE_AGE:
            return PutResult.QUEUE_AGE
        if not self._records.free_for_writes:
            return PutResult.NO_BUFFER
        claim = self._admission.claim(name, self._layout.transfer_bytes(name.kind, n_pages), value)
        if isinstance(claim, PutResult):
            return claim
        record = self._records.acquire()
        assert record is not None
        record.claim = claim
        return record

    def _admit(self, name: Key, n_pages: int, record: Record) -> PutResult:
        """Decide about one put and make sure that a slab is free if the answer is STORED."""
        if self.closed or self.quarantined:
            return PutResult.CLOSED if self.closed else PutResult.QUARANTINED
        entry = self._occupancy.index.get(name)
        if entry is not None and (entry.record is not None or self._roots.of(entry.slab).readable):
            self._occupancy.index.touch(name)
            return PutResult.ALREADY_STORED
        is_open = not self._roots.writable()
        self._roots.put()
        if is_open:
            return PutResult.BREAKER_OPEN
        size_bytes = self._layout.transfer_bytes(name.kind, n_pages)
        if record.claim is None:
            claim = self._admission.claim(name, size_bytes, record.value)
            if isinstance(claim, PutResult):
                return claim
            record.claim = claim
        assert record.claim.size_bytes == size_bytes, "another record was claimed"
        crowded = self._admission.crowded_out(self._writes, record.claim.value)
        if isinstance(crowded, PutResult):
            return crowded
        if entry is not None:
            self._in_flight.drop(entry, DropReason.ROOT_DOWN)
        room = self._occupancy.make_room()
        if room is PutResult.STORED and crowded is not None:
            self._in_flight.drop(crowded.entry, DropReason.QUEUE_AGE)
        return room
