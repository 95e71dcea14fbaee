"""Reader threads of one root: fetch a slab into a record and decide whether it is what was asked for.

Owns the threads and the check. Changes nothing but the bytes of the ticket's record and the ticket's outcome.
`ReadGate` tells the writer of the root that a read is waiting for the disk.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time

from .blocks import SlabHeader
from .disk import Disk
from .index import Entry
from .kinds import RecordKind
from .layout import PAGE_BYTES, Fingerprint, RecordLayout, sums
from .operations import Probe, ReadTicket
from .reasons import MissReason
from .records import Record
from .striping import Striping
from .tasks import Task

_log = logging.getLogger("sglang_histate.store")


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
    """`threads` threads that serve tickets in submission order (they may finish in another order)."""

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
        self._queue: queue.SimpleQueue[ReadTicket | Probe | None] = queue.SimpleQueue()
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
        self._queue.put(ticket)

    def forget(self, ticket: Task[MissReason]) -> None:
        """It was given up: the writer does not wait for it any more."""
        if isinstance(ticket, ReadTicket):
            self._gate.leave(ticket)

    def stop(self) -> None:
        """Let running reads end and skip the others; do not wait for them."""
        self._stopping = True
        for _ in self._threads:
            self._queue.put(None)

    def join(self, deadline_s: float) -> bool:
        """Wait until `time.monotonic()` reaches `deadline_s`; return whether all threads have ended."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            self.progress += 1
            if not ticket.begin():
                continue
            failure = self._outcome(ticket)
            self.forget(ticket)
            self.progress += 1
            ticket.finish(failure)

    def _outcome(self, ticket: ReadTicket | Probe) -> MissReason | None:
        try:
            if self._stopping:
                return MissReason.CLOSED
            return self._probe() if isinstance(ticket, Probe) else self._serve(ticket)
        except OSError as error:
            _log.debug("%s failed: %s", ticket, error)
            return MissReason.IO_ERROR
        except Exception:
            # A thread that dies here would stop the commits of all ranks. The miss is harmless, the log
            # is loud.
            _log.exception("defect in the reader")
            return MissReason.INTERNAL

    def _serve(self, ticket: ReadTicket) -> MissReason | None:
        if ticket.cancelled or ticket.cleared:
            # Nobody will look at the record. Not a failure: other ranks may have read it before the cancel.
            return None
        record = ticket.record
        if record is None:
            return MissReason.TIMED_OUT  # it was given up before it began
        failure = self._unfit(ticket, record) if ticket.shared else self._read(ticket, record)
        if failure is None and ticket.deliver is not None:
            with ticket.sealed() as allowed:
                if not allowed:
                    return MissReason.TIMED_OUT  # what it delivers to may belong to somebody else by now
                ticket.deliver(record)
        return failure

    def _unfit(self, ticket: ReadTicket, record: Record) -> MissReason | None:
        """Bytes in memory may not have been written yet, so the writer may not have looked at them."""
        fit = self._layout.may_store(ticket.entry.kind, record.payload)
        return None if fit else MissReason.NOT_FINITE

    def _read(self, ticket: ReadTicket, record: Record) -> MissReason | None:
        entry, layout = ticket.entry, self._layout
        wanted = layout.transfer_bytes(entry.kind, entry.n_pages)
        # One call per record: the block layer splits it and keeps many commands in flight.
        count = self._disk.read_at([record.image[:wanted]], self._striping.offset(entry.slab))
        if count != wanted:
            return MissReason.SHORT_READ
        header = SlabHeader.parse(record.header.tobytes())
        if header is None:
            return MissReason.CORRUPT_HEADER
        if header.fingerprint_half != self._fingerprint_half:
            return MissReason.WRONG_FINGERPRINT
        reason = mismatch(header, entry, layout)
        if reason is not None:
            return reason
        parts = layout.part_bytes(entry.kind, entry.n_pages)
        if sums(record.image[layout.header_bytes :], parts) == header.part_sums:
            return None
        return MissReason.CORRUPT_PAGE if entry.kind is RecordKind.KV else MissReason.CORRUPT_SEGMENT

    def _probe(self) -> MissReason | None:
        """Read block 0; if that fails, see whether the disk can be brought back and read it again."""
        try:
            if self._disk.read_at([self._page], 0) == PAGE_BYTES:
                return None
        except OSError:
            pass
        self._disk.revive()
        return None if self._disk.read_at([self._page], 0) == PAGE_BYTES else MissReason.SHORT_READ


def mismatch(header: SlabHeader, entry: Entry, layout: RecordLayout) -> MissReason | None:
    """Return why a sound header is not the one of `entry`, or None if it is."""
    if header.generation != entry.generation:
        return MissReason.WRONG_GENERATION
    if header.kind is not entry.kind:
        return MissReason.WRONG_KIND
    if (header.key, header.parent, header.at_token) != (entry.key, entry.parent, entry.at_token):
        return MissReason.WRONG_KEY
    if (header.page_keys, header.namespace) != (entry.page_keys, entry.namespace):
        return MissReason.WRONG_KEY
    n_parts = len(layout.part_bytes(entry.kind, entry.n_pages))
    content_bytes = layout.content_bytes(entry.kind, entry.n_pages)
    if (len(header.part_sums), header.content_bytes) != (n_parts, content_bytes):
        return MissReason.WRONG_LENGTH
    return None
