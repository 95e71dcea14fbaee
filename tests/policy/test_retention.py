"""Sessions that clients ask to keep: a share of the memory, for a while, each once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.retention import MOST_REQUESTS, Retention
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Pool


def test_kept_for_so_many_requests_at_most() -> None:
    retention = Retention(1000)
    assert retention.keep("a", 10, now=5, requests=20) == 25
    assert retention.keep("b", 10, now=5, requests=10**9) == 5 + MOST_REQUESTS


def test_no_more_than_the_limit_at_a_time() -> None:
    retention = Retention(100)
    assert retention.keep("a", 60, 0, 10) == 10
    assert retention.keep("b", 60, 0, 10) is None and retention.bytes == 60
    assert retention.keep("a", 90, 0, 30) == 30, "its own bytes do not stand in its way"
    assert retention.keep("b", 60, 30, 10) == 40, "the first has run out"
    retention.shrink("b", 20)
    retention.shrink("nobody", 20)
    assert retention.bytes == 20 and retention.keep("b", 101, 31, 1) is None and retention.bytes == 20
    retention.release("b")
    assert retention.keep("c", 100, 31, 1) == 32
    retention.clear()
    assert retention.bytes == 0


@pytest.mark.parametrize(("size", "requests"), [(0, 1), (1, 0), (-1, 5)])
def test_what_cannot_be_kept(size: int, requests: int) -> None:
    with pytest.raises(ValueError, match="cannot be kept"):
        Retention(100).keep("a", size, 0, requests)


asks = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 60), st.integers(0, 5), st.integers(1, 30)))


@given(asks)
def test_whatever_is_asked_the_limit_holds(what) -> None:
    retention, now, kept = Retention(100), 0, {}
    for place, size, passed, requests in what:
        now += passed
        until = retention.keep(place, size, now, requests)
        kept = {name: one for name, one in kept.items() if one[0] > now}
        others = sum(size for name, (_, size) in kept.items() if name != place)
        assert (until is None) == (others + size > 100)
        if until is not None:
            kept[place] = until, size
        assert retention.bytes <= 100


@pytest.mark.parametrize("mode", list(Eviction))
def test_a_kept_session_goes_later_and_one_that_is_over_first(mode: Eviction) -> None:
    tree = PrefixTree()
    queue = EvictionQueue(tree, Pool(Tier.HOST, 100, 1), 1, mode=mode)
    for node in (1, 2, 3, 4):
        tree.add(node, 0, 1000)
        tree.set_kv(node, Tier.HOST, True)
        tree.set_checkpoint(node, 1000, Tier.HOST, True)
        tree.touch(node, 1000, now=node)
    tree.keep(1, 1000, until=500)
    tree.forsake(3)
    assert [unit.nodes for unit in queue.ranked()] == [(3,), (2,), (4,), (1,)]
    tree.touch(1, 1000, now=10)
    assert [unit.nodes for unit in queue.ranked()][-1] == (1,), "a visit does not end it"
    tree.add(5, 3, 10)
    tree.set_kv(5, Tier.HOST, True)
    tree.touch(5, 10, now=600)
    assert queue.ranked()[0].nodes != (3,), "somebody came back"
    everything = len(queue.ranked())
    for _ in range(everything):
        unit = queue.victim(lambda unit: True)
        assert unit is not None, "what is kept goes too when there is nothing else"
        for node in unit.nodes:
            tree.remove(node)
        if not unit.nodes and unit.checkpoint is not None:
            tree.set_checkpoint(*unit.checkpoint, Tier.HOST, False)


def chain(*lengths: int) -> tuple[PrefixTree, EvictionQueue]:
    """One trajectory of nodes 1, 2, ... with a checkpoint at the end of each, all used at time 1."""
    tree = PrefixTree()
    queue = EvictionQueue(tree, Pool(Tier.HOST, 100, 1), 1, mode=Eviction.LRU_REFRESH)
    for node, tokens in enumerate(lengths, 1):
        tree.add(node, node - 1, tokens)
        tree.set_kv(node, Tier.HOST, True)
        tree.set_checkpoint(node, tokens, Tier.HOST, True)
    tree.touch(len(lengths), lengths[-1], now=1)
    return tree, queue


def accessed(queue: EvictionQueue) -> dict[int, int]:
    return {unit.checkpoint[0]: unit.last_access for unit in queue.ranked() if unit.checkpoint is not None}


def test_a_session_that_is_over_goes_whole() -> None:
    tree, queue = chain(100, 100, 100)
    tree.forsake(3)
    assert accessed(queue) == {1: 0, 2: 0, 3: 0}


def test_what_somebody_else_keeps_stays_when_a_fork_of_it_is_over() -> None:
    tree, queue = chain(100, 100, 100)
    tree.keep(2, 100, until=50)
    tree.forsake(3)
    assert accessed(queue) == {1: 1, 2: 50, 3: 0}


def test_a_shared_head_stays_though_the_others_are_gone() -> None:
    tree, queue = chain(200, 100)
    tree.split(1, 9, 150)  # another session parted there
    tree.add(10, 9, 50)
    tree.remove(10)
    tree.set_checkpoint(9, 150, Tier.HOST, True)
    tree.forsake(2)
    assert accessed(queue) == {9: 1, 1: 0, 2: 0}


def test_what_others_share_is_not_forsaken() -> None:
    tree = PrefixTree()
    queue = EvictionQueue(tree, Pool(Tier.HOST, 100, 1), 1, mode=Eviction.LRU_REFRESH)
    for node, parent in ((1, 0), (2, 1), (3, 1)):
        tree.add(node, parent, 100)
        tree.set_kv(node, Tier.HOST, True)
        tree.set_checkpoint(node, 100, Tier.HOST, True)
        tree.touch(node, 100, now=node)
    tree.forsake(1)  # text goes on there
    tree.forsake(2)
    ranked = queue.ranked()
    assert ranked[0].nodes == (2,) and ranked[0].last_access == 0
    assert all(unit.last_access == 3 for unit in ranked[1:])
