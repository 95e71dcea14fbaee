"""SGLang's Python tree core that tells the ranking of every node and of every change of where its data is."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

from sglang_histate.adapter.ranking import Ranking

BACKEND = "histate"


class HiStateTreeCore(UnifiedTreeCore):
    """`UnifiedTreeCore`; without a ranking (while the cache builds itself) it behaves as stock."""

    ranking: Ranking | None = None
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

    def _remove_leaf_from_parent(self, node: Any) -> None:
        super()._remove_leaf_from_parent(node)
        if self.ranking is not None:
            self.ranking.removed(node)

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
