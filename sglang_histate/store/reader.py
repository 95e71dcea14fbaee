"""Reader threads of one root: fetch the pieces of a slab into a record, have them verified, say what it came to.

Owns the threads. Changes nothing but the bytes of the ticket's record and the ticket's outcome; what is verified, and when
a read is over, is decided in `reading.py`. `ReadGate` tells the writer of the root that a read is waiting for the disk.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time

from .disk import Disk
from .layout import PAGE_BYTES, Fingerprint
from .operations import Probe, ReadTicket
from .reading import Reading, attempt, deliver
from .reasons import MissReason
from .striping import Striping
from .tasks import Task

PIECE_BYTES = 4 << 20
"""Large enough that two of them keep a drive busy, small enough that they are verified while others are read."""

LEAST_PIECE_BYTES = 1 << 20
"""The last pieces of a record shrink to this: no other is left to be read while the last one is verified."""

PIECES_AT_ONCE = 2
"""Of one record. A drive serves what it has in turn, so four pieces land together, and then all have yet to be verified."""


class ReadGate:
    """Reads that are queued or running, so that writes can step aside."""

    def __init__(self) -> None:
        self._reads: set[ReadTicket] = set()
        self._changed = threading.Condition()

    def enter(self, ticket: ReadTicket) -> None:
        with self._changed:
            self._reads.add(ticket)

    def leave(self, ticket: ReadTicket) -> None:
        """May be called twice."""
        with self._changed:
            self._reads.discard(ticket)
            if not self._reads:
                self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> None:
        """Return when no read is in flight, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reads, timeout_s)


class Reader:
    """`threads` threads; reads begin in the order of submission and may end in another."""

    def __init__(
        self, disk: Disk, striping: Striping, fingerprint: Fingerprint, gate: ReadGate, threads: int
    ) -> None:
        self.progress = 0
        """Changes whenever a thread begins or ends something."""
        self._disk = disk
        self._layout = striping.layout
        self._striping = striping
        self._fingerprint_half = fingerprint.digest[:16]
        self._gate = gate
        self._queue: queue.SimpleQueue[Reading | ReadTicket | Probe | None] = queue.SimpleQueue()
        self._page = memoryview(mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"histate-read-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, ticket: ReadTicket | Probe) -> None:
        if isinstance(ticket, ReadTicket):
            self._gate.enter(ticket)
            if not ticket.shared:
                self._submit_pieces(ticket)
                return
        self._queue.put(ticket)

    def forget(self, ticket: Task[MissReason]) -> None:
        """It was given up: the writer does not wait for it any more."""
        if isinstance(ticket, ReadTicket):
            self._gate.leave(ticket)

    def stop(self) -> None:
        """Let the pieces that are being read end and skip the others; do not wait for them."""
        self._stopping = True
        for _ in self._threads:
            self._queue.put(None)

    def join(self, deadline_s: float) -> bool:
        """Wait until `time.monotonic()` reaches `deadline_s`; return whether all threads have ended."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _submit_pieces(self, ticket: ReadTicket) -> None:
        reading = Reading(ticket, self._layout, self._fingerprint_half, PIECE_BYTES, LEAST_PIECE_BYTES)
        for _ in range(min(PIECES_AT_ONCE, reading.pieces)):
            self._queue.put(reading)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self.progress += 1
            if isinstance(item, Reading):
                while self._serve(item):
                    pass
            elif item.begin():
                failure = attempt(self._probe) if isinstance(item, Probe) else attempt(self._lend, item)
                self.forget(item)
                self.progress += 1
                item.finish(failure)

    def _serve(self, reading: Reading) -> bool:
        """Fetch the next piece of a record, and verify what can be; return whether there was one."""
        ticket = reading.ticket
        if not ticket.begin():
            return False
        piece = reading.take()
        if piece is None:
            ticket.leave()
            return False
        over = reading.landed(piece, attempt(self._fetch, reading, piece))
        self.progress += 1
        if over:
            self.forget(ticket)
            ticket.finish(reading.failure)
        else:
            ticket.leave()
        return not over

    def _fetch(self, reading: Reading, piece: int) -> MissReason | None:
        if self._stopping:
            return MissReason.CLOSED
        if reading.unwanted:
            # Nobody will look at the record. Not a failure: other ranks may have read it before the cancel.
            return None
        start, end = reading.span(piece)
        offset = self._striping.offset(reading.ticket.entry.slab) + start
        count = self._disk.read_at([reading.record.image[start:end]], offset)
        return None if count == end - start else MissReason.SHORT_READ

    def _lend(self, ticket: ReadTicket) -> MissReason | None:
        """Bytes in memory may not have been written yet, so the writer may not have looked at them."""
        if self._stopping:
            return MissReason.CLOSED
        if ticket.cancelled or ticket.cleared:
            return None
        record, layout = ticket.record, self._layout
        if record is None:
            return MissReason.TIMED_OUT  # it was given up before it began
        if not record.sound or not layout.may_store(ticket.kind, record.payload):
            return MissReason.NOT_FINITE
        return deliver(ticket, record, range(len(layout.part_bytes(ticket.kind, ticket.n_pages))))

    def _probe(self) -> MissReason | None:
        """Read block 0; if that fails, see whether the disk can be brought back and read it again."""
        if self._stopping:
            return MissReason.CLOSED
        try:
            if self._disk.read_at([self._page], 0) == PAGE_BYTES:
                return None
        except OSError:
            pass
        self._disk.revive()
        return None if self._disk.read_at([self._page], 0) == PAGE_BYTES else MissReason.SHORT_READ
