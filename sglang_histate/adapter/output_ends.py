"""Checkpoints at the end of an output: the state that decode left in a device slot, copied to a record.

Prompt ends are captured by the forward pass; an output's end exists only in the slot that the finished request gave to
the tree. The node stays locked until its bytes have arrived, so the slot cannot be reused meanwhile; in a pool that KV
and states share, nothing is moved meanwhile either (see `device_pool.keep_in_place`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.counters import Counters, Drop, Why
from sglang_histate.adapter.packed_copies import PackedCopies
from sglang_histate.adapter.ranks import finished_count
from sglang_histate.adapter.request_state import state_of
from sglang_histate.adapter.slot_copies import SlotCopies, SlotCopy
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.policy.capture_value import cost_tokens
from sglang_histate.store import NO_NAMESPACE, CheckpointStore, EntryState, Record


@dataclass(eq=False)
class OutputEnd:
    """One copy in flight; `record` is None where nothing is copied because the store has the checkpoint.

    `refused`: the store does not want it, the host may.
    """

    key: bytes
    position: int
    record: Record | None
    node_id: Any
    lock: Any
    copy: SlotCopy | None
    refused: bool = False
    namespace: bytes = NO_NAMESPACE

    @property
    def arrived(self) -> bool:
        return self.copy is None or self.copy.arrived


class OutputEnds:
    """Copies of finished requests' states. Scheduler thread only."""

    def __init__(
        self,
        cache: Any,
        store: CheckpointStore,
        layout: StateLayout,
        *,
        copies: SlotCopies | PackedCopies,
        grid: int,
        page_size: int,
        end_share: Callable[[], float],
        counters: Counters,
    ) -> None:
        """`copies` moves what is in the device's slots; `end_share` is q."""
        self._cache = cache
        self._store = store
        self._layout = layout
        self._copies = copies
        self._grid = grid
        self._end_share = end_share
        self._page_size = page_size
        self._counters = counters
        self._pending: deque[OutputEnd] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def reading(self) -> bool:
        """True while a copy reads device slots. A plain copy without a GPU is done when `take` returns."""
        return any(end.copy is not None and not end.copy.immediate for end in self._pending)

    def take(self, req: Any) -> None:
        """`req` has finished and its node is in the tree: copy the node's state unless the store has it already.

        It has it if the output filled no page: then the end is the one that the prompt left, and while its bytes are
        still in memory the host can have them.
        """
        node_id = req.last_node
        slot = self._cache.tree_core.get_component_device_value(node_id, ComponentType.MAMBA)
        position = req.kv.cache_protected_len
        if slot is None or position == 0 or position % self._grid:
            return
        keys = state_of(req, self._page_size).keys
        key = keys.at(req.full_untruncated_fill_ids, position)
        if any(end.key == key for end in self._pending):
            return
        record, copy, refused = None, None, False
        entry = self._store.lookup(key)
        state = self._cache.tree_core.node_by_id(node_id).component_data[ComponentType.MAMBA]
        if entry is not None:
            self._store.touch(key)
            if state.host_value is not None or entry.state is EntryState.LIVE:
                return  # what is on the SSD alone is read when it is asked for
        else:
            record, refused = self._record(key, position, state_of(req, self._page_size).kept)
            if record is None:
                self._counters.drop(Drop.NO_RECORD)
                self._cache.tree_core.ranking.absences.note(key, Why.NO_BUFFER)
                return
            if refused and state.host_value is not None:
                self._store.release_record(
                    record
                )  # the prompt's end went there, and the answer filled no page
                return
        lock = self._cache.inc_lock_ref(node_id).to_dec_params()
        if record is not None:
            slot = self._cache.req_to_token_pool.translate_mamba_indices(slot)
            copy = self._copies.start(slot, record)
            self._counters.output_ends += 1
        self._pending.append(OutputEnd(key, position, record, node_id, lock, copy, refused, keys.namespace))

    def _record(self, key: bytes, position: int, kept: int) -> tuple[Record | None, bool]:
        """Return a record, None if there is none to spare, and whether the SSD refuses it.

        Then it is copied all the same: the host has to have the end of a session when the device forgets it.
        """
        if not self._store.records.free_for_writes:
            return None, False
        before = kept if kept < position else 0  # the end of the prompt, where the answer filled no page
        cost = cost_tokens(position, before, None, position, self._end_share())
        claimed = self._store.claim_record(key, cost / self._layout.stored_bytes)
        if isinstance(claimed, Record):
            return claimed, False
        self._counters.drop(Drop.REFUSED)
        self._cache.tree_core.ranking.absences.refused(key, claimed)
        return self._store.acquire_record(), True

    def done_count(self) -> int:
        """Return how many copies have arrived, oldest first and without a gap."""
        self._copies.advance()
        return finished_count(self._pending, lambda end: end.arrived)

    def pop(self, count: int) -> list[OutputEnd]:
        """Take the `count` oldest copies, unlock their nodes and hand the records over."""
        ends = [self._pending.popleft() for _ in range(count)]
        for end in ends:
            if end.copy is not None:
                end.copy.hand_over()
            self._cache.dec_lock_ref(end.node_id, end.lock)
        return ends

    def drain(self) -> None:
        """Wait until all copies have arrived."""
        self._copies.drain()

    def reset(self) -> None:
        """The tree is being emptied: its locks are gone, the records go back."""
        self._copies.drain()
        for end in self._pending:
            if end.record is not None:
                self._counters.drop(Drop.CACHE_RESET)
                self._store.release_record(end.record)
        self._pending.clear()
