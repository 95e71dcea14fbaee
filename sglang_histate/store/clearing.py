"""How records go before their time: all of them, or those of one namespace, also from the disk.

Runs on the scheduler thread and drops the same entries on every rank; what has to be written down or erased is done
by the writer thread, in order with the records that it writes: what was put before is gone, what is put later stays.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import partial

from .erase import erase
from .in_flight import InFlight
from .index import Index
from .intake import Intake
from .operations import ReadTicket
from .reasons import DropReason
from .roots import Root, Roots
from .stats import PurgeStats


class Clearing:
    def __init__(self, index: Index, in_flight: InFlight, intake: Intake, roots: Roots) -> None:
        self._index = index
        self._in_flight = in_flight
        self._intake = intake
        self._roots = roots
        self._counts = PurgeStats()
        self._counting = threading.Lock()

    def stats(self) -> PurgeStats:
        return replace(self._counts)

    def clear(self, reason: DropReason) -> None:
        """See `CheckpointStore.clear`."""
        self._drop(None, reason)
        if not self._intake.quarantined:
            for root in self._roots:
                root.block_zero.expire(self._intake.newest + 1)
                root.writer.do(root.block_zero.settle)

    def purge(self, namespace: bytes | None) -> int:
        """See `CheckpointStore.purge`."""
        dropped = self._drop(namespace, DropReason.PURGED)
        self._counts.asked += 1
        purge = _Purge(namespace, roots_left=self._roots.striping.n_roots)
        for root in self._roots:
            root.writer.do(partial(self._erase, root, purge))
        return dropped

    def _drop(self, namespace: bytes | None, reason: DropReason) -> int:
        gone = [entry for entry in self._index if namespace is None or entry.namespace == namespace]
        for entry in gone:
            self._in_flight.drop(entry, reason)
        for ticket in self._in_flight.reads:
            if isinstance(ticket, ReadTicket) and namespace in (None, ticket.entry.namespace):
                ticket.cleared = True
        return len(gone)

    def _erase(self, root: Root, purge: _Purge) -> None:
        """Writer thread of `root`. The purge is done when the last root is."""
        slab_count = self._roots.striping.slabs_in(root.number)
        erased = None
        try:
            erased = erase(root.disk, self._in_flight.layout, slab_count, purge.namespace).records
        finally:
            with self._counting:
                self._counts.erased += erased or 0
                purge.failed |= erased is None
                purge.roots_left -= 1
                if purge.roots_left == 0:
                    self._counts.failed += purge.failed
                    self._counts.done += 1


@dataclass
class _Purge:
    namespace: bytes | None
    roots_left: int
    failed: bool = False
