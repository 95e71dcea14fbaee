"""docs/figures/ranking.svg: two sessions, and which of their checkpoints goes first under three orders of eviction.

The two are figure 7 of the paper (arXiv:2610.41508); the victims are what the policy's own queue answers.
"""

from __future__ import annotations

from eval.handbook.svg import BLUE, GREEN, GREY, ORANGE, RED, Picture
from eval.simulate.costs import Costs
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree
from sglang_histate.policy.queue import EvictionQueue
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.units import Pool

# Node, its parent, its tokens, and when it was last used; each ends with a checkpoint.
_NODES = {
    "S1": (1, 0, 16_000, 1),
    "S2": (2, 1, 200, 2),
    "S6": (4, 0, 6_000, 3),
    "S3": (3, 2, 4_000, 4),
}
_ORDERS = (
    (Eviction.LRU, "longest unused", RED),
    (Eviction.LRU_REFRESH, "a hit counts for all before it", ORANGE),
    (Eviction.SCORE, "what losing it costs", BLUE),
)


def tree() -> PrefixTree:
    """Return the two sessions."""
    made = PrefixTree()
    for node, parent, tokens, now in _NODES.values():
        made.add(node, parent, tokens)
        made.set_kv(node, Tier.HOST, True)
        made.set_checkpoint(node, tokens, Tier.HOST, True)
        made.touch(node, tokens, now)
    return made


def victim(order: Eviction) -> str:
    """Return the name of the checkpoint that goes first."""
    costs = Costs()
    pool = Pool(Tier.HOST, costs.state_bytes, costs.kv_token_bytes)
    unit = EvictionQueue(tree(), pool, costs.kv_token_bytes, mode=order).victim(lambda unit: True)
    assert unit is not None
    return next(name for name, (node, _, tokens, _) in _NODES.items() if unit.checkpoint == (node, tokens))


def picture() -> str:
    """Return the figure."""
    made = Picture(760, 260, "Which checkpoint goes first under three orders of eviction")
    made.words(20, 24, "Which checkpoint goes first", bold=True, size=13)
    costs, scale = tree(), 560 / 20_200
    at: dict[str, tuple[float, float]] = {}
    for label, names, y in (
        ("session B, in use", ("S1", "S2", "S3"), 80.0),
        ("session C, idle", ("S6",), 150.0),
    ):
        made.words(20, y - 22, label, colour=GREY)
        x = 20.0
        for name in names:
            node, _, tokens, _ = _NODES[name]
            made.line([(x, y), (x + tokens * scale, y)], GREEN, 6)
            x += tokens * scale
            at[name] = (x, y)
            worth = costs.cost_tokens(node, tokens)
            shift, anchor = (-4, "end") if name == "S1" else (4, "start")
            made.words(x + shift, y + 24, f"{name}: {worth:,.0f} tokens", size=11, anchor=anchor)
    for x, y in at.values():
        made.circle(x, y, 6, "#ffffff", "#222222")
    for row, (order, label, colour) in enumerate(_ORDERS):
        name = victim(order)
        x, y = at[name]
        made.circle(x, y, 10, "none", colour)
        made.words(20, 200 + 20 * row, f"{order.value} ({label}) drops {name}", colour=colour)
    made.words(420, 200, "Tokens: expected recomputation without it.", size=11, colour=GREY)
    made.words(420, 218, "S2 costs least: S1 is close before it.", size=11, colour=GREY)
    return made.text()
