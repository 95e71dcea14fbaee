"""What the ranking tells the capture plan: what a checkpoint costs, how likely a hit is, where a text went on."""

from __future__ import annotations

import pytest

from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.scarcity import LEAST_WRITE_TOKENS

from .conftest import GPU
from .engine import PAGE, build, request, tokens
from .stores import open_store, put, wait_threads
from .test_eviction import visit

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")


def test_where_a_text_went_on_to_that_a_request_left() -> None:
    engine = build()
    ids = tokens((1, 1024))
    visit(engine, ids)
    ranking = engine.ranking

    def left(at: int) -> int | None:
        found = engine.match(request(ids[:at] + tokens((7, 100))))
        return ranking.parted(found.last_visited_node_id, found.full_kv_hit_length)

    assert left(512) == 1024
    assert left(1024) is None, "nothing was left: the text ends there"
    visit(engine, ids[:512] + tokens((8, 256)))
    assert left(512) is None, "two texts go on there"
    visit(engine, ids + tokens((9, 256)))
    assert left(1024) is None, "a request ended there: who goes on from there is no rewrite"
    assert ranking.parted(None, 0) is None
    engine.check()


def test_a_checkpoint_costs_its_write_until_the_ssd_is_full_of_what_is_used() -> None:
    engine = build()
    store = open_store(engine.layout, ranking=engine.ranking, slabs=8)
    engine.ranking.connect(store)
    write = LEAST_WRITE_TOKENS  # its slabs are small
    assert engine.ranking.checkpoint_price() == write
    for number in range(12):
        ids = tokens((20 + number, 4 * PAGE))
        visit(engine, ids)
        key = str(number).encode().ljust(32)
        node = engine.cache.tree_core.node_by_id(engine.match(request(ids + tokens((9, 1)))).best_match_node)
        engine.ranking.placed(key, node, len(node.key), False)
        put(store, engine.layout, key, len(ids), 1.0)
        wait_threads(store)
        store.poll()
    assert store.fill == 1.0
    assert engine.ranking.scarcity.tiers[Tier.SSD].victims == 4
    assert engine.ranking.checkpoint_price() > write
    figures = engine.ranking.as_json()
    assert figures["capture_price_tokens"] == engine.ranking.checkpoint_price()
    assert 0 <= figures["returns"]["1024"] <= figures["returns"]["0"] <= 1
    wait_threads(store)
    store.close()


def test_a_session_that_goes_on_is_a_return_and_a_new_one_is_not() -> None:
    engine = build()
    returns = engine.ranking.scarcity.returns
    ids = tokens((1, 1024))
    for end in range(PAGE, 1024, PAGE):
        visit(engine, ids[:end])
    often = returns.probability(0)
    for _ in range(60):
        engine.ranking.admitted(engine.cache.tree_core.root_node)
    assert returns.probability(0) < often
