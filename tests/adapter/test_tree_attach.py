"""Attaching a host state to SGLang's own radix tree, over its own pools: outcomes, and invariants under random traffic."""

from __future__ import annotations

import random

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.request_state import state_of
from sglang_histate.adapter.tree_attach import Attach, attach_host_state

from .conftest import GPU
from .engine import PAGE, build, request, tokens

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
FULL, MAMBA = ComponentType.FULL, ComponentType.MAMBA
A = tokens((1, 1024))


def attach(engine, ids, position: int) -> Attach:
    slot = engine.slots.alloc()
    assert slot is not None
    outcome, node_id = attach_host_state(engine.cache, RadixKey(ids[:position]), slot)
    if outcome is not Attach.ATTACHED:
        engine.slots.free(slot)
    else:
        engine.on_ssd(node_id)
    return outcome


@pytest.fixture
def engine():
    made = build()
    made.insert(A)
    made.settle()
    return made


def restorable(engine, ids) -> int:
    req = request(ids)
    req.init_next_round_input(engine.cache, cow_mamba=False)
    return state_of(req, PAGE).restorable


@pytest.mark.parametrize("position", [PAGE, 512, 960])
def test_inside_a_node(engine, position) -> None:
    assert restorable(engine, A[:1000]) == 0
    assert attach(engine, A, position) is Attach.ATTACHED
    engine.check()
    assert restorable(engine, A[:1000]) == position
    assert restorable(engine, tokens((1, position + 10), (2, 100))) == position
    assert restorable(engine, A[:position]) == 0, "at least one token has to be computed"


def test_in_any_order_and_on_the_same_path(engine) -> None:
    for position in (512, 128, 768, 256):
        assert attach(engine, A, position) is Attach.ATTACHED
        engine.check()
    assert [restorable(engine, A[: p + 1]) for p in (127, 128, 300, 600, 900)] == [0, 128, 256, 512, 768]


def test_where_a_state_is_already(engine) -> None:
    assert attach(engine, A, 1024) is Attach.PRESENT
    assert attach(engine, A, 256) is Attach.ATTACHED
    assert attach(engine, A, 256) is Attach.PRESENT
    engine.check()


@pytest.mark.parametrize(
    ("ids", "position"),
    [
        (tokens((9, 512)), 256),
        (tokens((1, 128), (2, 384)), 512),
        (tokens((1, 1024), (2, 128)), 1152),
        (tokens((1, 300), (2, 300)), 320),
    ],
    ids=["unknown", "parts inside a node", "longer than the tree", "parts inside a page"],
)
def test_where_the_kv_is_not(engine, ids, position) -> None:
    before = len(engine.nodes())
    assert attach(engine, ids, position) is Attach.KV_GONE
    engine.check()
    assert len(engine.nodes()) == before


def test_another_namespace_has_other_kv(engine) -> None:
    slot = engine.slots.alloc()
    for key in (RadixKey(A[:256], "tenant"), RadixKey(A[:256], cache_salt="salt")):
        assert attach_host_state(engine.cache, key, slot)[0] is Attach.KV_GONE
    engine.slots.free(slot)
    engine.check()


def test_over_kv_that_only_the_host_has(engine) -> None:
    engine.evict_kv(1024)
    assert all(node.evicted for node in engine.nodes())
    assert attach(engine, A, 512) is Attach.ATTACHED
    engine.check()
    assert restorable(engine, A[:1000]) == 512


def test_a_locked_node_is_split_and_its_lock_still_fits(engine) -> None:
    req = request(A + tokens((9, 1)))
    req.init_next_round_input(engine.cache, cow_mamba=False)
    assert req.prefix_len == 1024
    lock = engine.cache.lock(req.last_node)
    assert attach(engine, A, 512) is Attach.ATTACHED
    engine.check()
    assert engine.cache.full_protected_size() == 1024
    engine.cache.unlock(lock)
    engine.check()
    assert engine.cache.full_protected_size() == 0


