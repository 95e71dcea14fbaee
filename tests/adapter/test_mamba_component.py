"""What the tree may take over as a recurrent state, played with SGLang's own request and checkpoint code."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.managers.schedule_policy import mamba_prefill_chunk_grid
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.tree_attach import Attach, attach_host_state

from .conftest import GPU
from .engine import build, request, tokens

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
MAMBA = ComponentType.MAMBA


def checkpoint(engine, ids, *, end: int, tracked: int):
    """Publish the first chunk(s) of a request up to `end`, with a snapshot of its state after `tracked` tokens."""
    cache, pools = engine.cache, engine.cache.req_to_token_pool
    req = request(ids)
    req.init_next_round_input(cache)
    req.lock = cache.lock(req.last_node)
    req.extend_end = end
    pools.alloc([req])
    rows = engine.kv.alloc(-(-end // 64) * 64)[:end]
    pools.write((req.kv.req_pool_idx, slice(0, end)), rows.to(torch.int32))
    req.kv.kv_allocated_len = req.kv.kv_committed_len = end
    slot = req.kv.mamba_ping_pong_track_buffer[pools.get_mamba_ping_pong_keep_idx(req)]
    pools.mamba_pool.mamba_cache.temporal[:, slot] = float(tracked)
    req.kv.mamba_last_track_seqlen = tracked
    cache.checkpoint(req, up_to=end)
    return req


def states(engine) -> dict[int, float]:
    """Position in the prompt -> the number in the device state there."""
    temporal = engine.cache.req_to_token_pool.mamba_pool.mamba_cache.temporal
    found = {}
    for node in engine.nodes():
        value = node.component_data[MAMBA].value
        if value is not None:
            depth, cur = 0, node
            while cur.parent is not None:
                depth, cur = depth + len(cur.key), cur.parent
            found[depth] = float(temporal[0, value[0]].flatten()[0])
    return found


def test_a_state_at_the_end_of_a_page_is_taken_over() -> None:
    engine = build()
    checkpoint(engine, tokens((1, 300)), end=256, tracked=192)
    assert states(engine) == {192: 192.0}


def test_a_state_between_two_pages_is_never_taken_over() -> None:
    """Without DCP a continuing chunk is cut where the KV budget or the mixed decode tokens leave off
    (`mamba_prefill_chunk_grid` is 1), and snapshots count from there. `checkpoint_into_tree` then cuts the key to the
    page but not the state: a later prompt would resume at 192 from the state of 229, a wrong answer."""
    engine = build()
    assert mamba_prefill_chunk_grid() == 1
    checkpoint(engine, tokens((1, 300)), end=229, tracked=229)  # chunks [0, 37) and [37, 229)
    assert all(position == value for position, value in states(engine).items())


def test_a_state_that_was_loaded_leaves_its_host_slot_to_the_next() -> None:
    """With --hicache-ratio below 1 the host pool would fill with copies of device states, and no read could start."""
    engine = build()
    ids = tokens((1, 1024))
    engine.insert(ids)
    engine.settle()
    slot = engine.slots.alloc()
    while engine.host_states.available_size():
        engine.host_states.alloc(1)
    assert attach_host_state(engine.cache, RadixKey(ids[:512]), slot)[0] is Attach.ATTACHED
    req = request(tokens((1, 700), (2, 50)))
    req.init_next_round_input(engine.cache)
    engine.cache.init_load_back(
        InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
    )
    engine.cache.ready_to_load_host_cache()
    engine.settle()
    assert engine.slots.alloc() is not None
