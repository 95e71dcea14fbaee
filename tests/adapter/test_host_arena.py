"""The two faces of the host arena: bytes there and back, one budget, and room made across the boundary."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.arena_face import SharedArena
from sglang_histate.adapter.host_room import make_host_room
from sglang_histate.adapter.kv_face import KvFace, holds_plain_rows, kv_page_bytes
from sglang_histate.adapter.state_face import StateFace
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.copy import host_engine
from sglang_histate.pool import HostArena, Kind, PageError

from .engine import PAGE, Engine, build, tokens

MAMBA = ComponentType.MAMBA
CPU = torch.device("cpu")


def kv_info(layers: int, rows: int, *, strided: bool = False, v_dim: int = 3) -> MHABufferInfo:
    """K rows of 2 heads x 4, V rows of 2 heads x `v_dim`, float32; strided rows lie in envelopes of all layers."""
    if strided:
        width = layers * 2 * (4 + v_dim) + 1
        pool = torch.randn(rows, width)
        k = [pool[:, i * 8 : (i + 1) * 8].unflatten(1, (2, 4)) for i in range(layers)]
        start = layers * 8
        v = [
            pool[:, start + i * 2 * v_dim : start + (i + 1) * 2 * v_dim].unflatten(1, (2, v_dim))
            for i in range(layers)
        ]
    else:
        k = [torch.randn(rows, 2, 4) for _ in range(layers)]
        v = [torch.randn(rows, 2, v_dim) for _ in range(layers)]
    return MHABufferInfo(
        buffers=KVBuffers(k=tuple(k), v=tuple(v), k_data_ptrs=None, v_data_ptrs=None, layout=KVBufferLayout.NHD),
        page_size=PAGE, head_num=2, head_dim=4, v_head_dim=v_dim, dtype=torch.float32, device=CPU,
    )  # fmt: skip


def shared(pages: int, page_bytes: int, make_room: Any = lambda pages: None) -> SharedArena:
    return SharedArena(HostArena(pages, page_bytes), CPU, make_room, host_engine())


def page_tokens(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("v_dim", [4, 3])
@pytest.mark.parametrize("backend", ["direct", "kernel"])
def test_kv_pages_go_to_the_host_and_back(strided, v_dim, backend) -> None:
    info = kv_info(3, 8 * PAGE, strided=strided, v_dim=v_dim)
    face = KvFace(shared(12, kv_page_bytes(info, PAGE)), info, page_size=PAGE, layout="page_first")
    held = face.alloc(3 * PAGE)  # so that the pages are not the first ones
    host, device, other = face.alloc(4 * PAGE), page_tokens([6, 1, 4, 3]), page_tokens([2, 5, 0, 7])
    assert host is not None and held is not None and face.available_size() == 5 * PAGE
    wanted = [[t[device].clone() for t in half] for half in (info.buffers.k, info.buffers.v)]
    untouched = [t[page_tokens([7])].clone() for t in info.buffers.k]
    face.backup_from_device_all_layer(None, *face.prepare_transfer_indices(host, device, backend), backend)
    order = [2, 0, 3, 1]  # loads need not follow the order of the backup
    loaded = torch.cat([host[i * PAGE : (i + 1) * PAGE] for i in order[:3]])
    for layer in range(3):
        face.load_to_device_per_layer(None, loaded, other[: 3 * PAGE], layer, backend)
    for half, tensors in zip(wanted, (info.buffers.k, info.buffers.v), strict=True):
        for layer, tensor in enumerate(tensors):
            for to, source in enumerate(order[:3]):
                assert torch.equal(
                    tensor[other[to * PAGE : (to + 1) * PAGE]],
                    half[layer][source * PAGE : (source + 1) * PAGE],
                )
    assert all(torch.equal(t[page_tokens([7])], u) for t, u in zip(info.buffers.k, untouched, strict=True))


def test_kv_indices_are_whole_pages() -> None:
    info = kv_info(1, 4 * PAGE)
    face = KvFace(shared(4, kv_page_bytes(info, PAGE)), info, page_size=PAGE, layout="page_first_direct")
    host = face.alloc(2 * PAGE)
    assert host is not None and host.tolist() == list(range(2 * PAGE))
    for wrong in (host[1:], host[: PAGE - 1], host[1 : PAGE + 1], host.flip(0)):
        with pytest.raises(PageError):
            face.free(wrong)
    assert face.free(host[:PAGE]) == PAGE and face.available_size() == 3 * PAGE
    with pytest.raises(PageError):
        face.free(host)  # the first half is free already, so nothing is taken
    assert face.free(host[PAGE:]) == PAGE and face.size == 4 * PAGE


def state_face(
    page_bytes: int, pages: int, layers: int = 3, slots: int = 5
) -> tuple[StateFace, Any, StateLayout]:
    info = SimpleNamespace(
        temporal=torch.randn(layers, slots, 3, 5, 4), conv=(torch.randn(layers, slots, 7, 3),)
    )
    layout = StateLayout.from_pool(range(layers), info.temporal, info.conv[0])
    return StateFace(shared(pages, page_bytes), info, layout, layout="page_first"), info, layout  # type: ignore[arg-type]


@pytest.mark.parametrize("page_bytes", [64, 100, 352, 1000, 4096])
def test_states_lie_on_scattered_pages(page_bytes) -> None:
    face, info, layout = state_face(page_bytes, 64)
    source, draw = random.Random(page_bytes), np.random.default_rng(page_bytes)
    held = [face.arena.allocate(1, Kind.KV) or [] for _ in range(64)]
    for pages in source.sample(held, 3 * face.pages_per_slot):
        face.arena.free(pages, Kind.KV)  # holes here and there
    slots = [face.alloc(1), face.alloc(2)]
    assert slots[0] is not None and slots[1] is not None and face.alloc(1) is None and face.held == 3
    face.arena.memory[:] = 77  # other people's bytes
    all_slots = torch.cat([slots[0], slots[1]])
    payloads = {
        slot: draw.integers(0, 256, face.size_per_token, dtype=np.uint8) for slot in all_slots.tolist()
    }
    for slot, payload in payloads.items():
        face.fill(slot, payload)
    others = np.ones(64 * page_bytes, dtype=bool)
    for slot, payload in payloads.items():
        assert (face.read(slot) == payload).all()
        for page in face._pages[slot]:
            others[page * page_bytes : (page + 1) * page_bytes] = False
    assert (face.arena.memory[others] == 77).all()
    rows = torch.tensor([4, 0, 2])
    for layer in range(3):
        face.load_to_device_per_layer(None, all_slots, rows, layer, "direct")
    for slot, row in zip(all_slots.tolist(), rows.tolist(), strict=True):
        for layer, views in enumerate(layout.views(payloads[slot])):
            assert torch.equal(info.temporal[layer, row].view(torch.int32), views.temporal.view(torch.int32))
            assert torch.equal(info.conv[0][layer, row].view(torch.int32), views.conv.view(torch.int32))
    assert face.free(all_slots) == 3 and face.held == 0 and face.arena.used_pages(Kind.STATE) == 0


def test_states_are_backed_up_from_the_device_in_the_form_of_a_record() -> None:
    face, info, layout = state_face(200, 32)
    slots = face.alloc(2)
    assert slots is not None
    face.backup_from_device_all_layer(None, slots, torch.tensor([3, 1]), "kernel")
    for slot, row in zip(slots.tolist(), (3, 1), strict=True):
        for layer, views in enumerate(layout.views(face.read(slot))):
            assert torch.equal(views.temporal, info.temporal[layer, row])
            assert torch.equal(views.conv, info.conv[0][layer, row])


def test_a_slot_that_nobody_holds() -> None:
    face, _, _ = state_face(4096, 4)
    held = face.alloc(1)
    assert held is not None
    slot = int(held[0])
    face.free(torch.tensor([slot]))
    for call in (lambda: face.free(torch.tensor([slot])), lambda: face.read(slot), lambda: face.read(99)):
        with pytest.raises(PageError):
            call()


def fill_host(engine: Engine, seeds: range, *, states: bool = False, at: int = PAGE) -> None:
    """Put two pages of KV per seed into the host, and off the device; with a host state after `at` tokens if `states`."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from sglang_histate.adapter.tree_attach import Attach, attach_host_state

    for seed in seeds:
        ids = tokens((seed, 2 * PAGE))
        engine.insert(ids)
        engine.settle()
        engine.evict_states(99)
        if states:
            slot = engine.slots.alloc()
            assert slot is not None
            outcome, node_id = attach_host_state(engine.cache, RadixKey(ids[:at]), slot)
            assert outcome is Attach.ATTACHED
            engine.on_ssd(node_id)
        engine.evict_kv(4096)
        engine.check()


