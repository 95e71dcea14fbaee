"""Writer thread of one root: put records into their slabs without getting in the way of reads.

Owns the thread and the header it writes. Changes nothing but the header bytes of the record and the outcome
of the operation. Header and payload lie next to each other and go out in pieces of 4 MiB; before each piece
the writer waits while a read is in flight, at most 50 ms, so that a read waits for one piece at most and
writes still make progress. No fsync: a write that did not survive is found by its checksums and is a miss.
Between records it does the chores of the store that would make the scheduler thread wait.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from .blocks import SlabHeader
from .disk import Disk
from .layout import Fingerprint, sums
from .operations import WriteOperation
from .reader import ReadGate
from .reasons import DropReason
from .striping import Striping

PIECE_BYTES = 4 << 20
YIELD_TO_READS_S = 0.05

Chore = Callable[[], None]

_log = logging.getLogger("sglang_histate.store")


class Writer:
    """One thread that writes in submission order. The queue is bounded by the number of record buffers.

    `settle` must succeed before a record may be written; it raises OSError.
    """

    def __init__(
        self, disk: Disk, striping: Striping, fingerprint: Fingerprint, gate: ReadGate, settle: Chore
    ) -> None:
        self.progress = 0
        """Changes whenever the thread begins or ends something."""
        self._disk = disk
        self._layout = striping.layout
        self._striping = striping
        self._fingerprint_half = fingerprint.digest[:16]
        self._gate = gate
        self._settle = settle
        self._queue: queue.SimpleQueue[WriteOperation | Chore | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="histate-write", daemon=True)
        self._thread.start()

    def submit(self, operation: WriteOperation) -> None:
        self._queue.put(operation)

    def do(self, chore: Chore) -> None:
        """Call `chore` after all that was submitted before. It may raise OSError, which is logged."""
        self._queue.put(chore)

    def finish(self) -> None:
        """End after all that was submitted; do not wait for it."""
        self._queue.put(None)

    def stop(self) -> None:
        """After `finish`: end after the piece that is being written and skip the rest; do not wait for it."""
        self._stopping = True

    def join(self, deadline_s: float) -> bool:
        """Wait until `time.monotonic()` reaches `deadline_s`; return whether the thread has ended."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self.progress += 1
            if not isinstance(item, WriteOperation):
                if not self._stopping:
                    self._do(item)
            elif item.begin():
                item.finish(self._outcome(item))

    def _outcome(self, operation: WriteOperation) -> DropReason | None:
        try:
            return None if operation.abandoned is not None else self._write(operation)
        except OSError as error:
            _log.debug("write of slab %d failed: %s", operation.entry.slab, error)
            return DropReason.WRITE_ERROR
        except Exception:
            # A thread that dies here would stop the commits of all ranks. The drop is harmless, the log is
            # loud.
            _log.exception("defect in the writer")
            return DropReason.INTERNAL

    def _do(self, chore: Chore) -> None:
        try:
            chore()
        except OSError as error:
            _log.warning("the SSD tier could not write down its state: %s", error)
        except Exception:
            _log.exception("defect in the writer")

    def _write(self, operation: WriteOperation) -> DropReason | None:
        if operation.is_try:
            self._disk.revive()
        self._settle()
        record, entry, layout = operation.record, operation.entry, self._layout
        if not record.sound or not layout.may_store(entry.kind, record.payload):
            return DropReason.NOT_FINITE
        parts = layout.part_bytes(entry.kind, entry.n_pages)
        header = SlabHeader(
            kind=entry.kind,
            generation=entry.generation,
            key=entry.key,
            parent=entry.parent,
            page_keys=entry.page_keys,
            namespace=entry.namespace,
            at_token=entry.at_token,
            content_bytes=layout.content_bytes(entry.kind, entry.n_pages),
            captured_at_us=operation.captured_at_us,
            fingerprint_half=self._fingerprint_half,
            part_sums=sums(record.image[layout.header_bytes :], parts),
        )
        record.header[:] = np.frombuffer(header.pack(layout.header_bytes), dtype=np.uint8)
        offset = self._striping.offset(entry.slab)
        end = layout.transfer_bytes(entry.kind, entry.n_pages)
        for start in range(0, end, PIECE_BYTES):
            self._gate.wait_idle(YIELD_TO_READS_S)
            if self._stopping:
                return DropReason.CLOSED
            if operation.given_up:
                return DropReason.TIMED_OUT
            operation.steps += 1
            self.progress += 1
            piece = record.image[start : min(start + PIECE_BYTES, end)]
            if self._disk.write_at([piece], offset + start) != len(piece):
                return DropReason.SHORT_WRITE
        return None
