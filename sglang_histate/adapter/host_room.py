"""Room in the host arena: what is evicted when an allocation does not fit."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType


def make_host_room(cache: Any, pages: int) -> None:
    """Evict from the tree's host side until `pages` more are free. What goes, KV or states, is the ranking's choice.

    What is locked or on its way stays; then less becomes free.
    """
    face = cache.host_pool_group.get_pool(PoolName.KV)
    cache.evict_host(pages * face.page_size, ComponentType.FULL)
