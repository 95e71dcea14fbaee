"""The host tier in the status: bytes by kind on one budget."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName

from sglang_histate.pool import HostArena, Kind
from sglang_histate.store.records import RecordPool


def host_status(tree_cache: Any, records: RecordPool) -> dict[str, Any]:
    """Return what KV (in tokens), states and checkpoints in flight hold, and the bytes of all of them.

    KV and states share the arena, so each one's total is what it could have now, and the two totals overlap.
    ``total_bytes`` is the whole budget of this rank, in-flight memory included; ``free_bytes`` is free in the arena,
    ``peak_bytes`` the most that was ever used of it.
    """
    group = tree_cache.host_pool_group
    kv, states = group.get_pool(PoolName.KV), group.get_pool(PoolName.MAMBA)
    arena: HostArena = kv.arena
    inflight_bytes = int(records.memory.nbytes)
    return {
        "kv": {
            "used": arena.used_pages(Kind.KV) * kv.page_size,
            "total": arena.used_pages(Kind.KV) * kv.page_size + kv.available_size(),
            "used_bytes": arena.used_bytes(Kind.KV),
            "total_bytes": arena.used_bytes(Kind.KV) + arena.free_bytes,
        },
        "states": {
            "used": states.held,
            "total": states.held + states.available_size(),
            "used_bytes": arena.used_bytes(Kind.STATE),
            "total_bytes": arena.used_bytes(Kind.STATE) + arena.free_bytes,
        },
        "inflight": {
            "used": records.total - records.free,
            "total": records.total,
            "used_bytes": (records.total - records.free) * (inflight_bytes // records.total),
            "total_bytes": inflight_bytes,
        },
        "page_bytes": arena.page_bytes,
        "arena_bytes": arena.total_bytes,
        "free_bytes": arena.free_bytes,
        "peak_bytes": arena.peak_pages * arena.page_bytes,
        "total_bytes": arena.total_bytes + inflight_bytes,
    }
