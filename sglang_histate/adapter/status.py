"""GET /histate/status: configuration, tiers with bytes used and total, counters by reason. JSON.

The route of `purge.py` is added here too: same rule of who may call it as for /flush_cache.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from sglang_histate.adapter import purge
from sglang_histate.adapter.cache import HiStateCache
from sglang_histate.adapter.device_pool import device_status
from sglang_histate.adapter.host_status import host_status
from sglang_histate.adapter.ssd_status import ssd_status


def cache_status(tree_cache: Any) -> dict[str, Any]:
    """Return one scheduler's status as JSON values. Runs on the scheduler thread."""
    if not isinstance(tree_cache, HiStateCache) or tree_cache.tier is None:
        return {"enabled": False}
    facts = tree_cache.status_facts
    assert facts is not None
    stats = tree_cache.tier.store.stats()
    kv_bytes, state_bytes = facts["kv_bytes_per_token"], facts["checkpoint_bytes"]
    allocator = tree_cache.token_to_kv_pool_allocator
    states = tree_cache.req_to_token_pool.mamba_allocator
    return {
        "enabled": True,
        **facts,
        "copy_engine": None if tree_cache.copies is None else tree_cache.copies.as_json(),
        "tiers": {
            "device": device_status(allocator, states, kv_bytes, state_bytes),
            "host": host_status(tree_cache, tree_cache.tier.store.records),
            "ssd": ssd_status(tree_cache.tier.store),
        },
        "eviction": {
            **tree_cache.tier.ranking.as_json(),
            # Only one rank answers; all of them run this in the same step.
            "ranks_agree": tree_cache.tier.ranks_agree(),
        },
        "verification": tree_cache.tier.verification.as_json(),
        "inflight": {
            "records_free": stats.buffers_free,
            "records_total": stats.buffers_total,
            "writes": stats.writes_queued,
            "reads": stats.reads_in_flight,
            "fault_ins": len(tree_cache.tier.fault_ins),
        },
        "counters": {
            **tree_cache.tier.counters.as_json(),
            "ssd_written_bytes_total": stats.bytes_written,
            "ssd_read_bytes_total": stats.bytes_read,
            "ssd_reads_total": stats.reads_ok,
            "ssd_reads_from_inflight_total": stats.reads_shared,
            "ssd_puts_total": {reason.value: count for reason, count in stats.puts.items()},
            "ssd_read_misses_total": {reason.value: count for reason, count in stats.misses.items()},
            "ssd_entries_dropped_total": {reason.value: count for reason, count in stats.drops.items()},
            "ssd_writes_cancelled_total": {reason.value: n for reason, n in stats.cancelled.items()},
        },
        "locks": {
            "kv_protected_tokens": tree_cache.full_protected_size(),
            "states_protected": tree_cache.mamba_protected_size(),
            "requests_waiting_for_reads": tree_cache.tier.fault_ins.waiting,
            "requests_with_pinned_state": tree_cache.tier.fault_ins.pinned,
            "host_locks": host_lock_count(tree_cache),
        },
    }


def host_lock_count(tree_cache: Any) -> int:
    """Return how many nodes hold a lock on their host KV or host state."""
    nodes, locked = list(tree_cache.tree_core.root_node.children.values()), 0
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children.values())
        locked += any(data.host_lock_ref > 0 for data in node.component_data)
    return locked


def install_routes(app: Any) -> None:
    """Add HiState's routes to SGLang's HTTP application."""
    from sglang.srt.managers.io_struct import GetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @app.get("/histate/status")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def histate_status() -> dict[str, Any]:
        from sglang.srt.entrypoints.http_server import _global_state

        states = await _global_state.tokenizer_manager.get_internal_state()
        ranks = [state.get("histate", {"enabled": False}) for state in states]
        return {"enabled": all(rank["enabled"] for rank in ranks), "ranks": ranks, **ranks[0]}

    @app.post("/histate/purge")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def histate_purge(request: Request) -> Response:
        from sglang.srt.entrypoints.http_server import _global_state

        manager = _global_state.tokenizer_manager

        async def ask(rid: str) -> list[dict[str, Any]]:
            manager.auto_create_handle_loop()
            replies = await manager.get_internal_state_communicator(GetInternalStateReq(rid=rid))
            return [reply.internal_state.get("histate", {"enabled": False}) for reply in replies]

        try:
            task = purge.task_of(await request.json())
        except ValueError as error:  # also of a body that is no JSON
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse(await purge.run(ask, task))
