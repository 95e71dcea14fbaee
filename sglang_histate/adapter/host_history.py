"""Historical checkpoints on the host: from the records that a forward pass filled to their places in the tree.

    take -> (its KV is in the tree) step -> HostCopies -> attached at its position

The tree learns of a prompt's KV after the forward pass that captured it, so a record waits for some steps. Where the host
has no copy of the KV there, or no room, the checkpoint goes to the SSD after all, unless that has refused it before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.capture import CaptureRow
from sglang_histate.adapter.counters import Counters, Drop, Why
from sglang_histate.adapter.host_copies import Copied, HostCopies
from sglang_histate.adapter.host_slots import HostSlots
from sglang_histate.policy.history_tier import TierReason
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.store import CheckpointStore, ReadTicket

WAIT_STEPS = 64
"""Steps that a record waits for its KV. It takes two or three; a request that the tree has no room for gives none."""


@dataclass
class _Waiting:
    row: CaptureRow
    steps: int = 0


class HostHistory:
    """Scheduler thread only, but for the copies. Every rank calls `step` in the same steps."""

    def __init__(self, cache: Any, store: CheckpointStore, slots: HostSlots, counters: Counters) -> None:
        self._cache = cache
        self._core = cache.tree_core
        self._store = store
        self._counters = counters
        self._copies = HostCopies(cache, store, slots)
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        """Return how many wait for their KV. Copies under way are reads of the store."""
        return len(self._waiting)

    @property
    def copying(self) -> int:
        return len(self._copies)

    def take(self, row: CaptureRow) -> None:
        """The state of `row` has arrived in its record."""
        self._waiting.append(_Waiting(row))

    def step(self) -> list[CaptureRow]:
        """Begin to copy what has a place now; return what has none on the host and is to go to the SSD."""
        waiting, self._waiting = self._waiting, []
        to_ssd = []
        for one in waiting:
            row = one.row
            if row.useless:
                self._counters.drop(Drop.ABORTED)
                self._core.ranking.absences.note(row.key, Why.ABORTED)
                self._store.release_record(row.record)
                continue
            place = self._core.ranking.ssd.marks.find(row.key)
            one.steps += 1
            if place is None and one.steps < WAIT_STEPS:
                self._waiting.append(one)
            elif place is not None and self._begin(row, *place):
                continue
            elif row.reason is TierReason.REFUSED:
                self._counters.drop(Drop.NO_HOST_PLACE)
                self._core.ranking.absences.note(row.key, Why.NO_HOST_ROOM)
                self._store.release_record(row.record)
            else:
                to_ssd.append(replace(row, tier=Tier.SSD, reason=TierReason.NO_HOST_PLACE))
        return to_ssd

    def _begin(self, row: CaptureRow, node_id: Any, offset: int) -> bool:
        """Copy a row's state to its place; False if the host has no room, or not the KV that it restores."""
        node = self._core.node_by_id(node_id)
        if not node.backuped:
            return False
        if offset < len(node.key):
            node, actions = self._core.cut(node, offset)
            self._cache._apply_cache_actions(actions)
        if node.component_data[ComponentType.MAMBA].host_value is not None:
            self._counters.already_stored += 1
            self._store.release_record(row.record)
            return True
        read = partial(self._store.lend, row.key, row.position, row.record)
        return self._copies.start(node, read, partial(self._ended, row))

    def _ended(self, row: CaptureRow, copied: Copied) -> None:
        if copied is Copied.ATTACHED:
            self._counters.historical[Tier.HOST, row.reason] += 1
        elif copied is Copied.PRESENT:
            self._counters.already_stored += 1
        else:
            self._counters.drop(Drop.NOT_COPIED)
            self._core.ranking.absences.note(row.key, Why.READ_FAILED)

    def complete(self, ticket: ReadTicket) -> bool:
        """A read was committed on all ranks. Returns False if it is none of these."""
        return self._copies.complete(ticket)

    def forget(self, namespace: bytes | None) -> None:
        """What waits and is of `namespace` (None: all) goes nowhere any more. What is being copied keeps its node in use."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if namespace is None or one.row.namespace == namespace:
                self._counters.drop(Drop.CACHE_RESET)
                self._store.release_record(one.row.record)
            else:
                self._waiting.append(one)

    def reset(self) -> None:
        """The tree is being emptied, and with it the arena."""
        self.forget(None)
        self._copies.reset()