def test_an_attached_state_is_loaded_into_the_request(engine) -> None:
    """The stock load-back takes it from the host slot to the node's and the request's device slots."""
    slot = engine.slots.alloc()
    engine.fill_host_state(slot, 3.5, 1.25)
    assert attach_host_state(engine.cache, RadixKey(A[:512]), slot)[0] is Attach.ATTACHED
    req = request(tokens((1, 700), (2, 50)))
    req.init_next_round_input(engine.cache)
    assert req.needs_host_load_back() and req.prefix_len == 0
    loaded, req.last_node = engine.cache.init_load_back(
        InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
    )
    engine.cache.ready_to_load_host_cache()
    engine.settle()
    assert loaded == 512 and state_of(req, PAGE).kv_loaded == 0, "the KV never left the device"
    pool = engine.cache.req_to_token_pool.mamba_pool.mamba_cache
    assert (pool.temporal[:, req.kv.mamba_pool_idx] == 3.5).all()
    assert (pool.conv[0][:, req.kv.mamba_pool_idx] == 1.25).all()
    node_slot = engine.cache.tree_core.get_component_device_value(req.last_node, MAMBA)
    assert torch.equal(pool.temporal[:, node_slot[0]], pool.temporal[:, req.kv.mamba_pool_idx])
    engine.states.free(req.kv.mamba_pool_idx.unsqueeze(0))
    engine.check()


def test_kv_from_the_host_is_counted_as_loaded(engine) -> None:
    engine.evict_kv(1024)
    assert attach(engine, A, 512) is Attach.ATTACHED
    req = request(tokens((1, 700), (2, 50)))
    req.init_next_round_input(engine.cache)
    assert req.host_hit_length == 512
    engine.cache.init_load_back(
        InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
    )
    engine.cache.ready_to_load_host_cache()
    engine.settle()
    assert state_of(req, PAGE).kv_loaded == 512
    engine.states.free(req.kv.mamba_pool_idx.unsqueeze(0))
    engine.check()


def test_states_do_not_go_to_the_host_with_their_kv(engine) -> None:
    (node,) = engine.nodes()
    assert node.backuped and node.component_data[MAMBA].host_value is None
    assert engine.host_states.held == 0


def test_a_branch_point_goes_to_the_plan_and_not_to_stock_tracking(engine) -> None:
    req = request(tokens((1, 700), (2, 300)))
    req.init_next_round_input(engine.cache, cow_mamba=False)
    state = state_of(req, PAGE)
    assert req.mamba_branching_seqlen is None
    assert (state.kv_covered, state.restorable, state.branch) == (640, 0, 640)
    assert attach(engine, A, 640) is Attach.ATTACHED
    req.init_next_round_input(engine.cache, cow_mamba=False)
    assert (state.kv_covered, state.restorable) == (640, 640)


def test_over_kv_that_is_not_backed_up_yet() -> None:
    """SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK=1 stops such a server when it is idle."""
    engine = build()
    engine.cache.write_through_threshold = 2  # as with --hicache-write-policy write_through_selective
    engine.insert(A)
    engine.settle()
    assert not engine.nodes()[0].backuped
    attach(engine, A, 512)
    engine.check()


def test_room_for_a_state_does_not_cost_kv() -> None:
    engine = build()
    ids = [tokens((seed, 256)) for seed in range(1, 6)]
    for one in ids:
        engine.insert(one)
    engine.settle()
    engine.evict_kv(4096)
    for one in ids:
        assert attach(engine, one, 128) is Attach.ATTACHED
    while engine.host_states.available_size():
        engine.host_states.alloc(1)
    assert engine.slots.alloc() is not None  # evicts an intermediate checkpoint
    req = request(tokens((1, 256), (9, 10)))
    req.init_next_round_input(engine.cache, cow_mamba=False)
    assert state_of(req, PAGE).kv_covered == 256


