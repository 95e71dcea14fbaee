"""States on their way through records of each encoding: capture, output ends, host slots, reads from memory and disk."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.egress import LayerEgress
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.slot_copies import SlotCopies
from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import codec_for
from sglang_histate.copy.ordering import Rule
from sglang_histate.store import DropReason, EntryState, MissReason

from .conftest import GPU
from .engine import PAGE, build, tokens
from .test_capture import LAYERS, LAYOUT, Forward, capture_of
from .test_fault_in import Bench, rewrite
from .test_tier import Alone, Rank, finished

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
MAMBA = ComponentType.MAMBA
CPU = torch.device("cpu")
ROW = torch.tensor([0])
LOSSY = (CheckpointDtype.BF16, CheckpointDtype.INT8)


@pytest.fixture(autouse=True)
def chunk_of_64(monkeypatch):
    monkeypatch.setattr("sglang.srt.runtime_context.mamba_cache_chunk_size", lambda: PAGE)


def through(encoding: CheckpointDtype, state: torch.Tensor) -> torch.Tensor:
    """Return `state` ``[HV, V, K]`` as it comes back from a record."""
    codec = codec_for(encoding, tuple(state.shape), state.dtype)
    out = torch.empty_like(state)
    codec.decode([part[0] for part in codec.encode(state[None])], out)
    return out


@pytest.mark.parametrize("encoding", list(CheckpointDtype))
def test_a_capture_fills_records_in_their_encoding(encoding) -> None:
    layout = dataclasses.replace(LAYOUT, encoding=encoding)
    places = [(0, 64), (0, 192), (1, 64), (2, 128)]  # inside and at the end of an extend
    encoded, native = capture_of(places, layout), capture_of(places)
    for capture in (encoded, native):
        Forward([300, 64, 200], None, seed=3).run(capture)
        while not capture.done():
            pass
    for row, exact in zip(encoded.rows, native.rows, strict=True):
        pairs = zip(layout.record_views(row.record.payload), LAYOUT.views(exact.record.payload), strict=True)
        for found, wanted in pairs:
            back = torch.empty_like(wanted.temporal)
            layout.codec.decode(found.temporal, back)
            assert torch.equal(back, through(encoding, wanted.temporal))
            assert torch.equal(found.conv, wanted.conv), "windows stay as they are"
    assert len(LAYERS) == len(layout.record_views(encoded.rows[0].record.payload))


class _Held:
    """A codec that encodes only once it may."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.may, self.failure = threading.Event(), failure
        self.real = codec_for(CheckpointDtype.BF16, (1, 2, 2), torch.float32)
        self.encoding = self.real.encoding

    def encode(self, states: torch.Tensor):
        self.may.wait(20)
        if self.failure is not None:
            raise self.failure
        return self.real.encode(states)


def test_the_scheduler_thread_does_not_wait_for_an_encoding() -> None:
    codec = _Held()
    egress = LayerEgress(CPU, codec)  # type: ignore[arg-type]
    target = torch.zeros(1, 2, 2, dtype=torch.bfloat16)
    egress.states(torch.full((1, 1, 2, 2), 1.5), ROW, torch.float32, [(target,)])
    mark = egress.mark()
    assert not mark.reached(Rule.HANDOVER) and (target == 0).all()
    codec.may.set()
    egress.drain()
    assert mark.reached(Rule.HANDOVER) and (target == 1.5).all()


def test_what_fails_in_the_thread_is_raised_where_it_is_asked_for() -> None:
    codec = _Held(ValueError("defect"))
    egress = LayerEgress(CPU, codec)  # type: ignore[arg-type]
    egress.states(torch.zeros(1, 1, 2, 2), ROW, torch.float32, [(torch.zeros(1, 2, 2),)])
    mark = egress.mark()
    codec.may.set()
    egress.drain()
    with pytest.raises(ValueError, match="defect"):
        mark.reached(Rule.HANDOVER)


def test_after_a_drain_nothing_is_written_any_more() -> None:
    egress = LayerEgress(CPU, codec_for(CheckpointDtype.BF16, (1, 2, 2), torch.float32))
    target = torch.zeros(1, 2, 2, dtype=torch.bfloat16)
    egress.states(
        torch.ones(1, 1, 2, 2), ROW, torch.float32, [(target,)]
    )  # of a forward pass that never ended
    egress.drain()
    mark = egress.mark()
    egress.drain()
    assert mark.reached(Rule.HANDOVER) and (target == 0).all()


