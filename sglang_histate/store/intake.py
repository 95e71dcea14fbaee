"""How a record comes in: the decision about a put, a slab, a generation, and the way to the writer.

Owns the generations of one run: each put that is taken gets the next one. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .breaker import Breaker
from .in_flight import InFlight
from .index import Entry
from .kinds import Key, RecordKind
from .layout import KEY_BYTES, NAMESPACE_BYTES, generation
from .occupancy import Occupancy
from .operations import WriteOperation
from .reasons import PutResult
from .records import Record, RecordPool
from .stats import KindCounters
from .writer import Writer


class Intake:
    def __init__(
        self,
        epoch: int,
        records: RecordPool,
        occupancy: Occupancy,
        in_flight: InFlight,
        breaker: Breaker,
        writer: Writer,
        counters: Mapping[RecordKind, KindCounters],
        clock: Callable[[], float],
    ) -> None:
        self._epoch = epoch
        self._records = records
        self._occupancy = occupancy
        self._writes = in_flight.writes
        self._breaker = breaker
        self._writer = writer
        self._counters = counters
        self._clock = clock
        self._taken = 0
        self.closed = False

    @property
    def newest(self) -> int:
        """Generation of the last record that was taken."""
        return generation(self._epoch, self._taken)

    def put(
        self,
        name: Key,
        at_token: int,
        record: Record,
        *,
        parent: bytes,
        page_keys: tuple[bytes, ...],
        namespace: bytes,
    ) -> PutResult:
        """See `CheckpointStore.put`."""
        assert len(name.hash) == KEY_BYTES, f"a key has {KEY_BYTES} bytes"
        assert len(namespace) == NAMESPACE_BYTES, f"a namespace has {NAMESPACE_BYTES} bytes"
        assert record.refs == 1, "only a record fresh from acquire_record can be put"
        result = self._admit(name)
        self._counters[name.kind].puts[result] += 1
        if result is not PutResult.STORED:
            self._records.release(record)
            return result
        slab = self._occupancy.slabs.acquire()
        assert slab is not None
        self._taken += 1
        entry = Entry(
            name.hash, name.kind, at_token, parent, page_keys, namespace, slab, self.newest, record=record
        )
        operation = WriteOperation(entry, record, captured_at_us=int(self._clock() * 1e6))
        self._writes.submit(operation)
        self._writer.submit(operation)
        self._occupancy.enter(entry)
        return result

    def _admit(self, name: Key) -> PutResult:
        """Decide about one put and make sure that a slab is free if the answer is STORED."""
        if self.closed:
            return PutResult.CLOSED
        if self._occupancy.index.get(name) is not None:
            self._occupancy.index.touch(name)
            return PutResult.ALREADY_STORED
        if not self._breaker.admits():
            return PutResult.BREAKER_OPEN
        return self._occupancy.make_room()
