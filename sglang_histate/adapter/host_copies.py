"""Checkpoints on their way from a record into a slot of the host arena, at the end of a node of the tree.

The store lends the record or reads it, a reader thread copies it. The node keeps its KV on the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.host_slots import HostSlots
from sglang_histate.adapter.landing import Landing
from sglang_histate.store import CheckpointStore, Deliver, MissReason, ReadTicket, Record


class Copied(Enum):
    """What became of a copy."""

    ATTACHED = "attached"
    PRESENT = "present"  # another request brought a state there meanwhile
    FAILED = "failed"  # the record could not be read, its state is not finite, or the node lost its KV all the same


Ended = Callable[[Copied], None]


def _unheard(copied: Copied) -> None:
    """Nobody wants to know."""


@dataclass(eq=False)
class _Copy:
    node_id: Any
    lock: Any
    slot: torch.Tensor
    ended: Ended
    landing: Landing = field(default_factory=Landing)


class HostCopies:
    """Scheduler thread only, but for the copy itself."""

    def __init__(self, cache: Any, store: CheckpointStore, slots: HostSlots) -> None:
        self._cache = cache
        self._core = cache.tree_core
        self._store = store
        self._slots = slots
        self._copies: dict[int, tuple[ReadTicket, _Copy]] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def start(
        self, node: Any, read: Callable[[Deliver], ReadTicket | MissReason], ended: Ended = _unheard
    ) -> bool:
        """Copy what `read` delivers to the end of `node`, which has no state on the host. False: there is no place.

        `ended` is called once it is there, in the same step on all ranks. After False `read` may not have been called.
        """
        if not node.backuped:
            return False
        lock = self._cache.inc_host_lock_ref(node.id).to_dec_params()
        slot = self._slots.alloc()
        if slot is not None:
            copy = _Copy(node.id, lock, slot, ended)
            ticket = read(partial(self._deliver, copy))
            if not isinstance(ticket, MissReason):
                self._copies[id(ticket)] = ticket, copy
                return True
            self._slots.free(slot)
        self._cache.dec_host_lock_ref(node.id, lock)
        return False

    def complete(self, ticket: ReadTicket) -> bool:
        """A read was committed on all ranks. Returns False if it is none of these."""
        found = self._copies.pop(id(ticket), None)
        if found is None:
            return False
        _, copy = found
        self._cache.dec_host_lock_ref(copy.node_id, copy.lock)
        if ticket.ok:
            self._store.release(ticket)
        copied = self._attach(copy) if ticket.ok else Copied.FAILED
        if copied is not Copied.ATTACHED:
            self._slots.free(copy.slot)
        copy.ended(copied)
        return True

    def _attach(self, copy: _Copy) -> Copied:
        node = self._core.node_by_id(copy.node_id)
        state = node.component_data[ComponentType.MAMBA]
        if state.host_value is not None:
            return Copied.PRESENT
        if not node.backuped:
            return Copied.FAILED
        state.host_value = copy.slot.clone()
        if state.value is None:
            self._core.host_lru_lists[ComponentType.MAMBA].insert_mru(node)
        self._core._update_evictable_leaf_sets(node)
        return Copied.ATTACHED

    def reset(self) -> None:
        """The tree is being emptied, and with it the arena: what is under way must not write to it any more."""
        for _, copy in self._copies.values():
            copy.landing.cancel()
        self._copies.clear()

    def _deliver(self, copy: _Copy, record: Record, layers: range) -> None:
        """Reader thread."""
        copy.landing.copy(lambda: self._slots.fill(copy.slot, record.payload, layers))
