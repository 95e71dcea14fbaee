"""How records go before their time: all of them, or those of one namespace, also from the disk.

Runs on the scheduler thread and drops the same entries on every rank; what has to be written down or erased is done
by the writer thread, in order with the records that it writes: what was put before is gone, what is put later stays.
"""

from __future__ import annotations

from dataclasses import replace

from .block_zero import BlockZero
from .disk import Disk
from .erase import erase
from .in_flight import InFlight
from .index import Index
from .intake import Intake
from .reasons import DropReason
from .stats import PurgeStats
from .writer import Writer


class Clearing:
    def __init__(
        self,
        index: Index,
        in_flight: InFlight,
        intake: Intake,
        block_zero: BlockZero,
        writer: Writer,
        disk: Disk,
        slab_count: int,
    ) -> None:
        self._index = index
        self._in_flight = in_flight
        self._intake = intake
        self._block_zero = block_zero
        self._writer = writer
        self._disk = disk
        self._slab_count = slab_count
        self._counts = PurgeStats()

    def stats(self) -> PurgeStats:
        return replace(self._counts)

    def clear(self, reason: DropReason) -> None:
        """See `CheckpointStore.clear`."""
        self._drop(None, reason)
        if not self._intake.quarantined:
            self._block_zero.expire(self._intake.newest + 1)
            self._writer.do(self._block_zero.settle)

    def purge(self, namespace: bytes | None) -> int:
        """See `CheckpointStore.purge`."""
        dropped = self._drop(namespace, DropReason.PURGED)
        self._counts.asked += 1
        self._writer.do(lambda: self._erase(namespace))
        return dropped

    def _drop(self, namespace: bytes | None, reason: DropReason) -> int:
        gone = [entry for entry in self._index if namespace is None or entry.namespace == namespace]
        for entry in gone:
            self._in_flight.drop(entry, reason)
        for ticket in self._in_flight.reads:
            if namespace is None or ticket.entry.namespace == namespace:
                ticket.cleared = True
        return len(gone)

    def _erase(self, namespace: bytes | None) -> None:
        """Writer thread."""
        try:
            layout = self._in_flight.layout
            self._counts.erased += erase(self._disk, layout, self._slab_count, namespace).records
        except BaseException:
            self._counts.failed += 1
            raise
        finally:
            self._counts.done += 1