# States of four pages, and an arena in which KV and states push each other out.
TIGHT = {"temporal": (8, 16, 12), "host_pages": 48}


@pytest.mark.parametrize(("seed", "sizes"), [(seed, sizes) for sizes in ({}, TIGHT) for seed in range(6)])
def test_random_traffic_keeps_every_invariant(seed, sizes) -> None:
    """Inserts, matches, attaches, load-backs and evictions of every kind; after each step the tree is sane and every
    slot is free or in the tree."""
    draw = random.Random(seed)
    engine = build(kv_tokens=3072, state_slots=12, **sizes)
    done: dict[str, int] = {}
    inserted: list = []

    def ids():
        parts = [(draw.randrange(1, 4), 64 * draw.randrange(1, 9))]
        if draw.random() < 0.6:
            parts.append((draw.randrange(4, 8), 64 * draw.randrange(1, 5)))
        return tokens(*parts)

    def known():
        """A prefix of something that is or was in the tree, most of the time."""
        if not inserted or draw.random() < 0.2:
            return ids()
        one = draw.choice(inserted[-4:])
        return one[: 64 * draw.randrange(1, len(one) // 64 + 1)]

    def insert() -> None:
        one = ids()
        inserted.append(one)
        if engine.kv.available_size() < len(one):
            engine.evict_kv(len(one))
        if engine.states.available_size() == 0:
            engine.evict_states(1)
        engine.insert(one)

    def match() -> None:
        req = request(known())
        req.init_next_round_input(engine.cache, cow_mamba=False)
        assert (
            state_of(req, PAGE).restorable
            <= state_of(req, PAGE).kv_covered
            <= len(req.full_untruncated_fill_ids)
        )

    def attach_somewhere() -> None:
        one = known()
        engine.settle()  # so that the KV under the state has its host copy
        path, node, offset = [], engine.cache.tree_core.root_node, 0
        while offset < len(one):
            node = node.children.get(RadixKey(one).child_key_at(offset, PAGE))
            if node is None:
                break
            path.append(node)
            offset += len(node.key)
        slot = engine.slots.alloc()
        if slot is None:
            return
        if not all(node.backuped for node in path):
            engine.slots.free(slot)
            return
        outcome, _ = attach_host_state(engine.cache, RadixKey(one), slot)
        if outcome is not Attach.ATTACHED:
            engine.slots.free(slot)
        done[outcome.value] = done.get(outcome.value, 0) + 1

    def load_back() -> None:
        req = request(known() + tokens((9, 1)))
        req.init_next_round_input(engine.cache, cow_mamba=False)
        if (
            not req.needs_host_load_back()
            or engine.states.available_size() + engine.cache.mamba_evictable_size() < 3
        ):
            return
        loaded, last = engine.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
            )
        )
        engine.cache.ready_to_load_host_cache()
        engine.settle()
        if loaded:
            done["loaded"] = done.get("loaded", 0) + 1
            assert len(engine.cache.path_device_indices(last)) == state_of(req, PAGE).restorable
        if req.kv.holds_mamba:
            engine.states.free(req.kv.mamba_pool_idx.unsqueeze(0))
            req.kv.mamba_pool_idx = None

    actions = [
        insert,
        match,
        attach_somewhere,
        attach_somewhere,
        load_back,
        lambda: engine.evict_kv(64 * draw.randrange(1, 9)),
        lambda: engine.evict_states(draw.randrange(1, 3)),
        lambda: engine.cache.evict_host(64 * draw.randrange(1, 5)),
        lambda: engine.cache.evict_host(1, MAMBA),
        engine.settle,
    ]
    for _ in range(250):
        draw.choice(actions)()
        engine.check()
    assert done.get("attached", 0) > 10 and done.get("loaded", 0) > 0, done
    engine.settle()
    engine.cache.reset()
    engine.kv.clear()
    engine.states.clear()
    engine.check()
    assert engine.host_states.held == 0
