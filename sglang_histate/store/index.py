"""Which record lies in which slab, and which one is used least recently.

Owns the map from key to entry and the order of use, over both kinds. Does not own slabs or buffers:
`occupancy.py` and `store.py` do. An entry is WRITING -> LIVE -> GONE. It leaves the map when it becomes GONE;
its slab stays taken until no write and no read uses it any more, so a slab is never overwritten under a
reader. All methods run on the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from .kinds import Key, RecordKind
from .layout import NO_PARENT
from .records import Record


class EntryState(StrEnum):
    WRITING = "writing"  # served from `record`
    LIVE = "live"  # served from the slab
    GONE = "gone"  # not in the index any more


@dataclass(eq=False)
class Entry:
    """One record. Callers read the fields before `slab`, and `state`; the rest belongs to the store.

    `key` is the hash of the record's last page and `at_token` where it ends. `namespace` says who may use it.
    An extent has `page_keys`, the hashes of its pages: the last is `key`, the first follows the page `parent`
    (NO_PARENT at the start of a sequence), so the extent before it, if stored, has the key `parent`. A
    checkpoint has neither.
    """

    key: bytes
    kind: RecordKind
    at_token: int
    parent: bytes
    page_keys: tuple[bytes, ...]
    namespace: bytes
    slab: int
    generation: int
    state: EntryState = EntryState.WRITING
    record: Record | None = None  # the record being written, until that write is committed
    pins: int = 0  # reads that are not committed yet

    @property
    def name(self) -> Key:
        return Key(self.key, self.kind)

    @property
    def n_pages(self) -> int:
        """KV pages of an extent; 0 for a checkpoint."""
        return len(self.page_keys)

    def logical(self) -> tuple[object, ...]:
        """Return all of it that must be equal on every rank. Generations are, but do not matter for what is done."""
        return (
            self.key, self.kind.value, self.at_token, self.parent, self.page_keys, self.namespace,
            self.state.value, self.slab, self.pins,
        )  # fmt: skip

    @property
    def in_use(self) -> bool:
        return self.record is not None or self.pins > 0


class Index:
    """Entries by name, least recently used first.

    A plain dict keeps this order: what is touched is put at its end. An OrderedDict looks up each key while it is
    copied, which takes the scheduler thread ten times as long at 50,000 entries.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def names(self) -> list[Key]:
        """Return all names, least recently used first. Quick: it only copies references."""
        return list(self._entries)

    def get(self, name: Key) -> Entry | None:
        return self._entries.get(name)

    def insert(self, entry: Entry) -> None:
        assert entry.name not in self._entries
        if entry.kind is RecordKind.KV:
            assert entry.page_keys[-1] == entry.key
        else:
            assert entry.parent == NO_PARENT and not entry.page_keys
        self._entries[entry.name] = entry

    def touch(self, name: Key) -> None:
        """Make `name` the most recently used one."""
        self._entries[name] = self._entries.pop(name)

    def remove(self, entry: Entry) -> None:
        removed = self._entries.pop(entry.name)
        assert removed is entry
        entry.state = EntryState.GONE

    def least_recent(self) -> Key | None:
        """Return the least recently used entry that nothing uses, or None.

        Entries in use are skipped; there are never more of them than record buffers, so the walk is short.
        """
        return next((entry.name for entry in self if not entry.in_use), None)
