"""With an engine that moves nothing, nothing moves: no capture, output end, backup, restore, read or spill has its own way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy.cpu_engine import HostEngine
from sglang_histate.store import RecordKind

from .conftest import GPU
from .engine import PAGE, request, tokens
from .stores import wait_threads
from .test_capture import LAYOUT, Forward, capture_of
from .test_fault_in import Bench as FaultBench
from .test_fault_in import rewrite
from .test_kv_ssd import Bench
from .test_tier import Alone, Rank, finished

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
MAMBA, FULL = ComponentType.MAMBA, ComponentType.FULL
ENCODINGS = list(CheckpointDtype)
Switch = Callable[[bool], None]


@pytest.fixture(autouse=True)
def chunk_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.mamba_cache_chunk_size", lambda: PAGE)


@pytest.fixture
def engine_works(monkeypatch: pytest.MonkeyPatch) -> Iterator[Switch]:
    """Turn the engine of this process off and on."""
    real, works = HostEngine.submit, [True]

    def submit(self: HostEngine, copies: Any) -> None:
        if works[0]:
            real(self, copies)

    monkeypatch.setattr(HostEngine, "submit", submit)
    yield lambda on: works.__setitem__(0, on)


def changed(memory: Any, act: Callable[[], None]) -> bool:
    """Return whether a byte of `memory` is another one after `act`."""
    before = np.array(memory, copy=True)
    act()
    return not np.array_equal(before.view(np.uint8), np.asarray(memory).view(np.uint8))


@pytest.mark.parametrize("works", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_captures(engine_works, works, encoding) -> None:
    engine_works(works)
    capture = capture_of([(0, 64), (0, 192), (1, 64)], dataclasses.replace(LAYOUT, encoding=encoding))
    memory = [row.record.memory for row in capture.rows]

    def act() -> None:
        Forward([300, 64], None).run(capture)
        while not capture.done():
            pass

    assert changed(memory, act) is works


@pytest.mark.parametrize("works", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_output_ends_and_their_host_copies(engine_works, works, encoding) -> None:
    rank = Rank(Alone(), encoding=encoding)
    req = finished(rank, tokens((1, 512)))
    payloads: list[Any] = []
    real = rank.store.claim_record

    def claim(*arguments: Any, **named: Any) -> Any:
        record = real(*arguments, **named)
        payloads.append(record.payload)
        record.payload[:] = 0x11
        return record

    rank.store.claim_record = claim
    memory = rank.engine.arena.memory
    engine_works(works)

    def act() -> None:
        rank.tier.output_ends.take(req)
        rank.drain()

    assert changed(memory, act) is works
    assert (payloads[0] != 0x11).any() == works
    (node,) = rank.engine.nodes()
    assert node.component_data[MAMBA].host_value is not None
    # And from the host into a record, before an exit.
    slot, target = node.component_data[MAMBA].host_value, np.full_like(payloads[0], 0x22)
    assert changed(target, lambda: rank.engine.slots.read_into(slot, target)) is works
    rank.store.close()


@pytest.mark.parametrize("works", [False, True])
def test_backups_and_restores(engine_works, works) -> None:
    bench = FaultBench()
    bench.put(512, 42.5)
    engine, cache = bench.engine, bench.engine.cache
    kv = engine.kv.get_kvcache().full_kv_pool
    states = cache.req_to_token_pool.mamba_pool.mamba_cache
    for buffer in (*kv.k_buffer, *kv.v_buffer):
        buffer.normal_()
    engine_works(works)

    def back_up() -> None:
        engine.insert(tokens((7, 512)))
        engine.settle()

    assert changed(engine.arena.memory, back_up) is works
    req = rewrite(700)

    def read() -> None:
        assert not bench.faults.ready(req)
        bench.pump()

    assert changed(engine.arena.memory, read) is works  # the record goes into a slot of the host
    assert bench.faults.ready(req)
    engine.evict_kv(4096)
    req.init_next_round_input(cache)

    def restore() -> None:
        params = InitLoadBackParams(
            best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
        )
        cache.init_load_back(params)
        for buffer in (*kv.k_buffer, *kv.v_buffer, states.temporal, states.conv[0]):
            buffer.fill_(0.25)
        cache.ready_to_load_host_cache()
        engine.settle()

    restore()
    for buffer in (kv.k_buffer[0], kv.v_buffer[0], states.temporal):
        assert bool((buffer != 0.25).any()) is works
    bench.store.close()


@pytest.mark.parametrize("works", [False, True])
def test_spills_and_what_comes_back(engine_works, works) -> None:
    bench = Bench()
    bench.visit(tokens((1, 512)))
    bench.off_device()
    records = bench.store.records.memory
    records[:] = 0x33
    engine_works(works)
    bench.tier.kv_spill.copy([node.id for node in bench.engine.nodes()])
    (first, *_) = bench.tier.kv_spill._pending
    first.copied.future.result()
    assert bool((first.record.kv_pages[: first.pages] != 0x33).any()) is works
    bench.settle()
    assert bench.store.lookup(first.key, RecordKind.KV) is not None
    engine_works(True)
    bench.engine.cache.evict_host(1 << 20)
    bench.settle()
    engine_works(works)
    req = request(tokens((1, 512), (9, 1)))

    def come_back() -> None:
        bench.engine.cache.request_ready(req)
        wait_threads(bench.store)
        bench.tier.tick()
        wait_threads(bench.store)

    assert changed(bench.engine.arena.memory, come_back) is works
    bench.tier.close()
