"""What SGLang's tree components have in common under HiState: their evictions are the ranking's."""

from __future__ import annotations

from typing import Any

from sglang_histate.adapter.device_walk import DeviceWalk
from sglang_histate.adapter.host_walk import HostWalk
from sglang_histate.adapter.policy_time import Part
from sglang_histate.adapter.ranking import Ranking
from sglang_histate.policy.queue import EvictionQueue


# mypy cannot see the class that the mixin will stand before.
class RankedEviction:
    """Mixed into SGLang's tree components: steps of eviction from the ranking. Without one it behaves as stock."""

    ranking: Ranking | None = None
    _walk: DeviceWalk | None = None
    _evict_device_request_cnt: int

    def device_queue(self) -> EvictionQueue:
        """Return the queue of the pool that is short when this component's data is asked to go."""
        raise NotImplementedError

    def host_pages(self, count: int) -> int:
        """Return the pages of the host arena that `count` of this component's units (tokens, states) take."""
        raise NotImplementedError

    def _evict_device_start(self: Any, request_cnt: int) -> None:
        if self.ranking is None:
            super()._evict_device_start(request_cnt)  # type: ignore[misc]
            return
        self._evict_device_request_cnt = request_cnt
        self._walk = DeviceWalk(self.tree_core, self.ranking, self.device_queue())

    def _evict_device_next_node(
        self: Any, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: list[Any]
    ) -> Any:
        if self._walk is None:
            return super()._evict_device_next_node(  # type: ignore[misc]
                tracker, device_frees, host_frees, cache_actions
            )
        if tracker[self.component_type] >= self._evict_device_request_cnt:
            return None
        timer, frees = self.ranking.policy_time, (device_frees, host_frees, cache_actions)
        return timer.run(Part.EVICT, self._walk.step, tracker, *frees)

    def _evict_device_end(self: Any) -> None:
        super()._evict_device_end()  # type: ignore[misc]
        self._walk = None

    def drive_host_eviction(
        self: Any,
        num_tokens: int,
        tracker: Any,
        device_frees: Any,
        host_frees: Any,
        cache_actions: list[Any],
    ) -> None:
        """Free as many pages of the host arena as `num_tokens` of this component take, or what can be freed."""
        if self.ranking is None:
            super().drive_host_eviction(num_tokens, tracker, device_frees, host_frees, cache_actions)  # type: ignore[misc]
            return
        walk = HostWalk(self.tree_core, self.ranking, tracker, device_frees, host_frees, cache_actions)
        self.ranking.policy_time.run(Part.EVICT, walk.free, self.host_pages(num_tokens))

    def evict_component(self: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        freed = super().evict_component(node, *args, **kwargs)  # type: ignore[misc]
        self._sync(node)
        return freed

    def commit_hicache_transfer(self: Any, node: Any, *args: Any, **kwargs: Any) -> None:
        super().commit_hicache_transfer(node, *args, **kwargs)  # type: ignore[misc]
        self._sync(node)

    def commit_insert_component_data(self: Any, node: Any, *args: Any, **kwargs: Any) -> None:
        super().commit_insert_component_data(node, *args, **kwargs)  # type: ignore[misc]
        self._sync(node)

    def _sync(self, node: Any) -> None:
        if self.ranking is not None:
            self.ranking.sync(node)
