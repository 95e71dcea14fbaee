"""Fault-ins against SGLang's own tree and requests and a real store on a disk in memory."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.adapter.counters import Counters, Miss
from sglang_histate.adapter.fault_in import MAX_FAULT_INS_PER_REQUEST, FaultIns
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.request_state import state_of
from sglang_histate.adapter.status import host_lock_count
from sglang_histate.adapter.tree_attach import Attach

from .conftest import GPU
from .engine import PAGE, build, request, tokens
from .stores import fake_disk, open_store, put, wait_threads

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
MAMBA = ComponentType.MAMBA
A = tokens((1, 1024))


class Bench:
    """One rank without a server: a tree that holds A, and a store."""

    def __init__(
        self, *, buffers: int = 16, min_gain: int = 64, host_kv_only: bool = False, **sizes: Any
    ) -> None:
        self.engine = build(**sizes)
        self.engine.insert(A)
        self.engine.settle()
        if host_kv_only:
            self.engine.evict_kv(len(A))
        self.store = open_store(self.engine.layout, buffers=buffers)
        self.disk = fake_disk(self.store)
        self.counters = Counters()
        self.faults = FaultIns(
            self.engine.cache,
            self.store,
            self.engine.slots,
            kv_face=self.engine.host_kv,
            page_size=PAGE,
            min_gain_tokens=min_gain,
            counters=self.counters,
        )

    def put(self, position: int, value: float | None = None, ids=A) -> bytes:
        """Store a checkpoint and wait until the disk has it, so that a read really reads."""
        key = PageKeys(PAGE, None, None).at(ids, position)
        put(self.store, self.engine.layout, key, position, float(position) if value is None else value)
        wait_threads(self.store)
        self.commit()
        self.faults.version += 1
        return key

    def commit(self) -> None:
        for ticket in self.store.poll().reads:
            self.faults.complete(ticket)

    def pump(self) -> None:
        """Let all reads and writes end and commit them, as one tick after them does."""
        wait_threads(self.store)
        self.commit()

    def host_state(self, position: int, ids=A) -> float | None:
        """The number in the host state at the end of ids[:position], None if there is none."""
        node = self.engine.cache.tree_core.node_by_id(self.matched(ids[: position + 1]).best_match_node)
        data = node.component_data[MAMBA]
        if data.host_value is None or self.depth(node) != position:
            return None
        layers = self.engine.host_state(int(data.host_value[0]))
        (value,) = {float(v) for views in layers for tensor in views for v in tensor.unique()}
        return value

    def matched(self, ids):
        req = request(ids)
        req.init_next_round_input(self.engine.cache, cow_mamba=False)
        return req

    @staticmethod
    def depth(node) -> int:
        depth = 0
        while node.parent is not None:
            depth, node = depth + len(node.key), node.parent
        return depth

    def check_idle(self) -> None:
        """Nothing is in flight, and everything is back or in the tree."""
        assert len(self.faults) == 0 and not self.faults._waiting and not self.faults._by_ticket
        assert self.store.records.free == self.store.records.total and self.store.outstanding == 0
        loads = len(self.engine.cache.ongoing_load_back)
        locks = sum(node.component_data[MAMBA].host_lock_ref for node in self.engine.nodes())
        assert locks == self.faults.pinned + loads, "a host lock nobody holds"
        assert locks or host_lock_count(self.engine.cache) == 0
        self.engine.check()


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.store.close()


def rewrite(at: int, seed: int = 2):
    """A request that shares A[:at] and goes on with other tokens."""
    return request(tokens((1, at), (seed, 150)))


def test_a_rewrite_waits_for_its_checkpoint_and_then_resumes_from_it(bench) -> None:
    bench.put(256)
    bench.put(512)
    req = rewrite(700)
    assert bench.faults.ready(req) is False and bench.faults.ready(req) is False
    assert len(bench.faults) == 1 and bench.counters.fault_ins == 1 and bench.counters.internal_hits == 1
    bench.pump()
    assert bench.faults.ready(req) is True
    assert bench.host_state(512) == 512.0
    assert state_of(req, PAGE).restorable == 512 and state_of(req, PAGE).attached == 512
    bench.check_idle()


def test_the_bytes_reach_the_request(bench) -> None:
    bench.put(512, 42.5)
    req = rewrite(700)
    assert not bench.faults.ready(req)
    bench.pump()
    assert bench.faults.ready(req)
    req.init_next_round_input(bench.engine.cache)
    bench.engine.cache.init_load_back(
        InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
    )
    bench.engine.cache.ready_to_load_host_cache()
    bench.engine.settle()
    states = bench.engine.cache.req_to_token_pool.mamba_pool.mamba_cache
    assert (states.temporal[:, req.kv.mamba_pool_idx] == 42.5).all()
    assert (states.conv[0][:, req.kv.mamba_pool_idx] == 42.5).all()
    bench.engine.states.free(req.kv.mamba_pool_idx.unsqueeze(0))
    bench.check_idle()


def test_a_checkpoint_that_is_still_being_written_is_served_from_memory(bench) -> None:
    bench.disk.writes_allowed.clear()
    key = PageKeys(PAGE, None, None).at(A, 512)
    put(bench.store, bench.engine.layout, key, 512, 7.0)
    bench.faults.version += 1
    req = rewrite(700)
    assert not bench.faults.ready(req)
    while not bench.store.completed()[1]:
        pass
    bench.commit()
    assert bench.faults.ready(req) and bench.host_state(512) == 7.0
    bench.disk.writes_allowed.set()
    bench.pump()
    bench.check_idle()


def test_kv_that_only_the_host_has_is_good_enough() -> None:
    bench = Bench(host_kv_only=True)
    bench.put(512)
    req = rewrite(700)
    assert not bench.faults.ready(req)
    bench.pump()
    assert bench.faults.ready(req) and bench.host_state(512) == 512.0
    bench.check_idle()
    bench.store.close()


def test_two_requests_wait_for_one_read(bench) -> None:
    bench.put(512)
    first, second = rewrite(700), rewrite(600, 3)
    assert not bench.faults.ready(first) and not bench.faults.ready(second)
    assert len(bench.faults) == 1 and bench.counters.fault_ins == 1
    bench.pump()
    assert bench.faults.ready(first) and bench.faults.ready(second)
    assert state_of(second, PAGE).attached == 512
    bench.check_idle()


def test_a_later_request_finds_what_an_earlier_one_attached(bench) -> None:
    bench.put(512)
    first = rewrite(700)
    assert not bench.faults.ready(first)
    bench.pump()
    second = rewrite(700, 3)
    assert bench.faults.ready(second) and state_of(second, PAGE).restorable == 512
    assert bench.counters.fault_ins == 1


@pytest.mark.parametrize("gone", [1, 2])
def test_aborted_while_reading(bench, gone) -> None:
    bench.put(512)
    reqs = [rewrite(700), rewrite(600, 3)]
    assert not any(map(bench.faults.ready, reqs))
    for req in reqs[:gone]:
        bench.faults.cancel(req.cache_request_handle)
        bench.faults.cancel(req.cache_request_handle)  # an abort may come twice
    assert bench.counters.missed[Miss.ABORTED] == gone
    bench.pump()
    assert bench.host_state(512) == (512.0 if gone == 1 else None)
    bench.check_idle()


def test_a_new_request_joins_a_read_that_nobody_waits_for_any_more(bench) -> None:
    bench.put(512)
    first = rewrite(700)
    assert not bench.faults.ready(first)
    bench.faults.cancel(first.cache_request_handle)
    second = rewrite(700, 3)
    assert not bench.faults.ready(second) and bench.counters.fault_ins == 1
    bench.pump()
    assert bench.faults.ready(second) and bench.host_state(512) == 512.0
    bench.check_idle()


def test_a_failed_read_leads_to_the_checkpoint_before_it(bench) -> None:
    bench.put(256)
    bench.put(512)
    bench.disk.read_faults.append("eio")
    req = rewrite(700)
    assert not bench.faults.ready(req)
    bench.pump()
    assert bench.counters.missed[Miss.READ_FAILED] == 1 and bench.host_state(512) is None
    assert not bench.faults.ready(req), "the entry at 512 is gone, 256 is there"
    bench.pump()
    assert bench.faults.ready(req) and bench.host_state(256) == 256.0
    bench.check_idle()


@pytest.mark.parametrize(
    "fault", ["eio", "einval", ("short", 100), ("flip", 0), ("flip", 4096), ("flip", 4440)]
)
def test_doubtful_bytes_never_reach_the_tree(bench, fault) -> None:
    bench.put(512)
    bench.disk.read_faults.append(fault)
    req = rewrite(700)
    assert not bench.faults.ready(req)
    bench.pump()
    assert bench.faults.ready(req) and bench.host_state(512) is None
    assert bench.store.lookup(PageKeys(PAGE, None, None).at(A, 512)) is None
    bench.check_idle()


def test_a_copy_that_fails_is_a_miss(bench, monkeypatch) -> None:
    bench.put(512)

    def fails(slot, payload) -> None:
        raise ValueError("made to fail")

    monkeypatch.setattr(bench.engine.slots, "fill", fails)
    req = rewrite(700)
    assert not bench.faults.ready(req)
    bench.pump()
    assert bench.faults.ready(req) and bench.host_state(512) is None
    bench.check_idle()


def test_no_host_slot(bench) -> None:
    bench.put(512)
    taken = []
    while bench.engine.host_states.available_size():
        taken.append(bench.engine.host_states.alloc(1))
    req = rewrite(700)
    assert bench.faults.ready(req) is True and bench.counters.missed[Miss.NO_ROOM] == 1
    assert bench.faults.ready(req) is True and bench.counters.missed[Miss.NO_ROOM] == 1, "not asked again"
    for slot in taken:
        bench.engine.slots.free(slot)
    bench.check_idle()


def test_no_read_buffer(bench) -> None:
    bench.put(512)
    taken = [bench.store.acquire_record() for _ in range(bench.store.records.total)]
    req = rewrite(700)
    assert bench.faults.ready(req) is True and bench.counters.missed[Miss.NO_ROOM] == 1
    for record in taken:
        bench.store.release_record(record)
    bench.check_idle()


def test_kv_evicted_while_reading(bench) -> None:
    bench.put(512)
    req = rewrite(700)
    assert not bench.faults.ready(req)
    bench.engine.evict_kv(1024)
    bench.engine.cache.evict_host(1024)
    assert not bench.engine.nodes()
    bench.pump()
    assert bench.counters.missed[Miss.KV_GONE] == 1
    assert bench.faults.ready(req) is True and state_of(req, PAGE).attached is None
    bench.check_idle()


def test_a_state_that_another_request_brought_meanwhile_is_used(bench) -> None:
    bench.put(512)
    req = rewrite(700)
    assert not bench.faults.ready(req)
    bench.engine.insert(A[:512], state=9.0)
    bench.engine.settle()
    bench.pump()
    assert bench.faults.ready(req) and state_of(req, PAGE).restorable == 512
    assert bench.host_state(512) is None
    bench.check_idle()


def test_an_attached_state_stays_until_its_request_is_admitted(bench) -> None:
    bench.put(512)
    first, second = rewrite(700), rewrite(700, seed=3)
    assert not bench.faults.ready(first) and not bench.faults.ready(second)
    bench.pump()
    bench.engine.cache.evict_host(1, MAMBA)
    assert bench.host_state(512) == 512.0
    bench.faults.admitted(first.cache_request_handle)
    bench.engine.cache.evict_host(1, MAMBA)
    assert bench.host_state(512) == 512.0, "the second request still waits"
    bench.faults.cancel(second.cache_request_handle)
    bench.engine.cache.evict_host(1, MAMBA)
    assert bench.host_state(512) is None
    bench.check_idle()


def test_a_state_that_is_pushed_out_again_is_read_a_few_times_only(bench) -> None:
    bench.put(512)
    req = rewrite(700)
    for _ in range(MAX_FAULT_INS_PER_REQUEST):
        assert not bench.faults.ready(req)
        bench.pump()
        assert bench.host_state(512) == 512.0
        bench.faults.admitted(req.cache_request_handle)  # taken back from a batch, say
        bench.engine.cache.evict_host(1, MAMBA)
    assert bench.faults.ready(req) is True and bench.counters.missed[Miss.RETRIES] == 1
    assert bench.counters.fault_ins == MAX_FAULT_INS_PER_REQUEST and bench.counters.internal_hits == 1
    bench.check_idle()


def test_a_short_shortage_is_waited_out(bench) -> None:
    """Every read buffer is in use by a read that will end: a few milliseconds are cheaper than the prefill."""
    bench.put(512)
    bench.put(256, ids=tokens((7, 600)))
    bench.engine.insert(tokens((7, 600))[:576])
    bench.engine.settle()
    bench.disk.reads_allowed.clear()
    other = request(tokens((7, 300), (8, 100)))
    assert not bench.faults.ready(other)
    taken = [bench.store.acquire_record() for _ in range(bench.store.records.free)]
    req = rewrite(700)
    assert not bench.faults.ready(req) and not bench.faults.ready(req)
    assert len(bench.faults) == 1, "it waits, but not for a read of its own"
    bench.disk.reads_allowed.set()
    bench.pump()
    assert not bench.faults.ready(req), "there is room now"
    bench.pump()
    assert bench.faults.ready(req) and bench.host_state(512) == 512.0
    assert bench.counters.missed[Miss.NO_ROOM] == 0
    for record in taken:
        bench.store.release_record(record)
    for one in (req, other):
        bench.faults.admitted(one.cache_request_handle)
    bench.check_idle()


def test_a_deeper_checkpoint_takes_the_place_of_a_pinned_one(bench) -> None:
    """The request waits on, and another one stores more of the same prompt: one pin remains, on the deeper node."""
    bench.put(256)
    req = rewrite(700)
    assert not bench.faults.ready(req)
    bench.pump()
    bench.put(512)
    assert not bench.faults.ready(req)
    bench.pump()
    assert bench.faults.ready(req) and state_of(req, PAGE).attached == 512 and bench.faults.pinned == 1
    bench.faults.admitted(req.cache_request_handle)
    assert bench.faults.pinned == 0
    bench.check_idle()


def test_a_queue_is_read_ahead_for_an_eighth_of_the_host_arena_at_most(bench) -> None:
    limit = bench.engine.slots.total // 8
    reqs = []
    for seed in range(10, limit + 14):
        ids = tokens((seed, 128))
        bench.engine.insert(ids)
        bench.put(64, ids=ids)
        reqs.append(request(tokens((seed, 100), (2, 20))))
        bench.engine.settle()
        bench.engine.evict_kv(2048)  # to the host
    for req in reqs:
        bench.faults.arrived(req)
        bench.pump()
    assert bench.faults.pinned == limit
    assert not bench.faults.ready(reqs[-1]), "a request that is about to run reads all the same"
    bench.pump()
    assert bench.faults.ready(reqs[-1]) and bench.faults.pinned == limit + 1
    for req in reqs:
        bench.faults.cancel(req.cache_request_handle)
    bench.check_idle()


def test_a_read_past_its_deadline_lets_its_request_go(bench, monkeypatch) -> None:
    bench.put(512)
    bench.disk.reads_allowed.clear()
    req, late = rewrite(700), rewrite(700, seed=3)
    assert not bench.faults.ready(req)
    assert bench.faults.expired_until() == 0
    monkeypatch.setattr("sglang_histate.adapter.fault_in.READ_DEADLINE_S", 0.0)
    number = bench.faults.expired_until()
    assert number > 0
    bench.faults.expire(number)
    bench.faults.expire(number)
    assert bench.faults.ready(req) and bench.counters.missed[Miss.DEADLINE] == 1
    assert bench.faults.ready(late), "nothing new is read while the disk hangs"
    bench.disk.reads_allowed.set()
    bench.pump()
    monkeypatch.undo()
    assert not bench.faults.ready(late), "the disk is back, also for a request that looked before"
    bench.pump()
    bench.faults.cancel(late.cache_request_handle)
    bench.check_idle()


def test_a_read_that_has_ended_is_never_late(bench, monkeypatch) -> None:
    """The scheduler may be busy for longer than the deadline; what was read meanwhile is used."""
    bench.put(512)
    req = rewrite(700)
    assert not bench.faults.ready(req)
    monkeypatch.setattr("sglang_histate.adapter.fault_in.READ_DEADLINE_S", 0.0)
    number = bench.faults.expired_until()
    bench.pump()
    bench.faults.expire(number)
    assert bench.faults.ready(req) and bench.host_state(512) == 512.0
    assert bench.counters.missed[Miss.DEADLINE] == 0
    bench.faults.cancel(req.cache_request_handle)
    bench.check_idle()


def test_kv_that_cannot_be_kept_on_the_host_is_read_for_once(bench, monkeypatch) -> None:
    bench.put(512)
    req = rewrite(700)
    assert not bench.faults.ready(req)
    monkeypatch.setattr(
        "sglang_histate.adapter.fault_in.attach_host_state", lambda *_: (Attach.NO_HOST_KV, None)
    )
    bench.pump()
    assert bench.faults.ready(req) and bench.faults.ready(req)
    assert bench.counters.missed[Miss.NO_HOST_KV] == 1 and bench.counters.fault_ins == 1
    bench.check_idle()


def test_a_request_waits_for_room_only_once(bench) -> None:
    """Others may take what becomes free again and again; it must not wait for ever."""
    bench.put(512)
    other_ids = tokens((7, 600))
    bench.engine.insert(other_ids[:576])
    bench.engine.settle()
    for position in (256, 320, 384):
        bench.put(position, ids=other_ids)
    bench.disk.reads_allowed.clear()
    first = request(tokens((7, 300), (8, 100)))
    assert not bench.faults.ready(first)
    taken = [bench.store.acquire_record() for _ in range(bench.store.records.free)]
    req = rewrite(700)
    assert not bench.faults.ready(req)
    bench.disk.reads_allowed.set()
    bench.pump()  # the read it waited for has ended
    taken += [
        bench.store.acquire_record() for _ in range(bench.store.records.free)
    ]  # and somebody was quicker
    assert bench.faults.ready(req) and bench.counters.missed[Miss.NO_ROOM] == 1
    bench.faults.version += 1
    assert bench.faults.ready(req) and bench.counters.missed[Miss.NO_ROOM] == 1
    for record in taken:
        bench.store.release_record(record)
    bench.faults.cancel(first.cache_request_handle)
    bench.check_idle()


def test_a_small_gain_is_recomputed() -> None:
    bench = Bench(min_gain=320)
    bench.engine.insert(A[:256])  # a state on the device
    bench.put(512)
    bench.put(576)
    assert bench.faults.ready(rewrite(560)) is True, "512 saves 256 tokens"
    assert bench.faults.ready(rewrite(700)) is False, "576 saves 320"
    bench.pump()
    bench.check_idle()
    bench.store.close()


@pytest.mark.parametrize(("length", "reads"), [(512, False), (513, True), (577, True)])
def test_at_least_one_token_is_left_to_compute(bench, length, reads) -> None:
    bench.put(512)
    assert bench.faults.ready(request(A[:length])) is not reads
    bench.pump()


def test_short_prompts_and_unknown_ones(bench) -> None:
    bench.put(512)
    for ids in (tokens((1, 10)), tokens((1, 64)), tokens((9, 700)), tokens((1, 500), (9, 100))):
        assert bench.faults.ready(request(ids)) is True
    assert bench.counters.fault_ins == 0


def test_namespaces_do_not_meet(bench) -> None:
    bench.put(512)
    assert bench.faults.ready(request(tokens((1, 700)), extra_key="tenant")) is True
    assert bench.faults.ready(request(tokens((1, 700)), cache_salt="salt")) is True
    assert bench.counters.fault_ins == 0


def test_embeddings_instead_of_tokens_are_not_looked_up(bench) -> None:
    bench.put(512)
    req = rewrite(700)
    req.positional_embed_overrides = object()
    assert bench.faults.ready(req) is True and bench.counters.fault_ins == 0


def test_a_request_is_matched_again_only_when_something_new_may_be_there(bench, monkeypatch) -> None:
    req = rewrite(700)
    looks = []
    real = type(req).init_next_round_input
    monkeypatch.setattr(
        type(req), "init_next_round_input", lambda self, *a, **k: (looks.append(1), real(self, *a, **k))
    )
    assert [bench.faults.ready(req) for _ in range(4)] == [True] * 4 and len(looks) == 1
    bench.put(512)
    assert bench.faults.ready(req) is False and len(looks) == 2
    assert bench.faults.ready(req) is False and len(looks) == 2
    bench.pump()


def reset_all(bench) -> None:
    """What `/flush_cache` does, in the tier's order."""
    bench.faults.reset()
    bench.store.clear()
    bench.engine.cache.reset()
    bench.engine.kv.clear()
    bench.engine.states.clear()


