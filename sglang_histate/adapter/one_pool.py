"""Admission with one pool of bytes for KV and states: what a request needs, and what either kind can give the other.

Stock admits by evictable KV and by evictable states, each on its own. In one pool the bytes of one are room for the
other: a long prompt may come in where many states lie, and a state where KV lies. Where moves are forbidden (a host
copy is under way on a GPU), what is evicted leaves holes that only its own kind can fill, and nothing is promised.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams


class OnePool:
    """The arithmetic of one pool, in tokens of KV and in states. Scheduler thread only."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._kv = cache.token_to_kv_pool_allocator.full_attn_allocator
        self._states = cache.token_to_kv_pool_allocator.mamba_allocator

    def uncounted_states(self, req: Any) -> int:
        """Return the states that `req` takes besides the one it computes on.

        The tracking slots of a new request, and a fresh one in place of the slot that publishing its prompt gives away.
        """
        tracking = self._cache.req_to_token_pool.mamba_initial_tracking_slots
        return 1 + (tracking if req.kv.mamba_ping_pong_track_buffer is None else 0)

    def states_in_place_of_kv(self) -> int:
        if self._kv.moves_blocked():
            return 0
        kv_bytes = self._cache.full_evictable_size() * self._kv.entry_bytes
        return int(kv_bytes // self._states.entry_bytes)

    def kv_in_place_of_states(self) -> int:
        if self._states.moves_blocked():
            return 0
        state_bytes = self._cache.mamba_evictable_size() * self._states.entry_bytes
        return int(state_bytes // self._kv.entry_bytes)

    def make_room(self, kv_tokens: int) -> None:
        """Evict and move until `kv_tokens` of KV, or as many bytes of states, fit without another move."""
        allocator = self._cache.token_to_kv_pool_allocator
        short = kv_tokens - allocator.available_size()
        if short > 0:
            self._cache.evict_for_alloc(EvictParams(num_tokens=short))
        for end in (self._states, self._kv):
            end.flush_for_allocation()
