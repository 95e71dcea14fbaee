"""The device pools of one rank: KV and states, in two fixed shares or in one pool of bytes (unified memory).

In one pool the ids that the scheduler, the tree and a request's rows hold are *virtual*: a page or a state may be moved
to make room, its id stays. Code that reads the pool's tensors translates first, and keeps moves off while it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator


def is_one_pool(allocator: Any) -> bool:
    """Return True if KV and states share the device bytes."""
    return isinstance(allocator, UnifiedMambaTokenToKVPoolAllocator)


def keep_in_place(allocator: Any, reading: Callable[[], bool]) -> None:
    """Let nothing be moved inside one pool while `reading` returns True, which must be alike on all ranks.

    Two shares never move anything. SGLang has a gate for its host transfers, which is taken, and one for disaggregation,
    which HiState refuses; this one uses the second.
    """
    if is_one_pool(allocator):
        allocator.set_disagg_move_gate(lambda: not reading())


def kv_bytes_per_token(allocator: Any) -> int:
    """Return one rank's KV bytes per token over all full-attention layers, without padding."""
    kv_cache = allocator.get_kvcache()
    full = getattr(kv_cache, "full_kv_pool", kv_cache)
    rows = [*(layer[0] for layer in full.k_buffer), *(layer[0] for layer in full.v_buffer)]
    return sum(row.numel() * row.element_size() for row in rows)


def device_status(allocator: Any, states: Any, kv_bytes: int, state_bytes: int) -> dict[str, Any]:
    """Return what each kind uses and may use, and the bytes of both together.

    `states` is the allocator of states. In one pool each kind's total is what it could have now, so the two totals
    overlap; `total_bytes` is the budget that they share.
    """
    kv_total, kv_used = allocator.size, allocator.size - allocator.available_size()
    if not is_one_pool(allocator):
        kv = _usage(kv_used, kv_total, kv_bytes)
        state = _usage(states.size - states.available_size(), states.size, state_bytes)
        return {
            "one_pool": False,
            "kv": kv,
            "states": state,
            "used_bytes": kv["used_bytes"] + state["used_bytes"],
            "total_bytes": kv["total_bytes"] + state["total_bytes"],
        }
    full_end, state_end = allocator.full_attn_allocator, allocator.mamba_allocator
    # The entries in the pool are padded, and the first bytes take what kernels write for padding rows.
    kv = _usage(kv_used, kv_total, full_end.entry_bytes)
    live = state_end.allocated_count()
    state = _usage(live, live + state_end.schedulable_available_size(), state_end.entry_bytes)
    sink = min(end.min_page_index * end.entry_bytes_per_page for end in (full_end, state_end))
    return {
        "one_pool": True,
        "kv": kv,
        "states": state,
        "used_bytes": kv["used_bytes"] + state["used_bytes"],
        "total_bytes": allocator.unified_buffer.total_bytes - sink,
    }


def _usage(used: int, total: int, unit_bytes: int) -> dict[str, int]:
    return {
        "used": used,
        "total": total,
        "used_bytes": used * unit_bytes,
        "total_bytes": total * unit_bytes,
    }
