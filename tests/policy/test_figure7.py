"""Figure 7 of the paper (arXiv:2610.41508): three orders of eviction, three different victims.

Session B has a long prefix up to S1, then S2 close behind it, then its final checkpoint S3, and is in use.
Session C has only a final checkpoint, S6, and is idle.
"""

from __future__ import annotations

import pytest

from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Kind, Pool

KV_TOKEN = 32_768
STATE = 51_511_296
B1, B2, B3, C = 1, 2, 3, 4
S1, S2, S3, S6 = (B1, 16_000), (B2, 200), (B3, 4_000), (C, 6_000)


def sessions() -> PrefixTree:
    tree = PrefixTree()
    for now, (node, tokens), parent in ((1, S1, 0), (2, S2, B1), (3, S6, 0), (4, S3, B2)):
        tree.add(node, parent, tokens)
        tree.set_kv(node, Tier.HOST, True)
        tree.set_checkpoint(node, tokens, Tier.HOST, True)
        tree.touch(node, tokens, now)
    return tree


@pytest.mark.parametrize("kv_bytes", [KV_TOKEN, 0], ids=["unified", "states only"])
@pytest.mark.parametrize(
    ("mode", "dropped"),
    [(Eviction.LRU, S1), (Eviction.LRU_REFRESH, S6), (Eviction.SCORE, S2), (Eviction.LOSS, S2)],
)
def test_what_goes_first(kv_bytes: int, mode: Eviction, dropped: tuple[int, int]) -> None:
    queue = EvictionQueue(sessions(), Pool(Tier.HOST, STATE, kv_bytes), KV_TOKEN, mode=mode)
    unit = queue.victim(lambda unit: True)
    assert unit is not None and unit.checkpoint == dropped
    assert unit.kind is (Kind.BUNDLE if dropped == S6 else Kind.INTERMEDIATE)


def test_what_each_checkpoint_of_b_is_worth() -> None:
    # q = 1/2 at the start; B has 20,200 tokens, C 6,000.
    tree = sessions()
    assert tree.cost_tokens(*S1) == pytest.approx(16_000 * 0.5 * 200 / 20_200)
    assert tree.cost_tokens(*S2) == pytest.approx(200 * 0.5 * 4_000 / 20_200)
    assert tree.cost_tokens(*S3) == pytest.approx(4_000 * 0.5)
    assert tree.cost_tokens(*S6) == pytest.approx(6_000 * 0.5)
