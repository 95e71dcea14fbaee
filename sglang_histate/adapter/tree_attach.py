"""Attach a state that was read from the SSD to the radix tree, on the host side, at any page boundary.

The stock load-back then treats it like any state that HiCache kept in host memory.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import get_and_increase_time_counter


class Attach(Enum):
    """What became of an attach. Only ATTACHED keeps the slot."""

    ATTACHED = "attached"
    PRESENT = "present"  # another request brought a state there meanwhile
    KV_GONE = "kv_gone"  # some KV before the position is on neither device nor host any more
    NO_HOST_KV = "no_host_kv"  # the KV of the node has no host copy and there is no room for one


def attach_host_state(cache: Any, key: RadixKey, slot: torch.Tensor) -> tuple[Attach, Any]:
    """Give the tree the host state `slot` (one index) at the end of `key`, splitting a node there if needed.

    `key` is page aligned. Locks, KV and the states of other nodes stay as they are.

    Returns:
        what became of it, and the id of the node that has a state there now (None if none has).
    """
    core = cache.tree_core
    node, offset = core.root_node, 0
    while offset < len(key):
        child = node.children.get(key.child_key_at(offset, core.page_size))
        if child is None or core.is_dead(child):
            return Attach.KV_GONE, None
        matched = child.key.match_at(key, offset, page_size=core.page_size)
        offset += matched
        if matched == len(child.key):
            node = child
            continue
        if offset < len(key):
            return Attach.KV_GONE, None
        node, actions = core.cut(child, matched)
        cache._apply_cache_actions(actions)
    data = node.component_data[ComponentType.MAMBA]
    if data.value is not None or data.host_value is not None:
        return Attach.PRESENT, node.id
    if not node.backuped:
        # A host state over KV that is only on the device would break an invariant of the tree.
        cache._execute_and_commit_kv_backup(core.build_backup_kv_action(node.id))
        if not node.backuped:
            return Attach.NO_HOST_KV, None
    data.host_value = slot.clone()
    core.host_lru_lists[ComponentType.MAMBA].insert_mru(node)
    node.last_access_time = get_and_increase_time_counter()
    core._update_evictable_leaf_sets(node)
    return Attach.ATTACHED, node.id
