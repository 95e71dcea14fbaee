"""A real `HiStateCache` over tiny pools on the CPU, built as SGLang builds it, without model, scheduler or server."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_histate.adapter import tree_core
from sglang_histate.adapter.cache import HiStateCache
from sglang_histate.adapter.full_component import HiStateFullComponent
from sglang_histate.adapter.host_budget import HostBudget, pages_by_ratio
from sglang_histate.adapter.host_slots import HostSlots
from sglang_histate.adapter.host_stack import use_arena
from sglang_histate.adapter.kv_face import KvFace, kv_page_bytes
from sglang_histate.adapter.mamba_component import HiStateMambaComponent
from sglang_histate.adapter.ranking import Ranking, Sizes, attach_ranking
from sglang_histate.adapter.state_face import StateFace
from sglang_histate.adapter.state_layout import LayerViews, StateLayout
from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import CopyEngine, host_engine
from sglang_histate.policy.journal import Journal
from sglang_histate.policy.score import DEFAULT_TAU, Eviction
from sglang_histate.pool import HostArena, Kind

PAGE = 64
LINEAR_LAYERS = (0, 1)
_numbers = itertools.count()


def publish(**changes: Any) -> Any:
    """Publish settings for this process; `restore()` of the result takes them back."""
    settings = dict(
        _mamba_cache_chunk_size=PAGE,
        page_size=PAGE,
        device="cpu",
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_size=0,
        hicache_io_backend="direct",
        hicache_mem_layout="page_first_direct",
        hicache_write_policy="write_through",
    )
    override = get_context().override_server_args(**(settings | changes))
    override.install()
    return override


@dataclass
class Engine:
    """The cache with its pools and a way to fill it."""

    cache: HiStateCache
    kv: PagedTokenToKVPoolAllocator
    states: Any  # the device pool's slot allocator
    host_kv: KvFace
    host_states: StateFace
    layout: StateLayout
    slots: HostSlots

    @property
    def arena(self) -> HostArena:
        return self.host_states.arena

    def host_state(self, slot: int) -> list[LayerViews]:
        """Return what a host slot holds, layer by layer (a copy)."""
        return self.layout.views(self.host_states.read(slot))

    def fill_host_state(self, slot: torch.Tensor, temporal: float, conv: float) -> None:
        image = np.zeros(self.layout.image_bytes, dtype=np.uint8)
        for views in self.layout.views(image):
            views.temporal.fill_(temporal)
            views.conv.fill_(conv)
        self.host_states.fill(int(slot[0]), image)

    def insert(self, tokens: array, *, state: float | None = None, **tenant: str) -> None:
        """Put `tokens` into the tree, as a finished request would, with a state whose numbers are all `state`.

        `tenant`: the request's `extra_key` and `cache_salt`, if it has them.
        """
        value = self.kv.alloc(len(tokens))
        slot = self.states.alloc(1)
        if value is None or slot is None:
            if value is not None:
                self.kv.free(value)
            if slot is not None:
                self.states.free(slot)
            raise MemoryError("the tiny pools are full")
        pool = self.cache.req_to_token_pool.mamba_pool.mamba_cache
        pool.temporal[:, slot] = float(len(tokens) if state is None else state)
        result = self.cache.insert(
            InsertParams(
                key=RadixKey(tokens, **tenant),
                value=value,
                mamba_value=slot,
                prev_prefix_len=0,
                inserted_len=0,
            )
        )
        if result.mamba_exist:
            self.states.free(slot)

    def match(self, req: Req) -> Any:
        return self.cache.match_prefix(
            MatchPrefixParams(
                key=RadixKey(req.full_untruncated_fill_ids, req.extra_key, cache_salt=req.cache_salt),
                cow_mamba=False,
                req=req,
            )
        )

    def settle(self) -> None:
        """Let HiCache's own copies to and from the host end. HiState's tier, if there is one, does not tick."""
        tier, self.cache.tier = self.cache.tier, None
        self.cache.check_hicache_events()
        self.cache.check_hicache_events()
        self.cache.tier = tier

    def evict_states(self, count: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=0, mamba_num=count))

    def evict_kv(self, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.cache.evict(EvictParams(num_tokens=tokens))

    def nodes(self) -> list[Any]:
        return [node for node in self.cache.tree_core._collect_all_nodes() if node.parent is not None]

    @property
    def ranking(self) -> Ranking:
        return self.cache.tree_core.ranking

    def on_ssd(self, node_id: Any) -> None:
        """Say that the state at the end of a node came from the SSD, as attached ones do."""
        node = self.cache.tree_core.node_by_id(node_id)
        self.ranking.placed(b"%d" % next(_numbers), node, len(node.key), True)

    def check(self) -> None:
        """Everything is consistent, and every slot is free or in the tree, exactly once."""
        self.cache.sanity_check()
        self.ranking.check(self.cache.tree_core.root_node)
        held = [node.component_data[ComponentType.MAMBA] for node in self.nodes()]
        on_device = [int(data.value[0]) for data in held if data.value is not None]
        on_host = [int(data.host_value[0]) for data in held if data.host_value is not None]
        assert len(set(on_device)) == len(on_device) and len(set(on_host)) == len(on_host)
        assert len(on_device) + self.states.available_size() == self.states.size
        assert len(on_host) == self.host_states.held
        kv = [node.component_data[ComponentType.FULL].host_value for node in self.nodes()]
        kv_pages = sum(len(value) for value in kv if value is not None) // PAGE
        state_pages = len(on_host) * self.host_states.pages_per_slot
        assert (self.arena.used_pages(Kind.KV), self.arena.used_pages(Kind.STATE)) == (kv_pages, state_pages)
        assert self.arena.free_pages == self.arena.total_pages - kv_pages - state_pages


def build(
    *,
    kv_tokens: int = 4096,
    state_slots: int = 16,
    mode: Eviction = Eviction.SCORE,
    tau: float = DEFAULT_TAU,
    host_pages: int | None = None,
    temporal: tuple[int, int, int] = (2, 3, 4),
    journal: Journal | None = None,
    encoding: CheckpointDtype = CheckpointDtype.NATIVE,
    copies: CopyEngine | None = None,
) -> Engine:
    """`host_pages` is the whole host arena; by default what twice the device pools take. A state is one page, unless
    `temporal` makes it larger."""
    dtype = torch.float32
    shape = Mamba2StateShape(
        conv=[(6, 3)],
        temporal=temporal,
        intermediate_size=6,
        conv_dim=6,
        ssm_state_size=4,
        num_heads=2,
        head_dim=3,
        state_size=4,
        conv_kernel=4,
    )
    requests = HybridReqToTokenPool(
        size=8,
        mamba_size=state_slots,
        mamba_spec_state_size=8,
        max_context_len=8192,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(
            shape=shape, layers=list(LINEAR_LAYERS), dtype=Mamba2StateDType(conv=dtype, temporal=dtype)
        ),
        mamba_layer_ids=list(LINEAR_LAYERS),
        enable_mamba_extra_buffer=True,
    )
    pool = HybridLinearKVPool(
        size=kv_tokens,
        dtype=dtype,
        page_size=PAGE,
        head_num=1,
        head_dim=8,
        full_attention_layer_ids=[2],
        device="cpu",
        mamba_pool=requests.mamba_pool,
    )
    kv = PagedTokenToKVPoolAllocator(kv_tokens, PAGE, dtype, "cpu", pool, False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=kv,
        page_size=PAGE,
        enable_mamba_extra_buffer=True,
        tree_components=(ComponentType.FULL, ComponentType.MAMBA),
        component_registry_override={
            ComponentType.FULL: HiStateFullComponent,
            ComponentType.MAMBA: HiStateMambaComponent,
        },
        tree_core_backend=tree_core.register(),
    )
    cache = HiStateCache(params)
    states = requests.mamba_pool.mamba_cache
    layout = StateLayout.from_pool(LINEAR_LAYERS, states.temporal, states.conv[0], encoding)
    kv_info = pool.full_kv_pool.get_device_pool_infos()[0].buffer_info
    page_bytes = kv_page_bytes(kv_info, PAGE)
    if host_pages is None:
        state_pages = -(-layout.image_bytes // page_bytes)
        host_pages = pages_by_ratio(pool.full_kv_pool, requests.mamba_pool, PAGE, state_pages, 2.0)
    use_arena(
        HostBudget(host_pages, page_bytes, record_buffers=0, record_bytes=0), layout, copies or host_engine()
    )
    cache.init_hicache(get_context().server_args, params)
    component = cache.components[ComponentType.MAMBA]
    attach_ranking(
        cache,
        sizes=Sizes(
            state=layout.image_bytes,
            kv_token=page_bytes // PAGE,
            page=PAGE,
            state_pages=component._mamba_pool_host.pages_per_slot,
            slab=layout.record_layout(page_bytes).slab_bytes,
            slab_pages=layout.record_layout(page_bytes).pages_per_extent,
        ),
        mode=mode,
        tau=tau,
        journal=journal,
    )
    return Engine(
        cache,
        kv,
        requests.mamba_allocator,
        cache.host_pool_group.get_pool(PoolName.KV),
        cache.host_pool_group.get_pool(PoolName.MAMBA),
        layout,
        HostSlots(component, layout),
    )


def tokens(*parts: tuple[int, int]) -> array:
    """Return token ids: each part is (seed, count), the same seed giving the same beginning."""
    ids = array("q")
    for seed, count in parts:
        ids.extend((seed * 1_000_003 + i * 7919) % 50_000 for i in range(count))
    return ids


def request(ids: array, **changes: Any) -> Req:
    """Return SGLang's own request over `ids`."""
    req = Req(
        rid=f"r{next(_numbers)}",
        origin_input_text="",
        origin_input_ids=ids,
        sampling_params=SamplingParams(max_new_tokens=4),
        **changes,
    )
    req.full_untruncated_fill_ids = array("q", ids)
    return req
