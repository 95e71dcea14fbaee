"""What a planned checkpoint is worth is what the tree says of it once it is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.capture_value import cost_tokens
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.prefix_tree import PrefixTree


@given(
    length=st.integers(2, 100_000),
    cuts=st.sets(st.integers(1, 100_000), min_size=1, max_size=12),
)
def test_it_is_the_cost_of_the_tree(length, cuts) -> None:
    plan = sorted({min(cut, length) for cut in cuts})
    tree = PrefixTree()
    tree.add(1, 0, length)
    for position in plan:
        tree.set_checkpoint(1, position, Tier.SSD, True)
    share = tree.end_share.steps / 16
    for before, position, after in zip([0, *plan], plan, [*plan[1:], None], strict=False):
        found = cost_tokens(position, before, after, length, share)
        assert found == pytest.approx(tree.cost_tokens(1, position), rel=1e-5, abs=1e-6)


def test_the_last_one_serves_the_end_and_a_gap_makes_the_next_one_worth_more() -> None:
    interior = cost_tokens(1024, 0, 2048, 8192, 0.5)
    final = cost_tokens(8192, 7168, None, 8192, 0.5)
    assert interior == 64 and final == 512
    assert cost_tokens(8128, 7168, 8192, 8192, 0.5) == 3.75, "a checkpoint at the very end has the end"
    assert cost_tokens(2048, 0, 3072, 8192, 0.5) == 2 * cost_tokens(2048, 1024, 3072, 8192, 0.5)


@pytest.mark.parametrize("places", [(0, 0, 5, 9), (3, 3, 5, 9), (6, 3, 5, 9), (4, 3, 10, 9), (4, -1, 5, 9)])
def test_positions_out_of_order_are_refused(places) -> None:
    with pytest.raises(ValueError, match="is not between"):
        cost_tokens(*places, 0.5)