def test_a_flush_while_bytes_are_being_delivered(bench, monkeypatch) -> None:
    """The flush waits for a copy under way; no byte is written into a slot that the pool has back."""
    bench.put(512)
    inside, go, log = threading.Event(), threading.Event(), []
    real = bench.engine.slots.fill

    def slow(slot, payload, layers) -> None:
        inside.set()
        assert go.wait(10)
        real(slot, payload, layers)
        log.append("filled")

    monkeypatch.setattr(bench.engine.slots, "fill", slow)
    req = rewrite(700)
    assert not bench.faults.ready(req) and inside.wait(10)
    flush = threading.Thread(target=lambda: (bench.faults.reset(), log.append("reset")))
    flush.start()
    flush.join(0.05)
    assert flush.is_alive() and log == []
    go.set()
    flush.join(10)
    assert log == ["filled", "reset"]
    reset_all(bench)
    bench.pump()
    assert bench.faults.ready(req) is True
    assert bench.counters.missed[Miss.CACHE_RESET] == 1
    bench.check_idle()


def test_a_flush_before_bytes_are_delivered(bench, monkeypatch) -> None:
    bench.put(512)
    filled = []
    monkeypatch.setattr(bench.engine.slots, "fill", lambda slot, *_: filled.append(int(slot[0])))
    bench.disk.reads_allowed.clear()
    req = rewrite(700)
    assert not bench.faults.ready(req)
    reset_all(bench)
    assert bench.engine.host_states.held == 0
    bench.disk.reads_allowed.set()
    bench.pump()
    assert filled == []
    assert bench.faults.ready(req) is True
    bench.check_idle()


