"""Sessions that clients ask to keep: a share of the memory, for a while, each once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.retention import MOST_KEPT, MOST_REQUESTS, Forks, Retention
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Pool


def keep(retention: Retention, place: str, size: int, now: int, requests: int, **more) -> int | None:
    """All of `size` is KV before one checkpoint, at token 10."""
    granted = retention.keep(
        place, (10,), token_bytes=size, state_bytes=0, now=now, requests=requests, **more
    )
    return None if granted is None else granted.until


def test_kept_for_so_many_requests_at_most() -> None:
    retention = Retention(1000)
    assert keep(retention, "a", 10, now=5, requests=20) == 25 == retention.until("a", 10)
    assert keep(retention, "b", 10, now=5, requests=10**9) == 5 + MOST_REQUESTS
    assert retention.until("a", 11) == retention.until("c", 10) == 0


def test_no_more_than_the_limit_at_a_time() -> None:
    retention = Retention(100)
    assert keep(retention, "a", 60, 0, 10) == 10
    assert keep(retention, "b", 60, 0, 10) is None and retention.bytes == 60
    assert keep(retention, "a", 90, 0, 30) == 30, "its own bytes do not stand in its way"
    assert keep(retention, "b", 60, 30, 10) == 40, "the first has run out"
    assert retention.release(None, "nobody") == () and retention.release(None, "b") == (("b", 10),)
    assert keep(retention, "c", 100, 31, 1) == 32
    retention.clear()
    assert retention.bytes == 0


def test_a_session_without_a_name_is_kept_for_the_longest_that_was_asked() -> None:
    """Or the share could be had for one request at a time, and the sessions be kept for longer."""
    retention = Retention(100)
    assert keep(retention, "a", 60, 0, 500) == 500
    assert keep(retention, "a", 60, 0, 1) == 500 == retention.until("a", 10)
    assert keep(retention, "b", 60, 2, 10) is None
    keep(retention, "a", 60, 2, 5, forks=Forks(10, b"key", 1))
    assert retention.began(3, lambda position, key: True) == ()


def test_a_session_with_a_name_is_kept_once() -> None:
    retention = Retention(100)
    assert keep(retention, "a", 60, 0, 500, owner="me") == 500
    assert keep(retention, "a", 20, 0, 90, owner="you") == 90
    granted = retention.keep("b", (20, 40), token_bytes=70, state_bytes=10, now=1, requests=5, owner="me")
    assert granted == (6, (("a", 10),))
    assert retention.until("a", 10) == 90, "the other session is still kept"
    assert keep(retention, "c", 100, 1, 900, owner="me") is None
    assert retention.until("b", 40) == 6, "what there is no room for does not end what is kept"
    assert retention.release("me") == (("b", 20), ("b", 40))
    assert retention.release("me") == () and retention.release(None, "a") == () and retention.bytes == 20


def test_tokens_on_the_way_count_once_while_what_has_them_too_is_kept() -> None:
    retention = Retention(100)
    for turn, size in enumerate((20, 40, 60), 1):
        above = [f"turn {before}" for before in range(1, turn)]
        assert retention.keep(
            f"turn {turn}", (), token_bytes=size, state_bytes=5, now=0, requests=9, above=above
        )
    assert retention.bytes == 60 + 3 * 5
    assert retention.keep("turn 4", (), token_bytes=90, state_bytes=5, now=0, requests=9) is None
    assert retention.bytes == 60 + 3 * 5, "what there is no room for covers nothing"
    retention.release(None, "turn 3")
    assert retention.bytes == 20 + 40 + 2 * 5, "never less than what is kept"


def test_forks_end_it_when_all_of_them_began() -> None:
    retention = Retention(100)
    granted = retention.keep(
        "a", (10, 30), token_bytes=9, state_bytes=1, now=0, requests=100, forks=Forks(10, b"key", 2)
    )
    assert granted is not None
    asked: list[tuple[int, bytes]] = []

    def begins(position: int, key: bytes) -> bool:
        asked.append((position, key))
        return True

    assert retention.began(1, lambda position, key: False) == ()
    assert retention.began(2, begins) == () and asked == [(10, b"key")]
    assert retention.began(3, begins) == (("a", 10), ("a", 30)) and retention.bytes == 0
    assert retention.began(4, begins) == () and len(asked) == 2
    keep(retention, "b", 9, 4, 10, forks=Forks(10, b"key", 1))
    assert retention.began(14, begins) == () and len(asked) == 2, "it has run out"


def test_no_more_than_so_many_at_a_time() -> None:
    retention = Retention(10**9)
    granted = [keep(retention, str(number), 1, 0, 10) for number in range(MOST_KEPT + 1)]
    assert None not in granted[:-1] and granted[-1] is None
    assert keep(retention, "0", 1, 1, 20) == 21, "one that is kept already"


@pytest.mark.parametrize(("size", "requests"), [(0, 1), (1, 0), (-1, 5)])
def test_what_cannot_be_kept(size: int, requests: int) -> None:
    with pytest.raises(ValueError, match="cannot be kept"):
        keep(Retention(100), "a", size, 0, requests)


asks = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 5), st.integers(1, 30), st.sampled_from([None, *"ABC"]))
)


@given(asks)
def test_whatever_is_asked_the_limit_holds(what) -> None:
    """Each place has bytes of its own, which sessions that end there may share."""
    retention, now, kept = Retention(30), 0, {}
    sizes = [3, 5, 20, 31, 2, 9, 11, 1, 6]
    for place, passed, requests, owner in what:
        now += passed
        until = keep(retention, place, sizes[place], now, requests, owner=owner)
        kept = {name: one for name, one in kept.items() if one > now}
        same = {name for name in kept if name[1] == owner and (owner is not None or name[0] == place)}
        others = [at for at, _ in kept if (at, _) not in same]
        if sum(sizes[at] for at in others) + sizes[place] <= 30:
            assert until is not None
        if sum(sizes[at] for at in {*others, place}) > 30:
            assert until is None
        if until is not None:
            kept = {name: one for name, one in kept.items() if name not in same} | {(place, owner): until}
        assert sum(sizes[at] for at in {at for at, _ in kept}) <= retention.bytes <= 30
        assert all(retention.until(at, 10) >= one for (at, _), one in kept.items())


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


def test_a_keep_can_be_taken_back() -> None:
    tree, queue = chain(100)
    tree.touch(1, 100, now=5)
    tree.keep(1, 100, until=50)
    tree.keep(1, 100, until=20)
    assert accessed(queue) == {1: 20}, "the last one counts"
    tree.keep(1, 100, until=0)
    assert accessed(queue) == {1: 5}, "as used now, not as never used"
    tree.keep(1, 100, until=0)
    assert accessed(queue) == {1: 5}


def test_a_kept_end_is_not_forsaken() -> None:
    tree, queue = chain(100, 100)
    tree.keep(2, 100, until=50)
    tree.forsake(2)
    assert accessed(queue) == {1: 1, 2: 50}


def test_only_what_lies_behind_a_position_is_forsaken() -> None:
    tree, queue = chain(100, 100, 100)
    tree.set_checkpoint(2, 40, Tier.HOST, True)
    tree.touch(3, 100, now=7)
    tree.forsake(3, 140)
    assert {unit.checkpoint: unit.last_access for unit in queue.ranked()} == {
        (1, 100): 7,
        (2, 40): 7,
        (2, 100): 0,
        (3, 100): 0,
    }
    assert tree.last_used(2, 40) == 7 and tree.last_used(2, 41) == 0
    for start in (300, 400):
        tree.touch(3, 100, now=8)
        tree.forsake(3, start)
        assert tree.last_used(3, 100) == 8


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
