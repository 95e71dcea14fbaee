"""What the ranking makes SGLang's tree let go of: states and KV, on the device and on the host."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_histate.policy.score import Eviction

from .conftest import GPU
from .engine import PAGE, Engine, build, request, tokens
from .stores import open_store, put, wait_threads

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")
MAMBA = ComponentType.MAMBA


def visit(engine: Engine, ids: array) -> None:
    """One request over `ids`: it resumes where it can, computes the rest and leaves its state."""
    core, ranking = engine.cache.tree_core, engine.ranking
    ranking.admitted(core.node_by_id(engine.match(request(ids + tokens((9, 1)))).best_match_node))
    engine.insert(ids)
    engine.settle()
    ranking.used(core.node_by_id(engine.match(request(ids + tokens((9, 1)))).best_match_node))


def resumes_at(engine: Engine, ids: array) -> int:
    """Tokens that a request over `ids` and one more would not compute again."""
    match = engine.match(request(ids + tokens((9, 1))))
    depth, node = 0, engine.cache.tree_core.node_by_id(match.best_match_node)
    while node.parent is not None:
        depth, node = depth + len(node.key), node.parent
    return depth


# Figure 7 of the paper: B has S1 after a long prefix, S2 close behind it and its final S3; C has only its final S6.
S1, S2, S3, S6 = 1024, 1024 + PAGE, 1024 + 4 * PAGE, 512


def figure_7(engine: Engine) -> tuple[array, array]:
    b, c = tokens((1, S3)), tokens((2, S6))
    visit(engine, b[:S1])
    visit(engine, b[:S2])
    visit(engine, c)
    visit(engine, b)
    return b, c


@pytest.mark.parametrize(
    ("mode", "dropped"),
    [(Eviction.LRU, "S1"), (Eviction.LRU_REFRESH, "S6"), (Eviction.SCORE, "S2"), (Eviction.LOSS, "S2")],
)
def test_figure_7_on_the_device(mode: Eviction, dropped: str) -> None:
    engine = build(mode=mode)
    b, c = figure_7(engine)
    engine.evict_states(1)
    engine.check()
    kept = {
        "S1": resumes_at(engine, b[:S1]) == S1,
        "S2": resumes_at(engine, b[:S2]) == S2,
        "S3": resumes_at(engine, b) == S3,
        "S6": resumes_at(engine, c) == S6,
    }
    assert [name for name, there in kept.items() if not there] == [dropped]


@pytest.mark.parametrize(
    ("mode", "dropped"),
    [(Eviction.LRU, "S1"), (Eviction.LRU_REFRESH, "S6"), (Eviction.SCORE, "S2"), (Eviction.LOSS, "S2")],
)
def test_figure_7_on_the_ssd(mode: Eviction, dropped: str) -> None:
    """Whose slab a new checkpoint takes is the ranking's choice too, not the store's."""
    engine = build(mode=mode)
    store = open_store(engine.layout, ranking=engine.ranking, slabs=4)
    b, c = tokens((1, S3)), tokens((2, S6))
    steps = {"S1": b[:S1], "S2": b[:S2], "S6": c, "S3": b}
    keys = {name: name.encode().ljust(32) for name in steps}
    for name, ids in steps.items():
        visit(engine, ids)
        node = engine.cache.tree_core.node_by_id(engine.match(request(ids + tokens((9, 1)))).best_match_node)
        engine.ranking.placed(keys[name], node, len(node.key), False)
        put(store, engine.layout, keys[name], len(ids), 1.0)
        wait_threads(store)
        store.poll()
    put(store, engine.layout, b"one too many".ljust(32), PAGE, 1.0)
    assert [name for name in steps if store.lookup(keys[name]) is None] == [dropped]
    assert engine.ranking.evictions["ssd_intermediate"] + engine.ranking.evictions["ssd_bundle"] == 1
    wait_threads(store)
    store.close()


def test_the_ranking_learns_where_hits_end() -> None:
    engine = build()
    ids = tokens((1, 1024))
    visit(engine, ids[:512])
    visit(engine, ids)
    core, ranking = engine.cache.tree_core, engine.ranking
    inside = core.node_by_id(engine.match(request(ids[:512] + tokens((9, 1)))).best_match_node)
    end = core.node_by_id(engine.match(request(ids + tokens((9, 1)))).best_match_node)
    before = ranking.as_json()["end_hit_share"]
    for _ in range(50):
        ranking.admitted(inside)
    after = ranking.as_json()["end_hit_share"]
    assert after < before
    for _ in range(50):
        ranking.admitted(end)
    assert ranking.as_json()["end_hit_share"] > after
    assert ranking.clock >= 100, "each admission is a tick"


def test_a_state_goes_alone_and_its_kv_stays() -> None:
    engine = build()
    b, _ = figure_7(engine)
    before = engine.kv.available_size()
    engine.evict_states(3)
    engine.check()
    assert engine.kv.available_size() == before
    assert engine.match(request(b)).full_kv_hit_length >= S2


def test_an_idle_bundle_goes_whole_before_an_active_final_checkpoint() -> None:
    engine = build(kv_tokens=8192, state_slots=32)
    idle, active = tokens((1, 1024)), tokens((2, 2048))
    visit(engine, idle)
    for turn in range(1, 4000):
        engine.ranking.admitted(engine.cache.tree_core.root_node)
        if turn % 500 == 0:
            visit(engine, active[: 256 * (turn // 500)])
    engine.evict_kv(1024)
    engine.check()
    assert engine.ranking.evictions["device_bundle"] == 1
    live = {len(node.key): node for node in engine.nodes() if not node.evicted}
    assert 1024 not in live and resumes_at(engine, active[: 256 * 7]) == 256 * 7


def test_side_requests_go_before_the_main_session() -> None:
    engine = build()
    main = tokens((1, 1024))
    visit(engine, main)
    for side in range(8):
        visit(engine, tokens((10 + side, PAGE)))
    for count in range(1, 9):
        engine.evict_states(1)
        assert resumes_at(engine, main) == 1024, f"the main session's end went at eviction {count}"
    engine.check()


def test_locked_data_stays() -> None:
    engine = build()
    b, _ = figure_7(engine)
    node = engine.match(request(b + tokens((9, 1)))).best_match_node
    lock = engine.cache.inc_lock_ref(node)
    engine.evict_states(16)
    engine.evict_kv(4096)
    engine.check()
    assert resumes_at(engine, b) == S3
    engine.cache.dec_lock_ref(node, lock.to_dec_params())
    engine.evict_kv(4096)
    engine.check()
    assert all(node.evicted for node in engine.nodes())


def test_a_bundle_ends_at_the_checkpoint_before_it_even_inside_a_node() -> None:
    engine = build()
    ids = tokens((1, 1024))
    visit(engine, ids)
    (node,) = engine.nodes()
    engine.ranking.placed(b"key", node, 512, True)  # a checkpoint on the SSD, where no node ends
    free = engine.kv.available_size()
    engine.evict_kv(PAGE)
    engine.check()
    assert engine.kv.available_size() == free + 512, "only what lies behind the checkpoint"
    assert engine.ranking.ssd.marks.find(b"key") is not None


def test_checkpoints_are_forgotten_with_their_kv() -> None:
    engine = build()
    store = open_store(engine.layout, ranking=engine.ranking)
    put(store, engine.layout, b"k" * 32, 512, 1.0)
    visit(engine, tokens((1, 1024)))
    (node,) = engine.nodes()
    engine.ranking.placed(b"k" * 32, node, 512, True)
    engine.evict_kv(4096)
    assert store.lookup(b"k" * 32) is not None, "the host still has the KV"
    engine.cache.evict_host(4096)
    engine.check()
    assert store.lookup(b"k" * 32) is None and not engine.nodes() and len(engine.ranking.ssd.marks) == 0
    store.close()


def history(engine: Engine, seed: int, steps: int) -> list[Any]:
    """A random load; returns what stayed after each eviction."""
    draw = random.Random(seed)
    sessions: list[array] = []
    seen: list[Any] = []
    for _ in range(steps):
        action = draw.random()
        if action < 0.35 or not sessions:
            sessions.append(tokens((draw.randrange(1000), PAGE * draw.randrange(1, 12))))
        elif action < 0.6:
            index = draw.randrange(len(sessions))
            sessions[index] = sessions[index] + tokens((draw.randrange(1000), PAGE * draw.randrange(1, 5)))
        elif action < 0.75:
            whole = draw.choice(sessions)
            cut = PAGE * draw.randrange(1, len(whole) // PAGE + 1)
            sessions.append(whole[:cut] + tokens((draw.randrange(1000), PAGE)))
        elif action < 0.9:
            engine.evict_states(draw.randrange(1, 4))
            seen.append(sorted(len(node.key) for node in engine.nodes()))
            continue
        elif action < 0.95:
            engine.evict_kv(PAGE * draw.randrange(1, 20))
            continue
        else:
            engine.cache.evict_host(PAGE * draw.randrange(1, 20))
            engine.check()
            continue
        ids = sessions[-1] if action < 0.35 else draw.choice(sessions)
        while True:
            try:
                visit(engine, ids)
                break
            except MemoryError:
                engine.evict_kv(PAGE * 8)
                engine.evict_states(2)
                engine.settle()
        if draw.random() < 0.3:
            node = draw.choice(engine.nodes())
            offset = PAGE * draw.randrange(1, len(node.key) // PAGE + 1)
            engine.ranking.placed(b"%d" % draw.randrange(10**9), node, offset, draw.random() < 0.7)
        engine.check()
    return seen


@pytest.mark.parametrize("mode", list(Eviction))
def test_any_history_leaves_the_mirror_and_the_tree_alike(mode: Eviction) -> None:
    for seed in range(4):
        engine = build(mode=mode)
        history(engine, seed, 120)
        engine.evict_states(64)
        engine.evict_kv(1 << 20)
        engine.settle()
        engine.cache.evict_host(1 << 20)
        engine.check()
        assert not engine.nodes() and engine.kv.available_size() == engine.kv.size


def test_the_same_history_evicts_the_same() -> None:
    assert history(build(), 7, 150) == history(build(), 7, 150)