@pytest.mark.parametrize("encoding", list(CheckpointDtype))
@pytest.mark.parametrize("temporal", [(2, 3, 4), (3, 40, 24)])  # in one page of the arena, and over many
def test_a_host_slot_gets_the_decoded_record(encoding, temporal) -> None:
    engine = build(encoding=encoding, temporal=temporal)
    layout = engine.layout
    slot = engine.slots.alloc()
    assert slot is not None and engine.host_states.size_per_token == layout.image_bytes
    payload = np.zeros(layout.record_layout().payload_bytes, dtype=np.uint8)
    states = torch.randn(len(layout.layer_ids), *temporal)
    windows = torch.randn(len(layout.layer_ids), *layout.conv_shape)
    for index, views in enumerate(layout.record_views(payload)):
        for place, part in zip(views.temporal, layout.codec.encode(states[index][None]), strict=True):
            place.copy_(part[0])
        views.conv.copy_(windows[index])
    for layers in (range(1), range(1, len(layout.layer_ids))):  # as they come from the disk
        engine.slots.fill(slot, payload, layers)
    for index, found in enumerate(engine.host_state(int(slot[0]))):
        assert torch.equal(found.temporal, through(encoding, states[index]))
        assert torch.equal(found.conv, windows[index])
    engine.slots.free(slot)


@pytest.mark.parametrize("encoding", list(CheckpointDtype))
def test_a_rewrite_gets_the_decoded_state_from_disk(encoding) -> None:
    bench = Bench(encoding=encoding)
    bench.put(512, 3.0)
    req = rewrite(700)
    assert not bench.faults.ready(req)
    bench.pump()
    assert bench.host_state(512) == through(encoding, torch.full((2, 3, 4), 3.0)).unique()
    assert bench.faults.ready(req)
    bench.store.close()


@pytest.mark.parametrize("encoding", list(CheckpointDtype))
def test_the_host_copy_of_a_final_state_is_what_the_ssd_would_give(encoding) -> None:
    """One rounding, wherever the next turn finds the state: the record in memory is the only source of both."""
    rank = Rank(Alone(), encoding=encoding)
    ids = tokens((1, 512))
    req = finished(rank, ids)
    pool = rank.engine.cache.req_to_token_pool.mamba_pool.mamba_cache
    (node,) = rank.engine.nodes()
    slot = int(node.component_data[MAMBA].value[0])
    pool.temporal[:, slot] = torch.randn(pool.temporal[:, slot].shape)
    rank.tier.output_ends.take(req)
    rank.drain()
    host = rank.engine.host_state(int(node.component_data[MAMBA].host_value[0]))
    for layer, found in enumerate(host):
        assert torch.equal(found.temporal, through(encoding, pool.temporal[layer, slot]))
    key = PageKeys(PAGE, None, None).at(ids, 512)
    assert rank.store.lookup(key).state is EntryState.LIVE
    other = rank.engine.slots.alloc()
    fill = rank.engine.slots.fill
    ticket = rank.store.begin_read(key, lambda record, layers: fill(other, record.payload, layers))
    rank.drain()
    assert ticket.ok
    rank.store.release(ticket)
    for found, again in zip(host, rank.engine.host_state(int(other[0])), strict=True):
        assert torch.equal(found.temporal, again.temporal) and torch.equal(found.conv, again.conv)
    rank.engine.slots.free(other)
    rank.check_idle()
    rank.store.close()


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_slot_is_held_until_it_is_encoded(encoding, monkeypatch) -> None:
    """A node's slot must not be reused, nor moved, while the thread reads it."""
    rank = Rank(Alone(), encoding=encoding)
    may = threading.Event()
    real = SlotCopies._encode
    monkeypatch.setattr(SlotCopies, "_encode", lambda self, *args: (may.wait(20), real(self, *args))[1])
    rank.tier.output_ends.take(finished(rank, tokens((1, 512))))
    assert rank.tier.output_ends.reading and rank.tier.output_ends.done_count() == 0
    rank.engine.evict_states(1)
    assert rank.engine.nodes()[0].component_data[MAMBA].value is not None
    rank.tier.tick()
    assert rank.published == []
    may.set()
    rank.drain()
    assert len(rank.published) == 1 and not rank.tier.output_ends.reading
    rank.check_idle()
    rank.store.close()


@pytest.mark.parametrize("encoding", list(CheckpointDtype))
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_state_that_is_not_finite_is_not_stored(encoding, bad) -> None:
    rank = Rank(Alone(), encoding=encoding)
    ids = tokens((1, 512))
    req = finished(rank, ids)
    (node,) = rank.engine.nodes()
    pool = rank.engine.cache.req_to_token_pool.mamba_pool.mamba_cache
    pool.temporal[1, int(node.component_data[MAMBA].value[0]), 0, 2, 1] = bad
    rank.tier.output_ends.take(req)
    rank.drain()
    assert rank.store.lookup(PageKeys(PAGE, None, None).at(ids, 512)) is None
    stats = rank.store.stats()
    assert sum(stats.drops.values()) == 1 and stats.bytes_written == 0
    assert stats.misses[MissReason.NOT_FINITE] + stats.drops[DropReason.NOT_FINITE] >= 1
    assert node.component_data[MAMBA].host_value is None, "nor is it copied to the host"
    rank.check_idle()
    rank.store.close()