def test_both_faces_offer_what_the_arena_has() -> None:
    engine = build(host_pages=20, temporal=(8, 16, 12))
    per_state = engine.host_states.pages_per_slot
    assert per_state == 4  # 12,288 bytes of temporal state on pages of 4,096, and the window
    for kv_pages, states in ((0, 0), (2, 0), (2, 1), (2, 2), (7, 2)):
        while engine.arena.used_pages(Kind.KV) < kv_pages:
            engine.host_kv.alloc(PAGE)
        while engine.host_states.held < states:
            engine.host_states.alloc(1)
        free = 20 - kv_pages - states * per_state
        assert engine.host_kv.available_size() == free * PAGE
        assert engine.host_states.available_size() == free // per_state
        # As SGLang's metrics count.
        assert engine.host_kv.logical_size - engine.host_kv.available_size() == kv_pages * PAGE
        assert engine.host_states.logical_size - engine.host_states.available_size() == states
    assert engine.host_kv.size == 20 * PAGE and engine.host_states.size == 5 == engine.slots.total


def test_kv_takes_the_room_of_states_that_the_ssd_has_then_that_of_older_kv() -> None:
    engine = build(host_pages=12, temporal=(8, 16, 12))
    fill_host(engine, range(1, 3), states=True)  # 2 x (2 pages + 4 pages)
    assert engine.arena.free_pages == 0
    fill_host(engine, range(3, 4))
    assert (engine.arena.used_pages(Kind.KV), engine.host_states.held) == (6, 1)
    for _ in range(2):
        assert engine.host_kv.alloc(4 * PAGE) is not None
    # 8 pages of KV that are not in the tree: the other state went, and one of three leaves.
    assert (engine.arena.used_pages(Kind.KV), engine.host_states.held) == (12, 0)


