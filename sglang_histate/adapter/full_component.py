"""KV in the radix tree under HiState: what is evicted is asked of the ranking, on the device and on the host."""

from __future__ import annotations

from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

from sglang_histate.adapter.ranked_eviction import RankedEviction
from sglang_histate.policy.queue import EvictionQueue


class HiStateFullComponent(RankedEviction, FullComponent):
    """`FullComponent` with the ranking's order of eviction."""

    def device_queue(self) -> EvictionQueue:
        assert self.ranking is not None
        return self.ranking.device_kv

    def host_pages(self, count: int) -> int:
        assert self.ranking is not None
        return self.ranking.host_pages(
            kv_tokens=-(-count // self.tree_core.page_size) * self.tree_core.page_size, states=0
        )
