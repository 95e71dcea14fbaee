"""Recurrent states in the radix tree under HiState: they live on the device and on the SSD, not in host backups.

Stock HiCache copies every state to host memory with its KV. HiState captures states straight into SSD records, so a
backup would only fill host memory. A state reaches the host side of the tree in one way: attached after a copy from a record.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

from sglang_histate.adapter.ranked_eviction import RankedEviction
from sglang_histate.adapter.request_state import state_of
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.queue import EvictionQueue


class HiStateMambaComponent(RankedEviction, MambaComponent):
    """`MambaComponent` without host backups, and with the branch point handed to the capture plan."""

    # Whether a state that the SSD does not have stays on the host while the device has it too.
    keeps_host_only = False

    def device_queue(self) -> EvictionQueue:
        assert self.ranking is not None
        return self.ranking.device_states

    def needs_incremental_backup(self, node: Any) -> bool:
        return False

    def build_hicache_transfers(self, node: Any, phase: CacheTransferPhase, **kwargs: Any) -> Any:
        if phase == CacheTransferPhase.BACKUP_HOST:
            return None
        return super().build_hicache_transfers(node, phase, **kwargs)

    def finalize_match_result_in_tree_core(
        self,
        result: MatchResult,
        params: MatchPrefixParams,
        value_chunks: list[torch.Tensor],
        best_value_len: int,
    ) -> MatchResult:
        result = super().finalize_match_result_in_tree_core(result, params, value_chunks, best_value_len)
        if params.req is None:
            return result
        state = state_of(params.req, self.tree_core.page_size)
        state.kv_covered = result.full_kv_hit_length
        state.last_visited = result.last_visited_node_id
        state.restorable = _depth(result.best_match_node)
        state.branch = result.mamba_branching_seqlen
        # Stock replaces the prompt's final checkpoint by the branch point; the capture plan takes both.
        return result._replace(mamba_branching_seqlen=None)

    def finalize_match_result_in_cache(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        req = params.req
        if not params.cow_mamba or req is None or req.kv.holds_mamba or self.cache.one_pool is None:
            return super().finalize_match_result_in_cache(params, result)
        source = self.tree_core.get_component_device_value(result.best_match_node, self.component_type)
        if source is None or self._has_room(result.best_match_node):
            return super().finalize_match_result_in_cache(params, result)
        # Everything is in use. Admission refuses the request for now; if it lets it in, its slot is filled from here.
        req.kv.mamba_cow_src_index = source
        req.kv.mamba_needs_clear = False
        return result

    def has_room_to_load(self, node_id: Any, req: Any) -> bool:
        """Return False if one pool has no room for the state on the host that `req` would be given a slot for."""
        if req is None or req.kv.holds_mamba or self.cache.one_pool is None:
            return True
        host_only = self.tree_core.component_has_host_value_only(node_id, self.component_type)
        return not host_only or self._has_room(node_id)

    def _has_room(self, keep: Any = None) -> bool:
        """Return True if one more state fits, after evicting what may go; the node `keep` stays."""
        allocator = self.cache.req_to_token_pool.mamba_allocator
        if allocator.schedulable_available_size() > 0:
            return True
        lock = None if keep is None else self.cache.inc_lock_ref(keep).to_dec_params()
        self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
        if lock is not None:
            self.cache.dec_lock_ref(keep, lock)
        return allocator.schedulable_available_size() > 0

    def prepare_for_caching_req(
        self, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
    ) -> int | None:
        if not is_finished and req.kv.mamba_last_track_seqlen is not None and not self._has_room():
            return 0  # giving the state away takes a fresh slot: the request goes on without being cached
        length = super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        # The tree cuts the key to whole pages but not the state: a state between two pages would be found under a
        # shorter prefix than it has read. Length 0 makes the caller insert nothing and free the slot.
        return 0 if length is not None and length % self.tree_core.page_size else length

    def host_pages(self, count: int) -> int:
        assert self.ranking is not None
        return self.ranking.host_pages(kv_tokens=0, states=count)

    def drop_loaded_host_state(self, node_id: Any) -> None:
        """Free the host copy of a state that is on the device now, unless a waiting request has pinned it.

        As a rule the SSD still has it, and the host LRU does not list states that are also on the device.
        """
        node = self.tree_core.node_by_id(node_id)
        data = node.component_data[self.component_type]
        if data.value is None or data.host_value is None or data.host_lock_ref > 0:
            return
        assert self.ranking is not None
        place = node.id, len(node.key)
        if self.keeps_host_only and not self.ranking.has_checkpoint(place, Tier.SSD):
            return
        slot, data.host_value = data.host_value, None
        self.free_host_slot(slot)
        self._sync(node)

    def free_host_slot(self, slot: torch.Tensor) -> None:
        """Return one host state slot that is not in the tree."""
        self.free_host_values([slot])


def _depth(node: Any) -> int:
    """Return the tokens from the root to the end of `node`."""
    depth = 0
    while node.parent is not None:
        depth += len(node.key)
        node = node.parent
    return depth