def test_a_state_takes_the_room_of_states_then_that_of_kv() -> None:
    engine = build(host_pages=10, temporal=(8, 16, 12))
    fill_host(engine, range(1, 2), states=True)
    fill_host(engine, range(2, 4))
    assert (engine.arena.free_pages, engine.host_states.held) == (0, 1)
    first = engine.slots.alloc()
    assert first is not None and engine.host_states.held == 1  # the tree's state went, its KV stayed
    assert engine.arena.used_pages(Kind.KV) == 6
    second = engine.slots.alloc()
    assert second is not None and engine.arena.used_pages(Kind.KV) <= 2  # KV went, the lowest first
    assert engine.slots.alloc() is None and engine.arena.used_pages(Kind.KV) == 0  # no more than there is
    engine.slots.free(first), engine.slots.free(second)
    engine.check()


def test_what_is_locked_stays() -> None:
    engine = build(host_pages=6, temporal=(8, 16, 12))
    fill_host(engine, range(1, 2), states=True, at=2 * PAGE)
    (node,) = engine.nodes()
    receipt = engine.cache.inc_host_lock_ref(node.id).to_dec_params()
    assert engine.slots.alloc() is None and engine.host_kv.alloc(PAGE) is None
    assert node.backuped and engine.host_states.held == 1
    engine.cache.dec_host_lock_ref(node.id, receipt)
    assert engine.slots.alloc() is not None


def test_more_than_the_arena_evicts_nothing() -> None:
    engine = build(host_pages=6, temporal=(8, 16, 12))
    fill_host(engine, range(1, 2), states=True)
    assert engine.host_kv.alloc(7 * PAGE) is None and engine.host_states.alloc(2) is None
    assert engine.arena.free_pages == 0


def test_make_host_room_stops_at_what_was_asked() -> None:
    engine = build(host_pages=24, temporal=(8, 16, 12))
    fill_host(engine, range(1, 5), states=True)
    make_host_room(engine.cache, 1)
    assert engine.arena.free_pages == 4 and engine.host_states.held == 3
    make_host_room(engine.cache, 2)
    assert engine.arena.free_pages == 8 and engine.arena.used_pages(Kind.KV) == 8
    engine.check()


def test_several_requests_are_served_all_or_none() -> None:
    info = kv_info(1, 4 * PAGE)
    both = shared(4, kv_page_bytes(info, PAGE))
    face = KvFace(both, info, page_size=PAGE, layout="page_first")
    assert (
        both.alloc_many([("kv", 2 * PAGE), ("kv", 3 * PAGE)]) is None
        and both.free_bytes() == both.arena.total_bytes
    )
    first, second = both.alloc_many([("kv", 2 * PAGE), ("kv", 2 * PAGE)]) or []
    assert not set(first.tolist()) & set(second.tolist()) and face.available_size() == 0


def test_a_flush_gives_everything_back() -> None:
    engine = build(host_pages=12, temporal=(8, 16, 12))
    fill_host(engine, range(1, 3), states=True)
    engine.cache.reset()
    assert engine.arena.free_pages == 12 and engine.host_states.held == 0
    fill_host(engine, range(1, 3), states=True)


def test_the_pools_are_those_of_the_controller() -> None:
    engine = build()
    group = engine.cache.host_pool_group
    assert group is engine.cache.cache_controller.mem_pool_host
    assert engine.host_kv.shared_allocation_domain is engine.host_states.shared_allocation_domain
    assert engine.cache.components[MAMBA]._mamba_pool_host is group.get_pool(PoolName.MAMBA)
    engine.cache.release_host_resources()
    engine.cache.release_host_resources()


def test_which_pools_are_rows() -> None:
    info = kv_info(1, PAGE)
    assert holds_plain_rows(info) and not holds_plain_rows(object())
    assert not holds_plain_rows(
        MHABufferInfo(
            **{**{f: getattr(info, f) for f in info.__struct_fields__}, "transfer_buffers": lambda: None}
        )
    )
