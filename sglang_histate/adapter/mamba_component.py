"""Recurrent states in the radix tree under HiState: they live on the device and on the SSD, not in host backups.

Stock HiCache copies every state to host memory with its KV. HiState captures states straight into SSD records, so a
backup would only fill host memory. A state reaches the host side of the tree in one way: attached after a read.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase
from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

from sglang_histate.adapter.request_state import state_of


class HiStateMambaComponent(MambaComponent):
    """`MambaComponent` without host backups, and with the branch point handed to the capture plan."""

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
        state.restorable = _depth(result.best_match_node)
        state.branch = result.mamba_branching_seqlen
        # Stock replaces the prompt's final checkpoint by the branch point; the capture plan takes both.
        return result._replace(mamba_branching_seqlen=None)

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
