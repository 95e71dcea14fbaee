"""What the SSD has of the radix tree: checkpoints at positions, and the KV of whole nodes, and what goes there next.

The store tells what enters and leaves its index; the tree tells of splits and removals. Only the mirror changes in
here, never the store: what the store has no use for any more is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sglang_histate.adapter.kv_extents import KvExtents, Piece
from sglang_histate.adapter.page_names import PageNames
from sglang_histate.adapter.recovered import Recovered, by_worth
from sglang_histate.adapter.ssd_marks import SsdMarks
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.residence import ResidenceTime
from sglang_histate.policy.units import Unit
from sglang_histate.store import Entry, Key, RecordKind


class SsdContents:
    """Scheduler thread only. `residence`: how long checkpoints stay before their slab is taken."""

    def __init__(
        self,
        tree: PrefixTree,
        queue: EvictionQueue,
        page_size: int,
        residence: ResidenceTime,
        kv_changed: Callable[[Any], None],
    ) -> None:
        """`kv_changed(node)` hears when the SSD may have all KV of a node, or no more."""
        self.marks = SsdMarks()
        self.extents = KvExtents()
        self.names = PageNames()
        self.recovered = Recovered()
        self.incomplete: list[Any] = []  # nodes that lost KV on the SSD since somebody looked
        self._tree = tree
        self._queue = queue
        self._page_size = page_size
        self._residence = residence
        self._kv_changed = kv_changed
        self._since: dict[bytes, int] = {}  # checkpoint -> when it came, oldest first
        self._homeless: dict[Key, None] = {}  # in the store, but no node of the tree has the place

    @property
    def oldest_checkpoint(self) -> int | None:
        return next(iter(self._since.values()), None)

    # The tree.

    def split(self, node: Any, upper: Any, tokens: int) -> None:
        """The first `tokens` tokens of `node` belong to `upper` now. Call it after the mirror's own split."""
        pages = tokens // self._page_size
        self.marks.split(node, upper, tokens)
        self.names.split(node, upper, pages)
        self.extents.split(node, upper, pages)
        self._count_kv(node)
        self._count_kv(upper)

    def removed(self, node: Any) -> list[Key]:
        """Forget a node; return what the store has no use for any more."""
        self.names.removed(node)
        orphans = [Key(key) for _, key in self.marks.removed(node)]
        return orphans + [Key(key, RecordKind.KV) for key in self.extents.removed(node)]

    def has_kv(self, node: Any) -> bool:
        """Return whether the SSD has all KV of `node`."""
        return self._tree.has_kv(node, Tier.SSD)

    # Places.

    def place_checkpoint(self, key: bytes, node: Any, offset: int, stored: bool) -> None:
        """The checkpoint `key` belongs `offset` tokens into `node`; `stored`: the store has it already."""
        self.marks.place(key, node, offset)
        self._homeless.pop(Key(key), None)
        self.recovered.gone(Key(key))
        if stored:
            self._tree.set_checkpoint(node, offset, Tier.SSD, True)

    def place_extent(self, key: bytes, node: Any, piece: Piece) -> None:
        """The store has an extent with these pages of `node`."""
        self._homeless.pop(Key(key, RecordKind.KV), None)
        self.extents.add(node, piece)
        self._count_kv(node)

    def recover(self, entries: Iterable[Entry]) -> None:
        """The store was opened with `entries`, in the order of their last use. They have no place in the tree yet."""
        held = list(entries)
        for entry in held:
            self.recovered.add(entry)
        self._homeless = dict.fromkeys(by_worth(held))

    def adopt(self, node: Any) -> None:
        """`node` has names now: what was recovered of its KV and its checkpoints belongs to it."""
        if not self.recovered:
            return
        names = self.names.of(node)
        for first, count in self.extents.missing(node, len(names)):
            for part in self.recovered.take_pages(names[first : first + count]):
                self.place_extent(part.key, node, Piece(part.key, part.skip, first + part.at, part.pages))
        for page, key in self.recovered.take_checkpoints(names):
            self.place_checkpoint(key, node, (page + 1) * self._page_size, True)

    def _count_kv(self, node: Any) -> None:
        pages = self._tree.tokens(node) // self._page_size
        self._tree.set_kv(node, Tier.SSD, self.extents.covered(node, pages))
        self._kv_changed(node)

    # The store.

    def stored(self, name: Key, now: int) -> None:
        """`name` has entered the index."""
        place = None
        if name.kind is RecordKind.CHECKPOINT:
            self._since[name.hash] = now
            place = self.marks.find(name.hash)
        if place is None:
            self._homeless[name] = None
        else:
            self._tree.set_checkpoint(*place, Tier.SSD, True)

    def gone(self, name: Key, replaced: bool, now: int) -> None:
        """`name` has left the index; `replaced`: its slab was needed."""
        self._homeless.pop(name, None)
        self.recovered.gone(name)
        if name.kind is RecordKind.KV:
            for node in self.extents.gone(name.hash):
                self._count_kv(node)
                self.incomplete.append(node)
            return
        since = self._since.pop(name.hash, None)
        if replaced and since is not None:
            self._residence.evicted(since, now)
        place = self.marks.find(name.hash)
        if place is not None:
            self._tree.set_checkpoint(*place, Tier.SSD, False)
            self.marks.drop(name.hash)

    def victim(
        self, usable: Callable[[Key], bool], forgotten: Callable[[Unit], None]
    ) -> tuple[Key, Unit | None] | None:
        """Return what gives up its slab next: something without a place, or a piece of the unit that costs least.

        Where there is no unit left, a piece of KV that the SSD has only in part.

        A unit all of whose KV lies in extents that begin before it has no slab to give. It is forgotten, and
        `forgotten` hears of it; its slabs are free when the unit before goes.
        """
        homeless = next((name for name in self._homeless if usable(name)), None)
        if homeless is not None:
            return homeless, None

        name: Key | None = None

        def gives(unit: Unit) -> bool:
            nonlocal name
            parts = self._parts(unit)
            name = next(filter(usable, parts), None)
            return name is not None or not parts

        while (unit := self._queue.victim(gives)) is not None:
            if name is not None:
                return name, unit
            forgotten(unit)
            self._forget(unit)
        return next(((name, None) for name in self._in_part() if usable(name)), None)

    def _in_part(self) -> Iterator[Key]:
        """Yield extents of nodes of which the SSD has not all KV: no unit has them, but they have slabs.

        They come last. A spill completes such nodes one extent at a time.
        """
        for key in self.extents:
            node, _ = self.extents.first_page(key)
            if not self.has_kv(node):
                yield Key(key, RecordKind.KV)

    def _parts(self, unit: Unit) -> list[Key]:
        """Return a unit's records, those of the deepest tokens first. What it shares with tokens before stays."""
        parts: dict[Key, None] = {}
        if unit.checkpoint is not None and unit.has_state:
            # With its KV gone the state is of no use, so it goes first.
            parts[Key(self.marks.key_at(*unit.checkpoint))] = None
        for node, first in self._pages(unit):
            for piece in reversed(self.extents.pieces(node)):
                # Only what a node begins with can belong to an extent that begins before it.
                if piece.at >= first and (piece.at or self._begins_in(unit, piece.key)):
                    parts[Key(piece.key, RecordKind.KV)] = None
        return list(parts)

    def _pages(self, unit: Unit) -> Iterator[tuple[Any, int]]:
        """Yield the nodes of a unit, deepest first, each with the first page of it that is the unit's."""
        for node in unit.nodes:
            cut = unit.cut
            yield node, cut[1] // self._page_size if cut is not None and cut[0] == node else 0

    def _begins_in(self, unit: Unit, key: bytes) -> bool:
        node, at = self.extents.first_page(key)
        if unit.cut is not None and unit.cut[0] == node:
            return at >= unit.cut[1] // self._page_size
        return node in unit.nodes or self._tree.start(node) > self._tree.start(unit.nodes[0])

    def _forget(self, unit: Unit) -> None:
        for node, first in self._pages(unit):
            self.extents.forget(node, first)
            self._count_kv(node)
            self.incomplete.append(node)
