"""Builds HiState for one scheduler process: the cache behind ``--radix-cache-backend histate`` and its SSD tier."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_parallel

from sglang_histate.adapter import tree_core
from sglang_histate.adapter.accounting import Accounting
from sglang_histate.adapter.agreed_time import agree_on_written
from sglang_histate.adapter.cache import HiStateCache
from sglang_histate.adapter.chat_template import agreed, template_structure
from sglang_histate.adapter.checks import check_encoding, check_runtime
from sglang_histate.adapter.counters import Counters
from sglang_histate.adapter.device_pool import device_status, is_one_pool, keep_in_place, kv_bytes_per_token
from sglang_histate.adapter.egress import LayerEgress
from sglang_histate.adapter.explanations import Explanations
from sglang_histate.adapter.fault_in import FaultIns
from sglang_histate.adapter.final_states import FinalStates
from sglang_histate.adapter.flags import config_of
from sglang_histate.adapter.full_component import HiStateFullComponent
from sglang_histate.adapter.hinted import HintedSessions
from sglang_histate.adapter.history import HistoryTier
from sglang_histate.adapter.host_budget import HostBudget, Ranks, host_budget
from sglang_histate.adapter.host_history import HostHistory
from sglang_histate.adapter.host_slots import HostSlots
from sglang_histate.adapter.host_stack import use_arena
from sglang_histate.adapter.identity import store_identity
from sglang_histate.adapter.journal_file import open_journal
from sglang_histate.adapter.kept_sessions import KeptSessions
from sglang_histate.adapter.kv_spill import KvSpill
from sglang_histate.adapter.mamba_component import HiStateMambaComponent
from sglang_histate.adapter.metric import Figures
from sglang_histate.adapter.metric_table import METRICS
from sglang_histate.adapter.metrics import MetricsExport
from sglang_histate.adapter.one_pool import OnePool
from sglang_histate.adapter.output_ends import OutputEnds
from sglang_histate.adapter.packed_copies import slot_copies
from sglang_histate.adapter.pinning import PinnedMemory
from sglang_histate.adapter.planner import CapturePlanner
from sglang_histate.adapter.prompt_places import PromptPlaces
from sglang_histate.adapter.ranking import Sizes, attach_ranking
from sglang_histate.adapter.ranks import RankAgreement
from sglang_histate.adapter.refusal import EXIT_CODE, Refusal, leave_message
from sglang_histate.adapter.saving import save_for_restart
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.adapter.tier import SsdTier
from sglang_histate.adapter.trust import Trust
from sglang_histate.adapter.verification import Verification
from sglang_histate.config import CheckpointDtype, HiStateConfig, History, describe
from sglang_histate.copy import Chosen, choose_engine
from sglang_histate.copy.packing import Packing, choose_packing
from sglang_histate.copy.staging import ring_bytes
from sglang_histate.policy.interval import STEP_TOKENS, IntervalPolicy
from sglang_histate.policy.retention import SHARE, Retention
from sglang_histate.sizes import format_size
from sglang_histate.store import CheckpointStore, StoreError, WriteLimits
from sglang_histate.store.opening import slab_file
from sglang_histate.upstream import UpstreamError

logger = logging.getLogger(__name__)

STAGED_CHECKPOINTS = 4
"""Checkpoints that the device holds on their way to the host: a burst of captures is copied while layers go on."""


def build_cache(ctx: TreeCacheBuildContext) -> HiStateCache:
    """Factory of the radix cache backend ``histate``.

    Raises:
        SystemExit: HiState cannot serve with this engine or this SSD directory; the launcher prints the sentence.
    """
    config = config_of(ctx.server_args)
    params = ctx.params
    params.component_registry_override = {
        ComponentType.FULL: HiStateFullComponent,
        ComponentType.MAMBA: HiStateMambaComponent,
    }
    params.tree_core_backend = tree_core.register()
    try:
        layout = _state_layout(params.req_to_token_pool, config.checkpoint_dtype)
        budget = host_budget(params, layout, config, Ranks.of(ctx.server_args))
        device = params.req_to_token_pool.mamba_pool.mamba_cache.temporal.device
        copies, packing = choose_engine(device), choose_packing(device, layout.encoding)
        use_arena(budget, layout, copies.engine)
        cache = create_unified_radix_cache(ctx, cache_class=HiStateCache)
        assert isinstance(cache, HiStateCache)
        check_runtime(ctx, cache)
        _start_tier(ctx, cache, config, layout, budget, copies, packing)
    except (Refusal, StoreError, UpstreamError) as refusal:
        leave_message(str(refusal))
        raise SystemExit(EXIT_CODE) from None
    return cache


def _state_layout(pool: Any, encoding: CheckpointDtype) -> StateLayout:
    states = pool.mamba_pool.mamba_cache
    check_encoding(encoding, states.temporal.dtype)
    layer_ids = sorted(pool.mamba_map, key=pool.mamba_map.__getitem__)
    return StateLayout.from_pool(layer_ids, states.temporal, states.conv[0], encoding)


def _start_tier(
    ctx: TreeCacheBuildContext,
    cache: HiStateCache,
    config: HiStateConfig,
    layout: StateLayout,
    budget: HostBudget,
    copies: Chosen,
    packing: Packing,
) -> None:
    states = ctx.params.req_to_token_pool.mamba_pool.mamba_cache
    temporal, conv = states.temporal, states.conv[0]
    page_size = cache.page_size
    grid = lcm(STEP_TOKENS, page_size)
    allocator = ctx.params.token_to_kv_pool_allocator
    kv_token_bytes = kv_bytes_per_token(allocator)
    state_tokens = layout.stored_bytes / kv_token_bytes  # what one more on the SSD costs
    record = layout.record_layout(budget.page_bytes)
    counters = Counters()
    parallel = get_parallel()
    dp_rank = parallel.dp_rank or 0
    journal = open_journal(
        config.policy_log, f"dp{dp_rank}-tp{ctx.tp_rank}" if dp_rank or ctx.tp_rank else ""
    )
    ranking = attach_ranking(
        cache,
        sizes=Sizes(
            state=layout.image_bytes,
            kv_token=kv_token_bytes,
            page=page_size,
            state_pages=cache.host_pool_group.get_pool(PoolName.MAMBA).pages_per_slot,
            slab=record.slab_bytes,
            slab_pages=record.pages_per_extent,
        ),
        mode=config.eviction,
        tau=config.tau,
        one_device_pool=is_one_pool(allocator),
        journal=journal,
    )
    agreement = RankAgreement(cache)
    roots = [Path(path) for path in config.ssd_dirs]
    rank_name = f"dp{dp_rank}-tp{ctx.tp_rank}of{ctx.tp_size}-pp{parallel.pp_rank}of{parallel.pp_size}"
    store = CheckpointStore.open(
        roots=roots,
        fingerprint=store_identity(ctx, layout, page_size),
        rank_name=rank_name,
        size_bytes=config.ssd_size_bytes,
        allow_any_filesystem=config.allow_any_filesystem,
        layout=record,
        record_buffers=budget.record_buffers,
        reader_threads=config.read_threads,
        write_limits=WriteLimits(config.write_rate, config.daily_writes, config.write_queue_age_s),
        keep=config.keep_on_restart,
        agree=agreement.common,
        agree_epoch=agreement.largest,
        **ranking.store_hooks(),
    )
    ranking.connect(store)
    agree_on_written(store, agreement)
    folders = [slab_file(root, store.fingerprint, rank_name).parent for root in roots]
    trust = Trust(store, folders, agreement)
    records_pin = PinnedMemory(
        store.records.memory, temporal.device, flag="--histate-inflight-size", piece_bytes=record.slab_bytes
    )
    on_cuda = temporal.device.type == "cuda"
    copier = slot_copies(
        layout,
        temporal,
        conv,
        packing=packing,
        engine=copies.engine,
        records=store.records.total,
        records_pinned=records_pin.pinned,
        forward_stream=ctx.tp_worker.model_runner.forward_stream if on_cuda else None,
    )
    slots = HostSlots(cache.components[ComponentType.MAMBA], layout)
    kv_face = cache.host_pool_group.get_pool(PoolName.KV)
    if not on_cuda:
        # Nothing pins the arena then, and each page would be brought in by the request that first backs KV up into it.
        kv_face.shared.memory.zero_()
    interval = _on_grid(config, grid)
    explains = config.explain_requests > 0 and parallel.attn_tp_rank == 0  # the rank that answers
    template = agreed(template_structure(ctx), agreement.common)
    states_allocator = ctx.params.req_to_token_pool.mamba_allocator
    device_bytes = device_status(allocator, states_allocator, kv_token_bytes, layout.checkpoint_bytes)[
        "total_bytes"
    ]
    smallest = min(device_bytes, budget.total_bytes, store.stats().bytes_total)
    hinted = HintedSessions(
        cache.tree_core,
        ranking,
        KeptSessions(
            ranking,
            Retention(smallest // SHARE),
            token_bytes=kv_token_bytes,
            state_bytes=layout.image_bytes,
        ),
        counters,
        structure=template.structure,
        page_size=page_size,
        grid=grid,
    )
    history = None
    if config.history is History.CHEAPEST:
        cache.components[ComponentType.MAMBA].keeps_host_only = True
        history = HistoryTier(
            ranking,
            store,
            kv_face.arena,
            state_bytes=layout.image_bytes,
            stored_bytes=layout.stored_bytes,
            journal=journal,
        )
    cache.tier = SsdTier(
        store=store,
        planner=CapturePlanner(
            interval=interval,
            state_tokens=state_tokens,
            ranking=ranking,
            page_size=page_size,
            grid=grid,
            layout=layout,
            store=store,
            egress=LayerEgress(
                temporal.device,
                layout.codec,
                copies.engine,
                stage_bytes=ring_bytes(layout.checkpoint_bytes, STAGED_CHECKPOINTS),
            ),
            counters=counters,
            absences=ranking.absences,
            hinted=hinted,
            history=history,
            places=None if template.structure is None else PromptPlaces(template.structure, grid, journal),
            journal=journal,
        ),
        accounting=Accounting(
            store,
            ranking.absences,
            trust,
            counters,
            page_size=page_size,
            min_gain_tokens=config.min_gain_tokens,
        ),
        fault_ins=FaultIns(
            cache,
            store,
            slots,
            kv_face=kv_face,
            page_size=page_size,
            min_gain_tokens=config.min_gain_tokens,
            counters=counters,
        ),
        output_ends=OutputEnds(
            cache,
            store,
            layout,
            copies=copier,
            grid=grid,
            page_size=page_size,
            end_share=ranking.end_share,
            counters=counters,
        ),
        final_states=FinalStates(cache, store, slots),
        history=HostHistory(cache, store, slots, counters),
        kv_spill=KvSpill(cache, ranking, store, kv_face, counters),
        verification=Verification(
            rate=config.verify_rate,
            store=store,
            layout=layout,
            trust=trust,
            agreement=agreement,
            counters=counters,
            page_size=page_size,
        ),
        hinted=hinted,
        agreement=agreement,
        cache=cache,
        counters=counters,
        page_size=page_size,
    )
    output_ends = cache.tier.output_ends
    keep_in_place(allocator, lambda: output_ends.reading)
    cache.one_pool = OnePool(cache) if is_one_pool(allocator) else None
    cache.capture_grid, cache.step_tail = grid, config.step_tail_tokens
    cache.copies, cache.packing = copies, packing
    if explains:
        cache.explanations = Explanations(
            cache.tree_core,
            page_size=page_size,
            requests=config.explain_requests,
            structure=template.structure,
            structure_note=template.note,
        )
    if config.keep_on_restart and config.shutdown_s > 0:
        tier = cache.tier
        cache.save = lambda: save_for_restart(tier, slots.read_into, config.shutdown_s)
    cache.status_facts = {
        "config": describe(config),
        "page_size": page_size,
        "grid_tokens": grid,
        "checkpoint_bytes": layout.checkpoint_bytes,
        "checkpoint_stored_bytes": layout.stored_bytes,
        "kv_bytes_per_token": kv_token_bytes,
        "checkpoint_in_kv_tokens": round(state_tokens, 1),
        "linear_layers": len(layout.layer_ids),
        "pid": os.getpid(),
    }
    if ctx.server_args.enable_metrics and config.metrics:
        cache.metrics = _metrics(ctx, cache)
    logger.info(
        "HiState: checkpoint %s, stored as %s in %s = %.0f tokens of KV, interval %s on a grid of %d tokens, SSD %s in %s (%d checkpoints, "
        "O_DIRECT %s), host %s of which %s in flight (%d records), copies by %s, pack: %s",
        format_size(layout.checkpoint_bytes),
        layout.encoding.value,
        format_size(layout.stored_bytes),
        state_tokens,
        config.interval_text,
        grid,
        format_size(store.stats().bytes_total),
        config.ssd_dir,
        store.stats().slabs_total,
        "yes" if store.stats().direct_io else "no",
        format_size(budget.total_bytes),
        format_size(budget.inflight_bytes),
        budget.record_buffers,
        copies.engine.name,
        packing.name,
    )
    for name, reason in copies.rejected.items():
        logger.warning("HiState: copies do not go by %s: %s", name, reason)
    if packing.is_slow:
        logger.warning("HiState: records are packed by torch, not by kernels: %s", packing.reason)


def _metrics(ctx: TreeCacheBuildContext, cache: HiStateCache) -> MetricsExport:
    parallel = get_parallel()
    # With attention data parallelism a rank's cache is shared by the ranks of its own attention group only.
    labels = {
        "model_name": str(ctx.server_args.served_model_name),
        "dp_rank": str(parallel.attn_dp_rank if parallel.dp_rank is None else parallel.dp_rank),
        "tp_rank": str(parallel.tp_rank),
    }
    first = parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0
    return MetricsExport(METRICS, lambda: Figures.of(cache), labels, first_rank=first)


def _on_grid(config: HiStateConfig, grid: int) -> IntervalPolicy:
    """Leave out default intervals that a large page cannot name; values that the user chose were checked before."""
    if not config.intervals_are_default:
        return config.interval
    return replace(config.interval, supported=tuple(i for i in config.interval.supported if i % grid == 0))