def test_the_same_prompt_right_after_a_flush_is_not_served_by_the_old_read(bench) -> None:
    bench.put(512, 1.0)
    bench.disk.reads_allowed.clear()
    old = rewrite(700)
    assert not bench.faults.ready(old)
    reset_all(bench)
    bench.engine.insert(A)
    bench.engine.settle()
    put(bench.store, bench.engine.layout, PageKeys(PAGE, None, None).at(A, 512), 512, 2.0)
    bench.faults.version += 1
    new = rewrite(700, 3)
    assert not bench.faults.ready(new) and not bench.faults.ready(old)
    bench.disk.reads_allowed.set()
    bench.pump()
    assert bench.faults.ready(new) and bench.faults.ready(old) and bench.host_state(512) == 2.0
    bench.check_idle()


# States of four pages, in an arena that holds all KV and at most three of them.
TIGHT = {"temporal": (8, 16, 12), "host_pages": 40}


@pytest.mark.parametrize(("seed", "sizes"), [(seed, sizes) for sizes in ({}, TIGHT) for seed in range(4)])
def test_random_traffic_returns_everything(seed, sizes) -> None:
    """Arrivals, aborts, faults, evictions and flushes in any order; a state in the tree is always that of its key."""
    draw = random.Random(seed)
    bench = Bench(buffers=6, **sizes)
    waiting: list = []
    bases = [A, tokens((4, 768))]
    bench.engine.insert(bases[1])
    bench.engine.settle()

    def value(base: int, position: int) -> float:
        return base * 10_000.0 + position

    def store_one() -> None:
        base = draw.randrange(2)
        position = 64 * draw.randrange(1, len(bases[base]) // 64)
        key = PageKeys(PAGE, None, None).at(bases[base], position)
        if bench.store.lookup(key) is None and bench.store.records.free > 2:
            put(bench.store, bench.engine.layout, key, position, value(base, position))
            bench.faults.version += 1

    def arrive() -> None:
        base = draw.randrange(2)
        ids = bases[base][: draw.randrange(65, len(bases[base]))] + tokens((draw.randrange(20, 24), 70))
        req = request(ids)
        bench.faults.ready(req)
        waiting.append(req)

    def admit() -> None:
        for req in list(waiting):
            if bench.faults.ready(req):
                waiting.remove(req)

    def abort() -> None:
        if waiting:
            bench.faults.cancel(waiting.pop(draw.randrange(len(waiting))).cache_request_handle)

    def refill() -> None:
        for base in bases:
            if bench.engine.kv.available_size() >= len(base) and bench.engine.states.available_size():
                bench.engine.insert(base)
        bench.engine.settle()

    def flush() -> None:
        if draw.random() < 0.1:
            reset_all(bench)
            refill()

    actions = [
        store_one,
        store_one,
        arrive,
        arrive,
        admit,
        abort,
        bench.commit,
        bench.pump,
        refill,
        flush,
        lambda: bench.disk.read_faults.append(draw.choice(["eio", ("flip", draw.randrange(4448))])),
        lambda: bench.engine.evict_kv(64 * draw.randrange(1, 12)),
        lambda: bench.engine.cache.evict_host(64 * draw.randrange(1, 12)),
        lambda: bench.engine.cache.evict_host(1, MAMBA),
    ]
    checked = 0
    for _ in range(1200):
        draw.choice(actions)()
        for node in bench.engine.nodes():
            data = node.component_data[MAMBA]
            if data.host_value is None:
                continue
            path, cur = [], node
            while cur.parent is not None:
                path.insert(0, cur.key.token_ids)
                cur = cur.parent
            ids = [int(i) for part in path for i in part]
            base = next(i for i, b in enumerate(bases) if list(b[: len(ids)]) == ids)
            for views in bench.engine.host_state(int(data.host_value[0])):
                assert (views.temporal == value(base, len(ids))).all()
                assert (views.conv == value(base, len(ids))).all()
            checked += 1
    bench.disk.read_faults.clear()
    for req in waiting:
        bench.faults.cancel(req.cache_request_handle)
    bench.pump()
    bench.engine.settle()
    assert checked > 20 and bench.counters.fault_ins > 20
    bench.check_idle()
    bench.store.close()
