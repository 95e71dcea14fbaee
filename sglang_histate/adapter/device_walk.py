"""One walk of evictions on the device: the ranking says what goes next, SGLang's tree lets go of it.

SGLang walks component by component and checks after each step whether there is room enough; both components take their
steps from here, so that KV and states are ranked together.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer

from sglang_histate.adapter.ranking import Ranking
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.units import Kind, Unit


class DeviceWalk:
    """State of one walk; `queue` is the pool that is short."""

    def __init__(self, core: Any, ranking: Ranking, queue: EvictionQueue) -> None:
        self._core = core
        self._ranking = ranking
        self._queue = queue
        self._leaves: deque[Any] = deque()  # what is left of the bundle that goes, deepest node first

    def step(self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: list[Any]) -> Any | None:
        """Return the next leaf whose KV goes; None after a state went (the frees say so), or if nothing can go."""
        while self._leaves:
            node = self._leaves.popleft()
            if node in self._core.evictable_device_leaves:
                return node.id
            self._leaves.clear()  # the rest is in use
        unit = self._queue.victim(self._usable)
        if unit is None:
            return None
        self._ranking.evicted(unit, Tier.DEVICE)
        if self._goes_by_state(unit):
            assert unit.checkpoint is not None
            node = self._core.node_by_id(unit.checkpoint[0])
            self._core.drop_state(node, EvictLayer.DEVICE, tracker, device_frees, host_frees, cache_actions)
            return None
        if unit.cut is not None:
            node_id, offset = unit.cut
            cache_actions += self._core.cut(self._core.node_by_id(node_id), offset)[1]
        self._leaves.extend(self._core.node_by_id(node_id) for node_id in unit.nodes)
        return self._leaves.popleft().id

    def _goes_by_state(self, unit: Unit) -> bool:
        """A state goes without its KV if it is an intermediate one, or if the pool that is short has no KV."""
        return unit.kind is Kind.INTERMEDIATE or not self._queue.pool.kv_token_bytes

    def _usable(self, unit: Unit) -> bool:
        if self._ranking.copies_only and not self._is_copy(unit):
            return False
        if not self._goes_by_state(unit):
            return self._core.node_by_id(unit.nodes[0]) in self._core.evictable_device_leaves
        assert unit.checkpoint is not None
        node = self._core.node_by_id(unit.checkpoint[0])
        state = node.component_data[ComponentType.MAMBA]
        return state.value is not None and state.lock_ref == 0 and node.load_back_pending_id is None

    def _is_copy(self, unit: Unit) -> bool:
        """Return whether the device loses nothing with a unit that other tiers have not got."""
        if unit.kind is not Kind.BUNDLE:
            return False
        place, ranking = unit.checkpoint, self._ranking
        if place is not None and not any(
            ranking.has_checkpoint(place, tier) for tier in (Tier.HOST, Tier.SSD)
        ):
            return False
        return all(ranking.tree.has_kv(node, Tier.HOST) for node in unit.nodes)
