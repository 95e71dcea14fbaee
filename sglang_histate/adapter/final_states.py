"""A session's final checkpoint on the host: where its next turn looks first once the device has forgotten it.

The store has the bytes, as a rule in a record on its way to the SSD; a reader thread copies them into a slot of the
host arena. What the SSD refuses because writes are short goes to the host all the same.
The checkpoint that it supersedes is an intermediate one now and goes from the host when room is needed, as the SSD has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.host_slots import HostSlots
from sglang_histate.adapter.landing import Landing
from sglang_histate.adapter.output_ends import OutputEnd
from sglang_histate.store import CheckpointStore, Deliver, EntryState, MissReason, ReadTicket, Record


@dataclass(eq=False)
class _Copy:
    node_id: Any
    lock: Any
    slot: torch.Tensor
    landing: Landing = field(default_factory=Landing)


class FinalStates:
    """Scheduler thread only, but for the copy itself. What finds no room stays on device and SSD only."""

    def __init__(self, cache: Any, store: CheckpointStore, slots: HostSlots) -> None:
        self._cache = cache
        self._core = cache.tree_core
        self._store = store
        self._slots = slots
        self._copies: dict[int, tuple[ReadTicket, _Copy]] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def take(self, end: OutputEnd) -> None:
        """Copy `end` to the host too, at the node that it belongs to: from the store, or what that refused from `end`."""
        copy = self._place(end)
        if copy is None:
            if end.refused and end.record is not None:
                self._store.release_record(end.record)
            return
        ticket: ReadTicket | MissReason
        if end.refused:
            assert end.record is not None
            ticket = self._store.lend(end.key, end.position, end.record, self._into(copy))
        else:
            ticket = self._store.begin_read(end.key, deliver=self._into(copy))
        if isinstance(ticket, MissReason):
            self._slots.free(copy.slot)
            self._cache.dec_host_lock_ref(copy.node_id, copy.lock)
            return
        self._copies[id(ticket)] = ticket, copy

    def _place(self, end: OutputEnd) -> _Copy | None:
        """Return a slot for `end` and a lock on its node, or None if it has no place or need not be copied."""
        if end.node_id not in self._core.ranking.tree:
            return None
        if not end.refused:
            entry = self._store.lookup(end.key)
            if entry is None or (end.record is None and entry.state is EntryState.LIVE):
                return None  # written meanwhile: a copy would cost a read
        node = self._core.node_by_id(end.node_id)
        state = node.component_data[ComponentType.MAMBA]
        if not node.backuped or state.host_value is not None or self._depth(node) != end.position:
            return None
        lock = self._cache.inc_host_lock_ref(node.id).to_dec_params()
        slot = self._slots.alloc()
        if slot is None:
            self._cache.dec_host_lock_ref(node.id, lock)
            return None
        return _Copy(node.id, lock, slot)

    def complete(self, ticket: ReadTicket) -> bool:
        """A read was committed on all ranks. Returns False if it is none of these."""
        found = self._copies.pop(id(ticket), None)
        if found is None:
            return False
        _, copy = found
        self._cache.dec_host_lock_ref(copy.node_id, copy.lock)
        node = self._core.node_by_id(copy.node_id)
        state = node.component_data[ComponentType.MAMBA]
        if ticket.ok:
            self._store.release(ticket)
        if not ticket.ok or not node.backuped or state.host_value is not None:
            self._slots.free(copy.slot)
            return True
        state.host_value = copy.slot.clone()
        if state.value is None:
            self._core.host_lru_lists[ComponentType.MAMBA].insert_mru(node)
        self._core._update_evictable_leaf_sets(node)
        return True

    def reset(self) -> None:
        """The tree is being emptied, and with it the arena: what is under way must not write to it any more."""
        for _, copy in self._copies.values():
            copy.landing.cancel()
        self._copies.clear()

    def _into(self, copy: _Copy) -> Deliver:
        """Return what a reader thread calls with each part of the record."""
        return partial(self._deliver, copy)

    def _deliver(self, copy: _Copy, record: Record, layers: range) -> None:
        """Reader thread."""
        copy.landing.copy(lambda: self._slots.fill(copy.slot, record.payload, layers))

    def _depth(self, node: Any) -> int:
        return int(self._core.ranking.tree.start(node.id) + len(node.key))
