"""A session's final checkpoint on the host: where its next turn looks first once the device has forgotten it.

The store has the bytes, as a rule in a record on its way to the SSD. What the SSD refuses because writes are short goes to
the host all the same.
The checkpoint that it supersedes is an intermediate one now and goes from the host when room is needed, as the SSD has it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.host_copies import HostCopies
from sglang_histate.adapter.host_slots import HostSlots
from sglang_histate.adapter.output_ends import OutputEnd
from sglang_histate.store import CheckpointStore, Deliver, EntryState, MissReason, ReadTicket


class FinalStates:
    """Scheduler thread only. What finds no room stays on device and SSD only."""

    def __init__(self, cache: Any, store: CheckpointStore, slots: HostSlots) -> None:
        self._core = cache.tree_core
        self._store = store
        self._copies = HostCopies(cache, store, slots)

    def __len__(self) -> int:
        return len(self._copies)

    def take(self, end: OutputEnd) -> None:
        """Copy `end` to the host too, at the node that it belongs to: from the store, or what that refused from `end`."""
        node = self._node(end)
        if node is not None and self._copies.start(node, partial(self._read, end)):
            return
        if end.refused and end.record is not None:
            self._store.release_record(end.record)

    def _read(self, end: OutputEnd, deliver: Deliver) -> ReadTicket | MissReason:
        if not end.refused:
            return self._store.begin_read(end.key, deliver=deliver)
        assert end.record is not None
        return self._store.lend(end.key, end.position, end.record, deliver)

    def _node(self, end: OutputEnd) -> Any | None:
        """Return the node that `end` ends, or None if it has no place or need not be copied."""
        if end.node_id not in self._core.ranking.tree:
            return None
        if not end.refused:
            entry = self._store.lookup(end.key)
            if entry is None or (end.record is None and entry.state is EntryState.LIVE):
                return None  # written meanwhile: a copy would cost a read
        node = self._core.node_by_id(end.node_id)
        present = node.component_data[ComponentType.MAMBA].host_value is not None
        depth = self._core.ranking.tree.start(node.id) + len(node.key)
        return None if present or depth != end.position else node

    def complete(self, ticket: ReadTicket) -> bool:
        """A read was committed on all ranks. Returns False if it is none of these."""
        return self._copies.complete(ticket)

    def reset(self) -> None:
        """The tree is being emptied, and with it the arena."""
        self._copies.reset()
