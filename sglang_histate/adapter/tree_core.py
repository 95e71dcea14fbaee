"""SGLang's Python tree core that tells the ranking of every node and of every change of where its data is.

A node whose KV is on the SSD only stays in the tree as a *dead* node, in SGLang's words: neither device nor host has
its KV. Matches stop before it, an insert revives it, a fault-in gives it a host copy again. All below it is dead too.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType, EvictLayer
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import (
    EvictDeviceLeafResult,
    UnifiedTreeCore,
    _set_tlru_lens_and_raise_history,
)

from sglang_histate.adapter.ranking import Ranking

BACKEND = "histate"


class HiStateTreeCore(UnifiedTreeCore):
    """`UnifiedTreeCore`; without a ranking (while the cache builds itself) it behaves as stock."""

    ranking: Ranking | None = None
    deaths = 0  # nodes that became dead so far
    _splitting = False

    def _update_evictable_leaf_sets(self, node: Any) -> None:
        # The base class calls this after every change of a node's data or locks, and for every new node.
        super()._update_evictable_leaf_sets(node)
        if self.ranking is not None and not self._splitting:
            self.ranking.sync(node)

    def _split_node(self, key: Any, child: Any, split_len: int) -> tuple[Any, Any]:
        self._splitting = True
        try:
            upper, action = super()._split_node(key, child, split_len)
        finally:
            self._splitting = False
        if self.ranking is not None:
            self.ranking.split(child, upper)
        return upper, action

    def cut(self, node: Any, tokens: int) -> tuple[Any, list[Any]]:
        """Split `node` after `tokens` tokens; return its new upper part, and the actions for the cache to apply."""
        upper, action = self._split_node(node.key, node, tokens)
        return upper, [] if action is None else [action]

    def drop_state(
        self,
        node: Any,
        layer: EvictLayer,
        tracker: Any,
        device_frees: Any,
        host_frees: Any,
        cache_actions: list[Any],
    ) -> None:
        """Free the recurrent state of `node` on one layer; its KV stays."""
        self._evict_component_and_detach_lru(
            node,
            self.components_by_type[ComponentType.MAMBA],
            target=layer,
            tracker=tracker,
            device_frees=device_frees,
            host_frees=host_frees,
            cache_actions=cache_actions,
        )
        self._update_evictable_leaf_sets(node)

    def is_dead(self, node: Any) -> bool:
        """Return whether neither device nor host has the KV of `node`."""
        full = node.component_data[ComponentType.FULL]
        return full.value is None and full.host_value is None

    def plant(self, parent: Any, key: Any) -> Any:
        """Add a dead node for the page-aligned `key` below `parent`, which has no child for it; return the node."""
        node = self._new_node(priority=parent.priority)
        node.parent, node.key = parent, key
        node.rotation_base = parent.rotation_base
        if self.tlru_bookkeeping:
            _set_tlru_lens_and_raise_history(node, parent)
        parent.children[key.child_key(self.page_size)] = node
        self._update_evictable_leaf_sets(node)
        self._update_evictable_leaf_sets(parent)
        return node

    def make_dead(
        self, node: Any, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: list[Any]
    ) -> None:
        """Free what the host has of an evictable host leaf; the node stays, because the SSD has its KV."""
        assert self._is_host_leaf(node), f"node {node.id} is not a host leaf"
        self.kv_events.record_remove(node, medium=StorageMedium.CPU)
        for component in self.components:
            self._evict_component_and_detach_lru(
                node,
                component,
                target=EvictLayer.HOST,
                tracker=tracker,
                device_frees=device_frees,
                host_frees=host_frees,
                cache_actions=cache_actions,
            )
        self.full_host_duplicates.pop(node.id, None)
        self.deaths += 1
        self._update_evictable_leaf_sets(node)
        self._update_evictable_leaf_sets(node.parent)

    def evict_device_leaf(self, node_id: Any, is_write_back: bool) -> Any:
        node = self.node_by_id(node_id)
        if self.ranking is None or node.backuped or is_write_back or not self.ranking.ssd.has_kv(node_id):
            return super().evict_device_leaf(node_id, is_write_back)
        # No host copy, but the SSD has the KV: the node stays.
        self.deaths += 1
        result = EvictDeviceLeafResult()
        full = self.components_by_type[ComponentType.FULL]
        frees = (result.device_frees, result.host_frees, result.cache_actions)
        self._evict_component_and_detach_lru(
            node, full, *frees, target=EvictLayer.DEVICE, tracker=result.tracker
        )
        self._cascade_evict(node, full, result.tracker, *frees)
        self.kv_events.record_remove(node, medium=StorageMedium.GPU)
        self._update_evictable_leaf_sets(node.parent)
        return result

    def remove_dead(self, node: Any) -> None:
        """Remove a dead node and all below it, which is dead too."""
        parent = node.parent
        self._remove_leaf_from_parent(node)
        self._update_evictable_leaf_sets(parent)

    def _is_host_leaf(self, node: Any) -> bool:
        if not node.children:
            return super()._is_host_leaf(node)
        if not all(self.is_dead(child) for child in node.children.values()):
            return False
        children, node.children = node.children, {}
        try:
            return super()._is_host_leaf(node)
        finally:
            node.children = children

    def _collect_all_nodes(self) -> list[Any]:
        # For SGLang's checks of itself, to which a dead node is an error.
        return [
            node for node in super()._collect_all_nodes() if node is self.root_node or not self.is_dead(node)
        ]

    def _remove_leaf_from_parent(self, node: Any) -> None:
        below = list(node.children.values())
        for dead in below:
            assert self.is_dead(dead), f"node {dead.id} below {node.id} would be lost"
            below.extend(dead.children.values())
        for gone in (*reversed(below), node):
            super()._remove_leaf_from_parent(gone)
            if self.ranking is not None:
                self.ranking.removed(gone)
        if node.parent.children:
            # SGLang looks at a parent only when its last child goes; here the others may all be dead.
            self._update_evictable_leaf_sets(node.parent)

    def set_component_device_value(self, node_id: Any, component_type: Any, value: Any) -> None:
        super().set_component_device_value(node_id, component_type, value)
        if self.ranking is not None:
            self.ranking.sync(self.node_by_id(node_id))

    def reset(self) -> None:
        super().reset()
        if self.ranking is not None:
            self.ranking.reset(self.root_node.id)


def register() -> str:
    """Make the core known to SGLang, once per process, and return its name."""
    if BACKEND not in registered_tree_core_backends():
        register_tree_core_backend(BACKEND, HiStateTreeCore)
    return BACKEND
