"""Clean KV against a count of the whole tree, after any history."""

from __future__ import annotations

import random

import pytest

from sglang_histate.policy.clean import CleanKv
from sglang_histate.policy.prefix_nodes import TIERS, Tier
from sglang_histate.policy.prefix_tree import PrefixTree


def counted(tree: PrefixTree, nodes: list[int]) -> dict[int, int]:
    """Nodes in the order they came, so that a child comes after its parent: unless a split has made the parent."""
    found: dict[int, int] = {}
    for node in sorted(nodes, key=tree.start, reverse=True):
        held = [tree.has_kv(node, tier) for tier in TIERS]
        below = tree.children(node)
        free = all(
            child in found or not (tree.has_kv(child, Tier.DEVICE) or tree.has_kv(child, Tier.HOST))
            for child in below
        )
        if held == [False, True, True] and free:
            found[node] = tree.tokens(node)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_any_history(seed: int) -> None:
    draw = random.Random(seed)
    tree = PrefixTree()
    clean, nodes, following = CleanKv(tree), [], 1
    for _ in range(300):
        action = draw.random()
        if action < 0.2 or not nodes:
            tree.add(following, draw.choice([tree.root, *nodes]), draw.randrange(1, 9))
            nodes.append(following)
            following += 1
        elif action < 0.8:
            node = draw.choice(nodes)
            tree.set_kv(node, draw.choice(TIERS), draw.random() < 0.7)
            clean.changed(node)
        elif action < 0.9:
            node = draw.choice(nodes)
            if tree.tokens(node) > 1:
                tree.split(node, following, draw.randrange(1, tree.tokens(node)))
                clean.changed(following)
                clean.changed(node)
                nodes.append(following)
                following += 1
        elif leaves := [node for node in nodes if not tree.children(node)]:
            node = draw.choice(leaves)
            clean.removed(node)
            tree.remove(node)
            nodes.remove(node)
        assert clean.by_node() == counted(tree, nodes)
        assert clean.tokens == sum(clean.by_node().values())
        only = [node for node in nodes if tree.has_kv(node, Tier.HOST) and not tree.has_kv(node, Tier.DEVICE)]
        assert clean.host_only_tokens == sum(map(tree.tokens, only))


def test_a_long_path_is_not_too_deep() -> None:
    tree = PrefixTree()
    clean = CleanKv(tree)
    for node in range(1, 1500):
        tree.add(node, node - 1, 2)
        for tier in (Tier.HOST, Tier.SSD):
            tree.set_kv(node, tier, True)
            clean.changed(node)
    assert clean.tokens == 2 * 1499
    tree.set_kv(1499, Tier.SSD, False)
    clean.changed(1499)
    assert clean.tokens == 0
    clean.removed(1499)
    tree.remove(1499)
    assert clean.tokens == 2 * 1498
