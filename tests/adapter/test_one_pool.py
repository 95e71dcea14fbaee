"""One pool of bytes for KV and states, SGLang's own on the CPU: contents follow their ids through every move."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools

from sglang_histate.adapter.device_pool import device_status, is_one_pool, keep_in_place, kv_bytes_per_token
from sglang_histate.adapter.one_pool import OnePool

from .engine import LINEAR_LAYERS, PAGE, Engine, build

# Room for about 18 pages or 18 states.
KV_TOKENS, STATE_SLOTS = 8 * PAGE, 10


@pytest.fixture
def pools() -> Any:
    return build_pools()


@pytest.fixture
def engine() -> Engine:
    """Two fixed shares, for comparison."""
    return build()


def build_pools() -> Any:
    dtype = torch.float32
    shape = Mamba2StateShape(
        conv=[(6, 3)],
        temporal=(2, 16, 32),
        intermediate_size=6,
        conv_dim=6,
        ssm_state_size=32,
        num_heads=2,
        head_dim=16,
        state_size=32,
        conv_kernel=4,
    )
    return init_unified_mamba_pools(
        device="cpu",
        kv_cache_dtype=dtype,
        head_num=1,
        head_dim=8,
        page_size=PAGE,
        start_layer=0,
        end_layer=4,
        is_draft_worker=False,
        use_mla_backend=False,
        mamba_layer_ids=list(LINEAR_LAYERS),
        full_attention_layer_ids=[2, 3],
        mamba2_cache_params=Mamba2CacheParams(
            shape=shape, layers=list(LINEAR_LAYERS), dtype=Mamba2StateDType(conv=dtype, temporal=dtype)
        ),
        model_context_len=1024,
        extra_max_context_len=4,
        max_total_num_tokens=KV_TOKENS,
        max_mamba_cache_size=STATE_SLOTS,
        max_num_reqs=8,
        enable_memory_saver=False,
        enable_mamba_extra_buffer=True,
        enable_mamba_extra_buffer_lazy=False,
        speculative_num_draft_tokens=None,
        disable_overlap_schedule=False,
        need_sort=False,
        lazy_compaction=True,
    )


class Contents:
    """What every live id must read: one number per page of KV and per state. The naive reference has no addresses."""

    def __init__(self, pools: Any) -> None:
        self.kv_allocator = pools.token_to_kv_pool_allocator
        self.states = pools.req_to_token_pool.mamba_allocator
        self._translate_state = pools.req_to_token_pool.translate_mamba_indices
        self._full = pools.token_to_kv_pool.full_kv_pool
        self._cache = pools.req_to_token_pool.mamba_pool.mamba_cache
        self.pages: dict[int, torch.Tensor] = {}  # number -> its token ids
        self.slots: dict[int, torch.Tensor] = {}
        self._number = 0

    def add_kv(self, pages: int) -> bool:
        ids = self.kv_allocator.alloc(pages * PAGE)
        if ids is None:
            return False
        for part in ids.split(PAGE):
            self._number += 1
            self.pages[self._number] = part
            rows = self.kv_allocator.translate_kv_loc(part)
            for layer in (*self._full.k_buffer, *self._full.v_buffer):
                layer[rows] = float(self._number)
        return True

    def add_state(self) -> bool:
        slot = self.states.alloc(1)
        if slot is None:
            return False
        self._number += 1
        self.slots[self._number] = slot
        row = self._translate_state(slot).long()
        self._cache.temporal[:, row] = float(self._number)
        self._cache.conv[0][:, row] = -float(self._number)
        return True

    def check(self) -> None:
        for number, ids in self.pages.items():
            rows = self.kv_allocator.translate_kv_loc(ids)
            for layer in (*self._full.k_buffer, *self._full.v_buffer):
                assert (layer[rows] == number).all()
        for number, slot in self.slots.items():
            row = self._translate_state(slot).long()
            assert (self._cache.temporal[:, row] == number).all()
            assert (self._cache.conv[0][:, row] == -number).all()
        assert self.kv_allocator.verify_byte_accounting() == []
        kv = self.kv_allocator.full_attn_allocator.allocated_count()
        assert kv == len(self.pages) * PAGE
        assert self.kv_allocator.mamba_allocator.allocated_count() == len(self.slots)


@pytest.mark.parametrize("seed", range(12))
def test_contents_follow_their_ids(seed: int) -> None:
    pools = build_pools()
    contents, source = Contents(pools), random.Random(seed)
    for step in range(150):
        wants_kv = source.random() < (0.8 if step // 50 == 1 else 0.3)
        if source.random() < 0.65:
            _ = contents.add_kv(source.randint(1, 4)) if wants_kv else contents.add_state()
        elif wants_kv and contents.pages:
            for number in source.sample(sorted(contents.pages), min(3, len(contents.pages))):
                contents.kv_allocator.free(contents.pages.pop(number))
        elif contents.slots:
            contents.states.free(contents.slots.pop(source.choice(sorted(contents.slots))))
        contents.check()
    moves = sum(
        end._stats_n_flush_moves
        for end in (contents.kv_allocator.full_attn_allocator, contents.kv_allocator.mamba_allocator)
    )
    assert moves > 0, "nothing was ever moved: the pool is too large for this test"
    contents.kv_allocator.clear()
    assert contents.kv_allocator.mamba_allocator.allocated_count() == 0


def test_the_boundary_goes_all_the_way(pools: Any) -> None:
    contents = Contents(pools)
    budget = device_status(contents.kv_allocator, contents.states, 0, 0)["total_bytes"]

    def used(kind: str) -> float:
        status = device_status(contents.kv_allocator, contents.states, 0, 0)
        assert status["one_pool"] and status["used_bytes"] <= budget == status["total_bytes"]
        return status[kind]["used_bytes"] / budget

    while contents.add_state():
        pass
    assert used("states") > 0.9
    contents.check()
    for number in sorted(contents.slots, key=lambda n: (n % 3, n))[:-2]:  # two stay, wherever they lie
        contents.states.free(contents.slots.pop(number))
    while contents.add_kv(1):
        pass
    assert used("kv") > 0.75 and used("kv") + used("states") > 0.9
    contents.check()


def test_nothing_moves_while_something_is_read(pools: Any) -> None:
    contents, reading = Contents(pools), True
    keep_in_place(contents.kv_allocator, lambda: reading)
    while contents.add_state():
        pass
    for number in sorted(contents.slots)[::2]:
        contents.states.free(contents.slots.pop(number))
    places = {n: int(contents._translate_state(slot)) for n, slot in contents.slots.items()}
    while contents.add_kv(1):
        pass
    assert {n: int(contents._translate_state(slot)) for n, slot in contents.slots.items()} == places
    pages = len(contents.pages)
    reading = False
    while contents.add_kv(1):
        pass
    assert len(contents.pages) > pages
    contents.check()


def test_a_fixed_split_is_never_kept_in_place(engine: Engine) -> None:
    assert not is_one_pool(engine.kv)
    keep_in_place(engine.kv, lambda: True)
    status = device_status(engine.kv, engine.states, 64, 208)
    assert not status["one_pool"] and status["used_bytes"] == 0
    assert status["total_bytes"] == engine.kv.size * 64 + engine.states.size * 208


def test_bytes_per_token_of_both_kinds_of_pool(pools: Any, engine: Engine) -> None:
    assert kv_bytes_per_token(pools.token_to_kv_pool_allocator) == 2 * 2 * 8 * 4
    assert kv_bytes_per_token(engine.kv) == 2 * 8 * 4


class TestAdmission:
    @pytest.fixture
    def pool(self, pools: Any) -> OnePool:
        self.evicted: list[int] = []
        self.contents = Contents(pools)
        cache = SimpleNamespace(
            token_to_kv_pool_allocator=pools.token_to_kv_pool_allocator,
            req_to_token_pool=pools.req_to_token_pool,
            full_evictable_size=lambda: len(self.contents.pages) * PAGE,
            mamba_evictable_size=lambda: len(self.contents.slots),
            evict_for_alloc=self.evict,
        )
        return OnePool(cache)

    def evict(self, params: Any) -> None:
        """Evict states until that many tokens fit."""
        self.evicted.append(params.num_tokens)
        wanted = self.contents.kv_allocator.available_size() + params.num_tokens
        while self.contents.kv_allocator.available_size() < wanted and self.contents.slots:
            self.contents.states.free(self.contents.slots.pop(min(self.contents.slots)))

    def test_what_a_request_takes_besides_its_own_state(self, pool: OnePool) -> None:
        tracked = SimpleNamespace(kv=SimpleNamespace(mamba_ping_pong_track_buffer=torch.zeros(2)))
        fresh = SimpleNamespace(kv=SimpleNamespace(mamba_ping_pong_track_buffer=None))
        assert pool.uncounted_states(tracked) == 1
        assert pool.uncounted_states(fresh) == 3

    def test_each_kind_is_room_for_the_other(self, pool: OnePool) -> None:
        assert self.contents.add_kv(5) and all(self.contents.add_state() for _ in range(4))
        kv_bytes, state_bytes = 5 * PAGE * pool._kv.entry_bytes, 4 * pool._states.entry_bytes
        assert pool.states_in_place_of_kv() == kv_bytes // pool._states.entry_bytes > 0
        assert pool.kv_in_place_of_states() == state_bytes // pool._kv.entry_bytes > 0

    def test_nothing_is_promised_where_nothing_may_move(self, pool: OnePool) -> None:
        self.contents.add_kv(10)
        self.contents.add_state()
        keep_in_place(self.contents.kv_allocator, lambda: True)
        assert pool.states_in_place_of_kv() == pool.kv_in_place_of_states() == 0

    def test_room_is_real_before_moves_are_forbidden(self, pool: OnePool) -> None:
        while self.contents.add_state():
            pass
        tokens = 12 * PAGE
        pool.make_room(tokens)
        assert self.evicted
        keep_in_place(self.contents.kv_allocator, lambda: True)
        assert self.contents.add_kv(12)
        self.contents.check()

    def test_no_eviction_where_there_is_room(self, pool: OnePool) -> None:
        self.contents.add_state()
        pool.make_room(4 * PAGE)
        assert not self.evicted and len(self.contents.slots) == 1
