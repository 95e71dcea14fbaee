"""KV in the radix tree under HiState: what is evicted is asked of the ranking, on the device and on the host."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

from sglang_histate.adapter.device_walk import RankedEviction
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.units import Unit


class HiStateFullComponent(RankedEviction, FullComponent):
    """`FullComponent` with the ranking's order of eviction."""

    def device_queue(self) -> EvictionQueue:
        assert self.ranking is not None
        return self.ranking.device_kv

    def drive_host_eviction(
        self, num_tokens: int, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: list[Any]
    ) -> None:
        """Free at least `num_tokens` tokens of host KV, or what can be freed."""
        if self.ranking is None:
            super().drive_host_eviction(num_tokens, tracker, device_frees, host_frees, cache_actions)
            return
        core = self.tree_core
        while tracker[ComponentType.FULL] < num_tokens:
            unit = self.ranking.host.victim(self._usable_on_host)
            if unit is None:
                return
            self.ranking.evicted(unit, Tier.HOST)
            if unit.cut is not None:
                node = core.node_by_id(unit.cut[0])
                _, action = core._split_node(node.key, node, unit.cut[1])
                if action is not None:
                    cache_actions.append(action)
            for node in [core.node_by_id(node_id) for node_id in unit.nodes]:
                if node not in core.evictable_host_leaves or tracker[ComponentType.FULL] >= num_tokens:
                    break
                core._evict_host_leaf(node, tracker, device_frees, host_frees, cache_actions=cache_actions)

    def _usable_on_host(self, unit: Unit) -> bool:
        core = self.tree_core
        return bool(unit.nodes) and core.node_by_id(unit.nodes[0]) in core.evictable_host_leaves
