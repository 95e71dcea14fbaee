"""How large the host arena of one rank is: its share of ``--histate-host-size``, or what HiCache's own flags ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.runtime_context import get_memory

from sglang_histate.adapter.device_pool import is_one_pool
from sglang_histate.adapter.kv_face import holds_plain_rows, kv_page_bytes
from sglang_histate.adapter.refusal import Refusal
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.config import HiStateConfig
from sglang_histate.pool import Headroom, available_memory
from sglang_histate.sizes import format_size

MIN_RECORDS = 4  # one capture, one read, and one of each behind them


@dataclass(frozen=True)
class Ranks:
    """Ranks of the server, and how many of them share this machine's memory."""

    total: int
    here: int

    @classmethod
    def of(cls, server_args: Any) -> Ranks:
        replicas = 1 if server_args.enable_dp_attention else server_args.dp_size
        total = server_args.tp_size * server_args.pp_size * replicas
        return cls(total, max(1, total // server_args.nnodes))


@dataclass(frozen=True)
class HostBudget:
    """One rank's host memory: the arena and the records in flight."""

    pages: int
    page_bytes: int
    record_buffers: int
    record_bytes: int

    @property
    def arena_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def inflight_bytes(self) -> int:
        return self.record_buffers * self.record_bytes

    @property
    def total_bytes(self) -> int:
        return self.arena_bytes + self.inflight_bytes


def record_buffers(config: HiStateConfig, record_bytes: int) -> int:
    """Return how many records in flight a rank has.

    Raises:
        Refusal: too few to work with.
    """
    buffers = config.inflight_bytes // record_bytes
    if buffers < MIN_RECORDS:
        raise Refusal(
            f"--histate-inflight-size {format_size(config.inflight_bytes)} is too small: one checkpoint of this model takes "
            f"{format_size(record_bytes)}, give at least {format_size(MIN_RECORDS * record_bytes)}"
        )
    # More buffers than slabs can never be in use at once, but for the reads of what is being replaced.
    return min(buffers, config.ssd_size_bytes // record_bytes + MIN_RECORDS)


def host_budget(
    params: Any, layout: StateLayout, config: HiStateConfig, ranks: Ranks, headroom: Headroom | None = None
) -> HostBudget:
    """Size one rank's host memory. `headroom` is what the machine has left, for tests.

    Raises:
        Refusal: the pools cannot be backed up to an arena, too little to hold one page and one checkpoint, or more
            than the machine or its container has.
    """
    (declaration, *others) = params.token_to_kv_pool_allocator.get_kvcache().host_pool_decls()
    kv_pool, mamba_pool = declaration.device_pool, params.req_to_token_pool.mamba_pool
    info = kv_pool.get_device_pool_infos()[0].buffer_info
    if others or not holds_plain_rows(info):
        raise Refusal(
            "the KV pool of this model or of --kv-cache-dtype and --attention-backend is not one of plain rows per token, "
            "which HiState needs: choose others, or serve without HiState by --disable-histate"
        )
    page_bytes = kv_page_bytes(info, params.page_size)
    record = layout.record_layout(page_bytes)
    buffers = record_buffers(config, record.slab_bytes)
    state_pages = -(-layout.image_bytes // page_bytes)
    memory = get_memory()
    if config.host_size_bytes is not None:
        flag = f"--histate-host-size {format_size(config.host_size_bytes)}"
        pages = (config.host_size_bytes // ranks.total - buffers * record.slab_bytes) // page_bytes
    elif memory.hicache_size > 0:
        flag = f"--hicache-size {memory.hicache_size}"
        pages = int(memory.hicache_size * 1e9) // page_bytes
    else:
        flag = f"--hicache-ratio {memory.hicache_ratio:g}"
        allocator = params.token_to_kv_pool_allocator
        if is_one_pool(allocator):
            # The capacities of the two kinds overlap: the bytes are what both together have.
            pages = int(allocator.unified_buffer.total_bytes * memory.hicache_ratio) // page_bytes + 1
        else:
            pages = pages_by_ratio(kv_pool, mamba_pool, params.page_size, state_pages, memory.hicache_ratio)
    budget = HostBudget(max(0, pages), page_bytes, buffers, record.slab_bytes)
    if pages < 1 + state_pages:
        least = HostBudget(1 + state_pages, page_bytes, buffers, record.slab_bytes)
        raise Refusal(
            f"{flag} is too small: a rank needs {format_size(least.inflight_bytes)} for checkpoints in flight "
            f"(--histate-inflight-size) and {format_size(least.arena_bytes)} for one page of KV and one checkpoint, give at "
            f"least {format_size(ranks.total * least.total_bytes)} by --histate-host-size (ranks: {ranks.total})"
        )
    headroom = available_memory() if headroom is None else headroom
    if budget.total_bytes * ranks.here > headroom.size_bytes:
        raise Refusal(
            f"{flag} takes {format_size(budget.total_bytes * ranks.here)} of host memory here (ranks: {ranks.here}), "
            f"checkpoints in flight (--histate-inflight-size) included, but {format_size(headroom.size_bytes)} are "
            f"{headroom.source}: give less by --histate-host-size, the total of all ranks"
        )
    return budget


def pages_by_ratio(kv_pool: Any, mamba_pool: Any, page_size: int, state_pages: int, ratio: float) -> int:
    """Return the pages that hold what HiCache's two pools would have held: `ratio` times each device pool."""
    tokens, states = (
        pool.size if pool.host_capacity_tokens is None else pool.host_capacity_tokens
        for pool in (kv_pool, mamba_pool)
    )
    return int(tokens * ratio) // page_size + 1 + (int(states * ratio) + 1) * state_pages
