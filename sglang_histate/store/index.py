"""Which checkpoint lies in which slab, and which one is used least recently.

Owns the map from key to entry and the order of use. Does not own slabs or buffers: `store.py` returns those.
An entry is WRITING -> LIVE -> GONE. It leaves the map when it becomes GONE; its slab stays taken until no
write and no read uses it any more, so a slab is never overwritten under a reader. All methods run on the
scheduler thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from .records import Record


class EntryState(StrEnum):
    WRITING = "writing"  # served from `record`
    LIVE = "live"  # served from the slab
    GONE = "gone"  # not in the index any more


@dataclass(eq=False)
class Entry:
    """One checkpoint. Callers read `key`, `at_token` and `state`; the rest belongs to the store."""

    key: bytes
    at_token: int
    slab: int
    generation: int
    state: EntryState = EntryState.WRITING
    record: Record | None = None  # the record being written, until that write is committed
    pins: int = 0  # reads that are not committed yet

    @property
    def in_use(self) -> bool:
        return self.record is not None or self.pins > 0


class Index:
    """Entries by key, least recently used first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def insert(self, entry: Entry) -> None:
        assert entry.key not in self._entries
        self._entries[entry.key] = entry

    def touch(self, key: bytes) -> None:
        """Make `key` the most recently used one."""
        self._entries.move_to_end(key)

    def remove(self, entry: Entry) -> None:
        removed = self._entries.pop(entry.key)
        assert removed is entry
        entry.state = EntryState.GONE

    def victim(self) -> Entry | None:
        """Return the least recently used entry that nothing uses, or None.

        Entries in use are skipped; there are never more of them than record buffers, so the walk is short.
        """
        return next((entry for entry in self if not entry.in_use), None)
