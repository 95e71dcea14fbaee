"""HiCache's host side on one arena, plugged in as a stack strategy: SGLang's controller, our two host pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    StackBuildResult,
    _evict_mamba_for_device_alloc,
    _MambaStrategy,
    _stage_local_layer_mapping,
    build_pool_entry,
    register_stack_strategy,
)
from sglang.srt.mem_cache.pool_host import HostPoolGroup
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_memory

from sglang_histate.adapter.arena_face import SharedArena
from sglang_histate.adapter.arena_transfers import ArenaTransfers
from sglang_histate.adapter.host_budget import HostBudget
from sglang_histate.adapter.host_room import make_host_room
from sglang_histate.adapter.kv_face import KvFace
from sglang_histate.adapter.state_face import StateFace
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.copy import CopyEngine
from sglang_histate.pool import HostArena


@dataclass(frozen=True)
class HostPlan:
    """What the next cache of this process is built with."""

    budget: HostBudget
    layout: StateLayout
    engine: CopyEngine  # between device and host


class ArenaStrategy(_MambaStrategy):
    """SGLang's strategy for KV and recurrent states, with both host pools on one arena.

    A subclass, so that SGLang still checks that every pool which the model declares was built.
    """

    plan: HostPlan | None = None

    def matches(self, kvcache: Any, components: set[ComponentType]) -> bool:
        return self.plan is not None and super().matches(kvcache, components)

    def build(
        self,
        *,
        cache: Any,
        kvcache: Any,
        params: Any,
        server_args: Any,
        load_cache_event: Any,
        storage_backend: str | None = None,
        **storage: Any,
    ) -> StackBuildResult:
        plan = self.plan
        assert plan is not None and storage_backend is None
        (declaration,) = kvcache.host_pool_decls()
        kv_pool, mamba_pool = declaration.device_pool, params.req_to_token_pool.mamba_pool
        (kv_info,), (state_info,) = kv_pool.get_device_pool_infos(), mamba_pool.get_device_pool_infos()
        kv_layers = _stage_local_layer_mapping(kvcache.full_attention_layer_id_mapping, kvcache.start_layer)
        state_layers = {layer - kvcache.start_layer: i for i, layer in enumerate(state_info.layer_ids)}
        last_layer = max(kv_layers.keys() | state_layers.keys()) + 1
        memory = get_memory()
        shared = SharedArena(
            HostArena(plan.budget.pages, plan.budget.page_bytes),
            kv_info.buffer_info.device,
            lambda pages: make_host_room(cache, pages),
            plan.engine,
        )
        kv_face = KvFace(
            shared, kv_info.buffer_info, page_size=params.page_size, layout=memory.hicache_mem_layout
        )
        state_face = StateFace(shared, state_info.buffer_info, plan.layout, layout=memory.hicache_mem_layout)
        allocator = params.req_to_token_pool.mamba_allocator
        group = HostPoolGroup(
            [
                build_pool_entry(
                    name=PoolName.KV,
                    host_pool=kv_face,
                    device_pool=kv_pool,
                    layer_mapping=kv_layers,
                    transfer_layer_id_max=last_layer,
                    is_anchor=True,
                    host_evict_fn=_nothing_more,
                ),
                build_pool_entry(
                    name=PoolName.MAMBA,
                    host_pool=state_face,
                    device_pool=mamba_pool,
                    layer_mapping=state_layers,
                    transfer_layer_id_max=last_layer,
                    host_evict_fn=_nothing_more,
                    device_evict_fn=lambda count: _evict_mamba_for_device_alloc(cache, count),
                    device_alloc_fn=allocator.alloc,
                    device_free_fn=allocator.free,
                ),
            ]
        )
        controller = HybridCacheController(
            params.token_to_kv_pool_allocator,
            group,
            params.page_size,
            params.tp_cache_group,
            load_cache_event=load_cache_event,
            attn_cp_group=params.attn_cp_cache_group,
            attn_tp_group=params.attn_tp_cache_group,
            pp_group=params.pp_cache_group,
            write_policy=memory.hicache_write_policy,
            io_backend=memory.hicache_io_backend,
            transfer_layer_id_max=last_layer,
            host_memory_mode=memory.hicache_host_memory_mode,
        )
        controller.l2_transfer_engine = ArenaTransfers(memory.hicache_io_backend)
        return StackBuildResult(
            host_pool_group=group,
            cache_controller=controller,
            component_host_pools={ComponentType.FULL: kv_face, ComponentType.MAMBA: state_face},
            register_req_to_token_counter=True,
            pools_desc="KV + MAMBA on one arena",
            pool_declarations=(declaration,),
        )


def _nothing_more(count: int) -> int:
    """SGLang's callback after a failed allocation. The faces have made what room there is before they failed."""
    return 0


_STRATEGY = ArenaStrategy()


def use_arena(budget: HostBudget, layout: StateLayout, engine: CopyEngine) -> None:
    """Have the next radix cache of this process build its host side on one arena, filled and read by `engine`."""
    if _STRATEGY.plan is None:
        register_stack_strategy(_STRATEGY)
    _STRATEGY.plan = HostPlan(budget, layout, engine)
