"""What GET /histate/status answers: configuration, tiers with bytes used and total, counters by reason. JSON."""

from __future__ import annotations

from typing import Any

from sglang_histate.adapter.cache import HiStateCache
from sglang_histate.adapter.metric import Figures
from sglang_histate.adapter.metric_table import METRICS
from sglang_histate.adapter.metrics import metrics_as_json
from sglang_histate.adapter.ssd_status import ssd_status


def cache_status(tree_cache: Any) -> dict[str, Any]:
    """Return one scheduler's status as JSON values. Runs on the scheduler thread."""
    if not isinstance(tree_cache, HiStateCache) or tree_cache.tier is None:
        return {"enabled": False}
    figures = Figures.of(tree_cache)
    stats = figures.stats
    return {
        "enabled": True,
        **figures.facts,
        "copy_engine": _copy_engine(tree_cache),
        "tiers": {
            "device": figures.device,
            "host": figures.host,
            "ssd": ssd_status(tree_cache.tier.store, stats),
        },
        "eviction": {
            **tree_cache.tier.ranking.as_json(),
            **tree_cache.tier.prices(),
            # Only one rank answers; all of them run this in the same step.
            "ranks_agree": tree_cache.tier.ranks_agree(),
            "hits_expected": tree_cache.tier.hits_expected(),
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
        "metrics": metrics_as_json(METRICS, figures),
    }


def _copy_engine(tree_cache: HiStateCache) -> dict[str, Any] | None:
    """What copies between device and host, and what packs records before."""
    if tree_cache.copies is None or tree_cache.packing is None:
        return None
    return {**tree_cache.copies.as_json(), "pack": tree_cache.packing.as_json()}


def host_lock_count(tree_cache: Any) -> int:
    """Return how many nodes hold a lock on their host KV or host state."""
    nodes, locked = list(tree_cache.tree_core.root_node.children.values()), 0
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children.values())
        locked += any(data.host_lock_ref > 0 for data in node.component_data)
    return locked
