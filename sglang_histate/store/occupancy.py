"""Which records hold the slabs of the file, which one makes room for another, and who hears of it.

Owns the index and the free slabs; asks `choose_victim` who must go when no slab is free, and refuses an answer
that is in use. Every record is announced once by `on_present` when it enters the index and once by `on_gone`
when it leaves, on the scheduler thread and in the same order on every rank. What is in flight is not known
here: `store.py` ends the write of a record that leaves early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .events import EventLog
from .index import Entry, EntryState, Index
from .kinds import Key, RecordKind
from .layout import RecordLayout
from .reasons import DropReason, PutResult
from .recovery import Recovered
from .roots import Roots
from .slabs import SlabPool
from .stats import KindCounters

NO_SLAB = -1
"""Of an entry that never was in the index."""

ChooseVictim = Callable[[], Key | None]
OnPresent = Callable[[bytes, RecordKind], None]
OnGone = Callable[[bytes, RecordKind, DropReason], None]


class Occupancy:
    """The records of one store. Without `choose_victim` the least recently used one of both kinds goes first."""

    def __init__(
        self,
        layout: RecordLayout,
        roots: Roots,
        counters: Mapping[RecordKind, KindCounters],
        events: EventLog,
        *,
        choose_victim: ChooseVictim | None,
        on_present: OnPresent | None,
        on_gone: OnGone | None,
    ) -> None:
        self.index = Index()
        self.slabs = SlabPool(roots.striping.slab_count, roots.striping.n_roots)
        self._roots = roots
        self._layout = layout
        self._counters = counters
        self._events = events
        self._choose_victim = choose_victim or self.index.least_recent
        self._on_present = on_present
        self._on_gone = on_gone

    def replaceable(self, name: Key) -> bool:
        """Say whether `name` is in the index and neither written nor read at the moment."""
        entry = self.index.get(name)
        return entry is not None and not entry.in_use

    def make_room(self) -> PutResult:
        """Return STORED once a slab is free that may be written; else why none can be.

        This may cost a record its place. Where a root takes no writes, its records go in their turn and the
        next one makes room.
        """
        while True:
            writable = self._roots.writable()
            if not writable:
                return PutResult.BREAKER_OPEN
            if any(map(self.slabs.free_in, writable)):
                return PutResult.STORED
            victim = self._choose_victim()
            if victim is None:
                return PutResult.NO_SLAB
            entry = self.index.get(victim)
            if entry is None or entry.in_use:
                self._events.warn(
                    "victim",
                    "the record chosen to make room is %s",
                    "in use" if entry else "not in the index",
                )
                return PutResult.BAD_VICTIM
            self.drop(entry, DropReason.EVICTED)

    def take_slab(self) -> int:
        """Take a slab, after `make_room` said STORED. A root that is to be tried again comes first."""
        to_try = self._roots.to_try(self.slabs.free_in)
        slab = self.slabs.acquire(self._roots.writable() if to_try is None else [to_try])
        assert slab is not None
        return slab

    def enter(self, entry: Entry) -> None:
        """Take `entry`, whose slab was acquired for it, into the index."""
        self.index.insert(entry)
        count = self._counters[entry.kind]
        count.entries += 1
        count.slabs += 1
        count.content_bytes += self._layout.content_bytes(entry.kind, entry.n_pages)
        if self._on_present is not None:
            self._on_present(entry.key, entry.kind)

    def recover(self, found: Sequence[Recovered]) -> None:
        """Take in what an older run left, least recently used first; announced like any other record."""
        self.slabs.occupy([one.slab for one in found])
        for one in found:
            self._counters[one.kind].recovered += 1
            self.enter(
                Entry(
                    one.key,
                    one.kind,
                    one.at_token,
                    one.parent,
                    one.page_keys,
                    one.namespace,
                    one.slab,
                    one.generation,
                    EntryState.LIVE,
                )
            )

    def drop(self, entry: Entry, reason: DropReason) -> None:
        """Take `entry` out of the index; its slab is free once nothing uses it."""
        self.index.remove(entry)
        count = self._counters[entry.kind]
        count.entries -= 1
        count.drops[reason] += 1
        self.free_if_unused(entry)
        if self._on_gone is not None:
            self._on_gone(entry.key, entry.kind, reason.agreed)

    def free_if_unused(self, entry: Entry) -> None:
        """Give back the slab of an entry that is gone, unless a read or a write still needs it."""
        if entry.state is EntryState.GONE and not entry.in_use and entry.slab != NO_SLAB:
            count = self._counters[entry.kind]
            count.slabs -= 1
            count.content_bytes -= self._layout.content_bytes(entry.kind, entry.n_pages)
            self.slabs.release(entry.slab)
