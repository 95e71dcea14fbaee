"""Why tokens are computed again although their KV is there: each reason is caused alone, and counted alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.adapter.attribution import Absences, Recomputed, attribute
from sglang_histate.adapter.counters import HitTier, Miss, Why
from sglang_histate.adapter.page_keys import PageKeys
from sglang_histate.adapter.request_state import state_of
from sglang_histate.adapter.tree_attach import Attach
from sglang_histate.store import NO_NAMESPACE, PutResult, WriteLimits

from .conftest import GPU
from .engine import PAGE, request, tokens
from .stores import fake_disk, put, wait_threads
from .test_tier import Alone, Rank

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")

A = tokens((1, 1024))
AT = 704  # where the rewrite parts from A: on a page, so that the KV ends where the checkpoint is
KEY = PageKeys(PAGE, None, None).at(A, AT)


def rewrite(at: int = AT, seed: int = 2, **changes: Any) -> Any:
    return request(tokens((1, at), (seed, 150)), **changes)


def stored(rank: Rank, key: bytes = KEY, position: int = AT) -> None:
    put(rank.store, rank.engine.layout, key, position, 1.0)
    rank.drain()
    rank.tier.fault_ins.version += 1


def admit(rank: Rank, req: Any) -> Any:
    """Let `req` wait for its reads and take it into a batch, without its load-back."""
    while not rank.engine.cache.request_ready(req):
        wait_threads(rank.store)
        rank.tier.tick()
    req.init_next_round_input(rank.engine.cache, cow_mamba=False)
    rank.tier.request_planned(req)
    return state_of(req, PAGE)


def captured(rank: Rank, done: bool = True) -> Any:
    """The forward pass over A[:AT]: its final checkpoint is at AT."""
    req = request(A[:AT])
    rank.prefill(req, 0, AT)
    if done:
        rank.drain()
    return req


def failing(rank: Rank, way: str, *faults: Any) -> None:
    getattr(fake_disk(rank.store), f"{way}_faults").extend(faults)


# Each leaves the KV of A[:704] in the tree and something wrong with the checkpoint at 704, and returns the request.


def not_captured(rank: Rank) -> Any:
    return rewrite()


def no_buffer(rank: Rank) -> Any:
    taken = [rank.store.acquire_record() for _ in range(rank.store.records.total)]
    captured(rank)
    for record in taken:
        rank.store.release_record(record)
    return rewrite()


def off_grid(rank: Rank) -> Any:
    req = request(A[:AT])
    for start, end in ((0, 100), (100, AT)):
        rank.prefill(req, start, end)
        rank.drain()
    return rewrite()


def write_limits(rank: Rank) -> Any:
    captured(rank)
    return rewrite()


def no_slab(rank: Rank) -> Any:
    """The one slab has what must not make room."""
    other = PageKeys(PAGE, None, None).at(tokens((5, 64)), 64)
    stored(rank, other, 64)
    rank.engine.ranking.kept.update(entry.name for entry in rank.store.entries())
    captured(rank)
    return rewrite()


def evicted(rank: Rank) -> Any:
    """The one slab is needed for something else."""
    stored(rank)
    stored(rank, PageKeys(PAGE, None, None).at(tokens((5, 64)), 64), 64)
    return rewrite()


def aborted(rank: Rank) -> Any:
    req = captured(rank, done=False)
    rank.tier.released(req)
    rank.drain()
    return rewrite()


def purged(rank: Rank) -> Any:
    stored(rank)
    rank.store.purge(NO_NAMESPACE)
    return rewrite()


def write_failed(rank: Rank) -> Any:
    failing(rank, "write", "eio")
    stored(rank)
    return rewrite()


def read_failed(rank: Rank) -> Any:
    stored(rank)
    failing(rank, "read", "eio")
    return rewrite()


def damaged(rank: Rank) -> Any:
    stored(rank)
    failing(rank, "read", ("flip", 4096))
    return rewrite()


def disk_down(rank: Rank) -> Any:
    stored(rank)
    for _ in range(1000):
        rank.store._roots[0].reads.record(False, "eio")
    return rewrite()


def fingerprint(rank: Rank) -> Any:
    stored(rank)
    rank.tier.verification.trust.weights_change()
    return rewrite()


def quarantined(rank: Rank) -> Any:
    stored(rank)
    rank.store.quarantine()
    return rewrite()


def small_gain(rank: Rank) -> Any:
    stored(rank)
    return rewrite()


def no_room(rank: Rank) -> Any:
    stored(rank)
    while rank.engine.host_states.available_size():
        rank.engine.host_states.alloc(1)
    return rewrite()


def no_host_room(rank: Rank) -> Any:
    stored(rank)
    return rewrite()


def deadline(rank: Rank) -> Any:
    stored(rank)
    disk = fake_disk(rank.store)
    disk.reads_allowed.clear()
    req = rewrite()
    assert not rank.engine.cache.request_ready(req)
    rank.tier.fault_ins.expire(1)
    return req


def retries(rank: Rank) -> Any:
    stored(rank)
    req = rewrite()
    state_of(req, PAGE).fault_ins = 3
    return req


def not_loaded(rank: Rank) -> Any:
    """Read, attached on the host, and then the device has no room for it."""
    stored(rank)
    return rewrite()


def not_asked(rank: Rank) -> Any:
    stored(rank)
    req = rewrite()
    req.session = SimpleNamespace(streaming=True, session_id="s")
    return req


def late(rank: Rank) -> Any:
    req = rewrite()
    assert rank.engine.cache.request_ready(req)
    put(rank.store, rank.engine.layout, KEY, AT, 1.0)
    return req


CASES: dict[Why, tuple[Callable[[Rank], Any], dict[str, Any]]] = {
    Why.NOT_CAPTURED: (not_captured, {}),
    Why.NO_BUFFER: (no_buffer, {}),
    Why.OFF_GRID: (off_grid, {}),
    Why.WRITE_LIMITS: (write_limits, {"limits": WriteLimits(0)}),
    Why.NO_SLAB: (no_slab, {"slabs": 1}),
    Why.EVICTED: (evicted, {"slabs": 1}),
    Why.ABORTED: (aborted, {}),
    Why.PURGED: (purged, {}),
    Why.WRITE_FAILED: (write_failed, {}),
    Why.READ_FAILED: (read_failed, {}),
    Why.DAMAGED: (damaged, {}),
    Why.DISK_DOWN: (disk_down, {}),
    Why.FINGERPRINT: (fingerprint, {}),
    Why.QUARANTINED: (quarantined, {}),
    Why.SMALL_GAIN: (small_gain, {"min_gain": 1024}),
    Why.NO_ROOM: (no_room, {}),
    Why.NO_HOST_ROOM: (no_host_room, {}),
    Why.DEADLINE: (deadline, {}),
    Why.RETRIES: (retries, {}),
    Why.NOT_LOADED: (not_loaded, {}),
    Why.NOT_ASKED: (not_asked, {}),
    Why.LATE: (late, {}),
}


def test_each_reason_has_its_case() -> None:
    assert set(CASES) == set(Why)


@pytest.mark.parametrize("why", Why, ids=lambda why: why.value)
def test_one_reason_alone(why: Why, monkeypatch) -> None:
    cause, settings = CASES[why]
    rank = Rank(Alone(), **settings)
    try:
        rank.engine.insert(A)
        rank.engine.settle()
        if why is Why.NO_HOST_ROOM:
            monkeypatch.setattr(
                "sglang_histate.adapter.fault_in.attach_host_state", lambda *_: (Attach.NO_HOST_KV, None)
            )
        req = cause(rank)
        state = admit(rank, req)
        moved = {one: count for one, count in rank.counters.recomputed.items() if count}
        assert moved == {why: AT}
        assert state.recomputed == (Recomputed(why, 0, AT),)
        assert rank.counters.recomputed_with_kv == AT
        assert not any(rank.counters.hits.values())
    finally:
        fake_disk(rank.store).reads_allowed.set()
        rank.store.close()


@pytest.fixture
def rank():
    made = Rank(Alone())
    made.engine.insert(A)
    made.engine.settle()
    yield made
    made.store.close()


def test_the_deepest_checkpoint_that_should_be_there_takes_the_blame(rank) -> None:
    """Behind it no checkpoint was planned; before it, another one is gone too, which would not have been used."""
    for position in (320, 512):
        key = PageKeys(PAGE, None, None).at(A, position)
        stored(rank, key, position)
        failing(rank, "read", "eio")
    state = admit(rank, rewrite(700))
    assert state.recomputed == (Recomputed(Why.READ_FAILED, 0, 512), Recomputed(Why.NOT_CAPTURED, 512, 640))
    assert {one: n for one, n in rank.counters.recomputed.items() if n} == {
        Why.READ_FAILED: 512,
        Why.NOT_CAPTURED: 128,
    }


def test_a_record_of_other_weights(rank, monkeypatch) -> None:
    stored(rank)
    reader = rank.store._roots[0].reader
    monkeypatch.setattr(reader, "_fingerprint_half", b"x" * 16)
    assert [part.why for part in admit(rank, rewrite()).recomputed] == [Why.FINGERPRINT]


def test_what_is_stored_again_is_no_longer_missed(rank) -> None:
    failing(rank, "write", "eio")
    stored(rank)
    assert rank.engine.ranking.absences.why(KEY) is Why.WRITE_FAILED
    stored(rank)
    assert rank.engine.ranking.absences.why(KEY) is None


def test_an_empty_cache_remembers_nothing(rank) -> None:
    failing(rank, "write", "eio")
    stored(rank)
    rank.engine.cache.reset()
    assert len(rank.engine.ranking.absences) == 0


def test_hits_are_counted_by_the_tier_of_the_checkpoint(rank) -> None:
    whole = request(A + tokens((9, 3)))
    assert admit(rank, whole).resumed_from is HitTier.DEVICE
    state = state_of(rewrite(), PAGE)
    assert state.resumed_from is None and state.recomputed == ()
    counters = rank.counters
    assert counters.hits == {HitTier.DEVICE: 1, HitTier.HOST: 0, HitTier.SSD: 0}
    assert counters.hit_tokens[HitTier.DEVICE] == counters.hit_kv_tokens[HitTier.DEVICE] == 1024
    assert counters.prompt_tokens == 1027 and counters.recomputed_with_kv == 0


def test_the_memory_of_what_is_missing_is_bounded() -> None:
    absences = Absences(most=3)
    for number in (1, 2, 3, 1, 4):
        absences.note(b"%d" % number, Why.EVICTED)
    assert [absences.why(b"%d" % number) for number in (1, 2, 3, 4)] == [
        Why.EVICTED,
        None,
        Why.EVICTED,
        Why.EVICTED,
    ]
    absences.refused(b"1", PutResult.CLOSED)  # says nothing about the checkpoint
    assert absences.why(b"1") is Why.EVICTED


@given(
    resumed=st.integers(0, 20),
    more=st.integers(0, 20),
    causes=st.dictionaries(st.integers(1, 40), st.sampled_from(list(Why)), max_size=8),
)
def test_the_parts_cover_what_is_computed_again(resumed, more, causes) -> None:
    reusable = resumed + more
    parts = attribute(resumed * 8, reusable * 8, 8, lambda position: causes.get(position // 8))
    assert sum(part.tokens for part in parts) == more * 8
    assert all(part.tokens > 0 for part in parts)
    assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]
    named = [position for position in causes if resumed < position <= reusable]
    if named:
        assert parts[0] == Recomputed(causes[max(named)], resumed * 8, max(named) * 8)
    assert all(part.why is Why.NOT_CAPTURED for part in parts[bool(named) :])


# Each reason of a read for a request that came to nothing, in the same way.


def read_fails(rank: Rank) -> None:
    stored(rank)
    failing(rank, "read", "eio")
    admit(rank, rewrite())


def kv_goes(rank: Rank) -> None:
    stored(rank)
    req = rewrite()
    assert not rank.engine.cache.request_ready(req)
    rank.engine.evict_kv(1024)
    rank.engine.cache.evict_host(1024)
    admit(rank, req)


def is_aborted(rank: Rank) -> None:
    stored(rank)
    req = rewrite()
    assert not rank.engine.cache.request_ready(req)
    rank.tier.fault_ins.cancel(req.cache_request_handle)


def is_flushed(rank: Rank) -> None:
    stored(rank)
    assert not rank.engine.cache.request_ready(rewrite())
    rank.tier.fault_ins.reset()


MISSES: dict[Miss, Callable[[Rank], Any]] = {
    Miss.NO_ROOM: lambda rank: admit(rank, no_room(rank)),
    Miss.READ_FAILED: read_fails,
    Miss.KV_GONE: kv_goes,
    Miss.NO_HOST_KV: lambda rank: admit(rank, no_host_room(rank)),
    Miss.DEADLINE: lambda rank: admit(rank, deadline(rank)),
    Miss.NOT_LOADED: lambda rank: admit(rank, not_loaded(rank)),
    Miss.ABORTED: is_aborted,
    Miss.CACHE_RESET: is_flushed,
    Miss.RETRIES: lambda rank: admit(rank, retries(rank)),
}


@pytest.mark.parametrize("miss", Miss, ids=lambda miss: miss.value)
def test_one_miss_alone(miss: Miss, rank, monkeypatch) -> None:
    if miss is Miss.NO_HOST_KV:
        monkeypatch.setattr(
            "sglang_histate.adapter.fault_in.attach_host_state", lambda *_: (Attach.NO_HOST_KV, None)
        )
    try:
        MISSES[miss](rank)
        assert {one: count for one, count in rank.counters.missed.items() if count} == {miss: 1}
    finally:
        fake_disk(rank.store).reads_allowed.set()
