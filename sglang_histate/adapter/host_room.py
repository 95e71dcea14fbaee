"""Room in the host arena: what is evicted when an allocation does not fit."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.pool import Kind


def make_host_room(cache: Any, pages: int, kind: Kind) -> None:
    """Evict from the tree's host side until `pages` more are free: entries of `kind` first, then the other kind.

    What is locked or on its way stays; then less becomes free. The victims among one kind are the tree's choice.
    """
    faces = {
        Kind.KV: cache.host_pool_group.get_pool(PoolName.KV),
        Kind.STATE: cache.host_pool_group.get_pool(PoolName.MAMBA),
    }
    arena = faces[kind].arena
    wanted = arena.free_pages + pages
    for victim in sorted(Kind, key=lambda other: other is not kind):
        missing = wanted - arena.free_pages
        if missing <= 0:
            return
        if victim is Kind.KV:
            cache.evict_host(missing * faces[Kind.KV].page_size, ComponentType.FULL)
        else:
            cache.evict_host(-(-missing // faces[Kind.STATE].pages_per_slot), ComponentType.MAMBA)
