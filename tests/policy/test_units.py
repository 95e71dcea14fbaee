"""Each rule about what goes together, on trees small enough to draw."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Kind, Pool, Unit

HOST, SSD, DEVICE = Tier.HOST, Tier.SSD, Tier.DEVICE
STATE, KV = 1000, 10


def tree_of(*nodes: tuple[int, int, int], kv: Tier | None = HOST) -> PrefixTree:
    """A tree of (node, parent, tokens), all with KV in one tier."""
    tree = PrefixTree()
    for node, parent, tokens in nodes:
        tree.add(node, parent, tokens)
        if kv is not None:
            tree.set_kv(node, kv, True)
    return tree


def units(
    tree: PrefixTree, tier: Tier = HOST, state: int = STATE, kv: int = KV, mode: Eviction = Eviction.SCORE
) -> dict[tuple[int, int] | None, Unit]:
    ranked = EvictionQueue(tree, Pool(tier, state, kv), KV, mode=mode).ranked()
    found = {unit.checkpoint: unit for unit in ranked}
    assert len(found) == len(ranked)
    return found


def test_a_bundle_is_the_final_state_and_the_kv_after_the_checkpoint_before() -> None:
    tree = tree_of((1, 0, 50), (2, 1, 30), (3, 2, 20))
    for node, offset in ((1, 50), (3, 20)):
        tree.set_checkpoint(node, offset, HOST, True)
    found = units(tree)
    assert set(found) == {(1, 50), (3, 20)}
    bundle = found[3, 20]
    assert (bundle.kind, bundle.nodes, bundle.cut) == (Kind.BUNDLE, (3, 2), None)
    assert bundle.has_state and bundle.bytes == STATE + 50 * KV
    assert bundle.cost_tokens == 25.0  # 50 tokens back, at the end with probability 1/2
    single = found[1, 50]
    assert (single.kind, single.nodes, single.bytes) == (Kind.INTERMEDIATE, (), STATE)
    assert single.cost_tokens == pytest.approx(50 * 0.5 * 50 / 100)


def test_after_a_bundle_the_checkpoint_before_is_the_next() -> None:
    tree = tree_of((1, 0, 50), (2, 1, 30))
    tree.set_checkpoint(1, 50, HOST, True)
    tree.set_checkpoint(2, 30, HOST, True)
    queue = EvictionQueue(tree, Pool(HOST, STATE, KV), KV)
    assert {unit.checkpoint: unit.kind for unit in queue.ranked()}[1, 50] is Kind.INTERMEDIATE
    tree.set_checkpoint(2, 30, HOST, False)
    tree.remove(2)
    (unit,) = queue.ranked()
    assert (unit.kind, unit.checkpoint, unit.nodes) == (Kind.BUNDLE, (1, 50), (1,))
    assert (unit.bytes, unit.cost_tokens) == (STATE + 50 * KV, 25.0)


def test_a_checkpoint_of_another_tier_is_a_limit_too_and_may_lie_inside_a_node() -> None:
    tree = tree_of((1, 0, 50), (2, 1, 30))
    tree.set_checkpoint(1, 20, SSD, True)
    tree.set_checkpoint(2, 30, HOST, True)
    found = units(tree)
    assert set(found) == {(2, 30)}
    assert (found[2, 30].nodes, found[2, 30].cut) == ((2, 1), (1, 20))
    assert found[2, 30].bytes == STATE + 60 * KV
    tree.split(1, 9, 20)  # as the adapter does before it evicts
    assert (units(tree)[2, 30].nodes, units(tree)[2, 30].cut) == ((2, 1), None)


def test_kv_after_the_last_checkpoint_is_a_bundle_of_its_own_and_worth_nothing() -> None:
    tree = tree_of((1, 0, 50), (2, 1, 30))
    tree.set_checkpoint(2, 10, HOST, True)
    tail = units(tree)[None]
    assert (tail.kind, tail.nodes, tail.cut, tail.has_state) == (Kind.BUNDLE, (2,), (2, 10), False)
    assert (tail.bytes, tail.cost_tokens) == (20 * KV, 0.0)
    assert units(tree)[2, 10].kind is Kind.INTERMEDIATE


def test_without_any_checkpoint_all_unshared_kv_is_one_bundle() -> None:
    assert units(tree_of((1, 0, 50), (2, 1, 30)))[None].nodes == (2, 1)


def test_kv_that_another_child_shares_stays_until_that_child_is_gone() -> None:
    tree = tree_of((1, 0, 50), (2, 1, 30), (3, 1, 40))
    for node, tokens in ((2, 30), (3, 40)):
        tree.set_checkpoint(node, tokens, HOST, True)
    queue = EvictionQueue(tree, Pool(HOST, STATE, KV), KV)
    assert {unit.nodes for unit in queue.ranked()} == {(2,), (3,)}
    tree.set_kv(3, HOST, False)
    left = {unit.checkpoint: unit for unit in queue.ranked()}
    assert left[2, 30].nodes == (2, 1)
    assert left[3, 40].kind is Kind.INTERMEDIATE  # its state is still there


def test_a_child_with_kv_elsewhere_shares_nothing_here() -> None:
    tree = tree_of((1, 0, 50), (2, 1, 30))
    tree.add(3, 1, 40)
    tree.set_kv(3, SSD, True)
    assert units(tree)[None].nodes == (2, 1)


def test_a_bundle_whose_state_is_elsewhere_frees_its_kv_only() -> None:
    tree = tree_of((1, 0, 50))
    tree.set_checkpoint(1, 50, SSD, True)
    found = units(tree)[1, 50]
    assert (found.kind, found.has_state, found.bytes, found.cost_tokens) == (Kind.BUNDLE, False, 500, 25.0)


def test_a_pool_of_states_frees_states_only() -> None:
    tree = tree_of((1, 0, 50), (2, 1, 30), (3, 1, 10))
    tree.set_checkpoint(1, 50, HOST, True)
    tree.set_checkpoint(2, 30, HOST, True)
    tree.set_checkpoint(3, 10, SSD, True)
    found = units(tree, kv=0)
    assert {key: unit.kind for key, unit in found.items()} == {
        (1, 50): Kind.INTERMEDIATE,
        (2, 30): Kind.BUNDLE,
    }
    assert (found[2, 30].nodes, found[2, 30].bytes) == ((2,), STATE)


def test_a_pool_of_kv_has_no_intermediates() -> None:
    tree = tree_of((1, 0, 50), (2, 1, 30))
    tree.set_checkpoint(1, 50, HOST, True)
    tree.set_checkpoint(2, 30, HOST, True)
    found = units(tree, state=0)
    assert set(found) == {(2, 30)}
    assert found[2, 30].has_state and found[2, 30].bytes == 30 * KV


def test_on_ssd_every_checkpoint_that_ends_no_kv_there_is_an_intermediate() -> None:
    tree = tree_of((1, 0, 50), (2, 1, 30), kv=HOST)
    for node, offset in ((1, 10), (1, 50), (2, 30)):
        tree.set_checkpoint(node, offset, SSD, True)
    assert {unit.kind for unit in units(tree, SSD).values()} == {Kind.INTERMEDIATE}
    tree.set_kv(2, SSD, True)
    found = units(tree, SSD)
    assert found[2, 30].kind is Kind.BUNDLE and found[2, 30].nodes == (2,)
    assert len(found) == 3


def test_the_end_of_a_trajectory_counts_once_for_its_last_checkpoint() -> None:
    tree = tree_of((1, 0, 100), (2, 1, 100), (3, 1, 300))
    tree.set_checkpoint(1, 100, HOST, True)
    # Both trajectories end in its region: 1/2 * (100/200 + 300/400) interior, 1/2 * 2 at the ends.
    assert tree.cost_tokens(1, 100) == pytest.approx(100 * (0.625 + 1.0))
    tree.set_checkpoint(2, 100, SSD, True)
    assert tree.cost_tokens(1, 100) == pytest.approx(100 * (0.625 + 0.5))


def test_a_hit_refreshes_as_the_mode_says() -> None:
    tree = tree_of((1, 0, 50), (2, 1, 30))
    for node, offset in ((1, 20), (1, 50), (2, 30)):
        tree.set_checkpoint(node, offset, HOST, True)
    tree.touch(1, 50, now=7)
    at = {mode: {key: unit.last_access for key, unit in units(tree, mode=mode).items()} for mode in Eviction}
    assert at[Eviction.LRU] == {(1, 20): 0, (1, 50): 7, (2, 30): 0}
    assert at[Eviction.LRU_REFRESH] == at[Eviction.SCORE] == {(1, 20): 7, (1, 50): 7, (2, 30): 0}


def test_a_partial_use_is_still_known_after_splits() -> None:
    tree = tree_of((1, 0, 100))
    for offset in (10, 30, 50, 90):
        tree.set_checkpoint(1, offset, HOST, True)
    for offset, now in ((90, 3), (50, 4), (20, 5)):
        tree.touch(1, offset, now)
    tree.split(1, 2, 60)
    tree.split(2, 3, 40)
    at = {key: unit.last_access for key, unit in units(tree).items() if key}
    assert at == {(3, 10): 5, (3, 30): 4, (2, 10): 4, (1, 30): 3}


def test_what_is_refused_stays_in_the_queue() -> None:
    tree = tree_of((1, 0, 10), (2, 0, 10), (3, 0, 10))
    queue = EvictionQueue(tree, Pool(HOST, STATE, KV), KV)
    for _ in range(2):
        first = queue.victim(lambda unit: True)
        other = queue.victim(lambda unit: unit.nodes != (1,))
        assert first is not None and first.nodes == (1,)  # equal scores: the oldest entry
        assert other is not None and other.nodes == (2,)
    assert queue.victim(lambda unit: False) is None
    assert len(queue) == 3


def test_stale_entries_do_not_pile_up() -> None:
    tree = tree_of(*((node, 0, 10) for node in range(1, 101)))
    queue = EvictionQueue(tree, Pool(HOST, STATE, KV), KV)
    for now in range(1, 2000):
        node = now % 100 + 1
        tree.set_kv(node, HOST, False)
        len(queue)
        tree.set_kv(node, HOST, True)
        tree.touch(node, 10, now)
        assert queue.victim(lambda unit: True) is not None
        assert len(queue._heap) <= 2 * len(queue) + 65


def test_the_share_of_end_hits_moves_prices_in_steps() -> None:
    tree = tree_of((1, 0, 100))
    tree.set_checkpoint(1, 100, HOST, True)
    costs = []
    for _ in range(1200):
        tree.observe_hit(1, 100)
        costs.append(tree.cost_tokens(1, 100))
    assert tree.end_share.value > 0.9
    changes = [n for n in range(1, 1200) if costs[n] != costs[n - 1]]
    assert costs == sorted(costs) and all(b - a >= 16 for a, b in pairwise(changes))
    tree.observe_hit(0, 0)
    assert tree.cost_tokens(1, 100) == costs[-1]


def test_setters_can_be_repeated() -> None:
    tree = tree_of((1, 0, 100), (2, 1, 10))
    for _ in range(2):
        tree.set_kv(1, HOST, True)
        tree.set_checkpoint(1, 40, SSD, True)
        tree.set_checkpoint(1, 40, HOST, True)
    assert tree.checkpoints(1) == ((40, (HOST, SSD)),)
    before = tree.cost_tokens(1, 40)
    for _ in range(2):
        tree.set_checkpoint(1, 40, HOST, False)
    assert tree.checkpoints(1) == ((40, (SSD,)),) and tree.cost_tokens(1, 40) == before
    for _ in range(2):
        tree.set_checkpoint(1, 40, SSD, False)
        tree.set_kv(1, HOST, False)
    assert tree.checkpoints(1) == () and not tree.has_kv(1, HOST)
    with pytest.raises(KeyError):
        tree.cost_tokens(1, 40)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tree: tree.add(1, 0, 5), "node 1 exists already"),
        (lambda tree: tree.add(3, 0, 0), "cannot have 0 tokens"),
        (lambda tree: tree.split(1, 2, 5), "node 2 exists already"),
        (lambda tree: tree.split(1, 3, 10), "cannot be split after 10"),
        (lambda tree: tree.remove(1), "has children"),
        (lambda tree: tree.remove(0), "is the root"),
        (lambda tree: tree.set_kv(0, HOST, True), "is the root"),
        (lambda tree: tree.set_checkpoint(1, 0, HOST, True), "no checkpoint at offset 0"),
        (lambda tree: tree.set_checkpoint(1, 11, HOST, True), "no checkpoint at offset 11"),
        (lambda tree: tree.touch(1, 11, 9), "has no offset 11"),
        (lambda tree: tree.touch(1, 10, 4), "time 4 lies before 5"),
    ],
)
def test_what_cannot_be_is_refused(change, complaint: str) -> None:
    tree = tree_of((1, 0, 10), (2, 1, 10))
    tree.touch(2, 10, 5)
    with pytest.raises(ValueError, match=complaint):
        change(tree)
    assert tree.children(0) == (1,) and tree.children(1) == (2,) and tree.parent(2) == 1


@pytest.mark.parametrize(
    ("kv", "tau"), [(0, 1.0), (-1, 1.0), (KV, -1.0), (KV, float("inf")), (KV, float("nan"))]
)
def test_a_queue_needs_a_measure(kv: int, tau: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        EvictionQueue(PrefixTree(), Pool(HOST, STATE, KV), kv, tau)


@pytest.mark.parametrize(("state", "kv"), [(0, 0), (-1, 5), (5, -1)])
def test_a_pool_holds_something(state: int, kv: int) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        Pool(HOST, state, kv)
