"""`Eviction.LOSS` ranks as the expected loss does: C / M' times exp(-idle / tau), whatever time it is."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_histate.policy.recompute import COST_SCALE
from sglang_histate.policy.score import PRECISION, loss_value, value

prices = st.integers(0, 10**7)


def at(used: int, price: int, freed: int, tau: float) -> float:
    return used + loss_value(price * COST_SCALE, freed, 1, tau)


@given(
    prices,
    prices,
    st.integers(1, 10**5),
    st.integers(1, 10**5),
    st.integers(0, 300),
    st.integers(0, 300),
    st.floats(5, 200),
)
def test_the_order_is_that_of_the_expected_loss_at_any_later_time(
    first: int, second: int, freed: int, other: int, used: int, later: int, tau: float
) -> None:
    ratios = first / freed, second / other
    # The 1 in the logarithm stands for what is too cheap to matter.
    assume(min(ratios) > 100 / PRECISION)
    now = 300
    losses = [ratio * exp((t - now) / tau) for ratio, t in zip(ratios, (used, later), strict=True)]
    assume(max(losses) > 1.05 * min(losses))
    ranks = at(used, first, freed, tau), at(later, second, other, tau)
    assert (ranks[0] < ranks[1]) == (losses[0] < losses[1])


def test_what_costs_nothing_to_lose_ranks_by_its_last_access() -> None:
    assert loss_value(0, 100, 1, 20.0) == 0.0


@given(prices, prices, st.integers(1, 10**5))
def test_dearer_is_never_ranked_lower(one: int, other: int, freed: int) -> None:
    low, high = sorted((one, other))
    assert at(0, low, freed, 20.0) <= at(0, high, freed, 20.0)


def test_a_dear_unit_does_not_stay_for_ever() -> None:
    """By the score, an ended session whose loss would cost 60 times its bytes outlives 1,200 requests; here 220."""
    dear = 60 * COST_SCALE
    assert value(dear, 1, 1, 20.0) == 1200
    assert loss_value(dear, 1, 1, 20.0) == pytest.approx(220, abs=1)
