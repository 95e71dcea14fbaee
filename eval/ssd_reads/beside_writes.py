"""How long a restore takes while the store writes nothing, while it writes at its budget, and in a burst.

Reads come at times that do not depend on how long they take; each counts from the moment at which it should have begun.
The budget's clock stands still while nothing is written, so that no burst adds up meanwhile; in a burst it is
always full.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sglang_histate.store import CheckpointStore, Entry, PutResult, Record

from .filled import PAGE_TOKENS, SPARE_SLABS, finite_bytes, key
from .restore import POLL_S, HostSlots

SLOTS = 8
_FIRST_WRITTEN = 1 << 64


class Writing(StrEnum):
    NOTHING = "nothing"
    BUDGET = "budget"
    BURST = "burst"


@dataclass(frozen=True)
class Window:
    seconds: float
    bytes_written: int
    latencies_s: tuple[float, ...]

    @property
    def written_mib_per_s(self) -> float:
        return self.bytes_written / self.seconds / (1 << 20)


class BesideWrites:
    """Windows of reads of `entries` in an order that is random and always the same."""

    def __init__(
        self, store: CheckpointStore, entries: Sequence[Entry], reads_per_s: float, seconds: float
    ) -> None:
        self._store = store
        self._entries = entries
        self._reads_per_s = reads_per_s
        self._seconds = seconds
        self._slots = HostSlots(SLOTS, store.layout.room_bytes)
        self._random = random.Random(1)
        self._clock_s = 0.0
        self._written: deque[bytes] = deque()
        self._number = _FIRST_WRITTEN
        self._fill_buffers()

    def window(self, writing: Writing) -> Window:
        store, total = self._store, round(self._reads_per_s * self._seconds)
        due = deque((i + self._random.random()) / self._reads_per_s for i in range(total))
        latencies: list[float] = []
        running: dict[int, float] = {}
        written = store.stats().bytes_written
        self._forget_burst()
        start_s = last_s = time.perf_counter()
        while due or running:
            now_s = time.perf_counter()
            if writing is not Writing.NOTHING:
                self._clock_s += now_s - last_s
                self._write(unlimited=writing is Writing.BURST)
            last_s = now_s
            while due and now_s - start_s >= due[0] and store.records.free:
                entry = self._random.choice(self._entries)
                ticket = self._slots.begin(store, entry, (total - len(due)) % SLOTS)
                running[id(ticket)] = start_s + due.popleft()
            for ticket in store.poll().reads:
                assert ticket.ok, ticket
                latencies.append(time.perf_counter() - running.pop(id(ticket)))
                store.release(ticket)
            time.sleep(POLL_S)
        seconds = time.perf_counter() - start_s
        written = store.stats().bytes_written - written
        self._drain()
        return Window(seconds, written, tuple(latencies))

    def _write(self, unlimited: bool = False) -> None:
        """Put what the budget gives, or as much as the writer takes. The bytes are those that a read or write left in the buffer: a copy would hold up
        this thread, and in a server the GPU makes it."""
        store = self._store
        store.tick(self._clock_s)
        bucket = store.admission.budget.bucket
        while store.records.free_for_writes > SLOTS // 2:
            if unlimited and bucket is not None:
                bucket.level = bucket.burst
            name = key(self._number)
            record = store.claim_record(name, None)
            if isinstance(record, PutResult):
                return
            if len(self._written) >= SPARE_SLABS - 1:
                store.drop(self._written.popleft())
            assert store.put(name, PAGE_TOKENS, record) is PutResult.STORED
            self._written.append(name)
            self._number += 1

    def _forget_burst(self) -> None:
        """Leave the budget what one record takes, so that what is given from now on is the rate."""
        bucket = self._store.admission.budget.bucket
        if bucket is not None:
            bucket.level = min(bucket.level, self._store.layout.slab_bytes)

    def _drain(self) -> None:
        while self._store.outstanding:
            self._store.poll()
            time.sleep(POLL_S)

    def _fill_buffers(self) -> None:
        """Only finite states are written, so every buffer gets one."""
        content = finite_bytes(self._store.layout.payload_bytes, seed=2)
        records: list[Record] = []
        while (record := self._store.acquire_record()) is not None:
            record.payload[:] = content
            records.append(record)
        for record in records:
            self._store.release_record(record)
