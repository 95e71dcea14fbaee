"""Which tier gets a historical checkpoint: the cheaper one, or the host where the SSD takes none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.history_tier import historical_tier
from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.scarcity import MOST_PRICE

tokens = st.floats(0, MOST_PRICE)


@given(tokens, tokens, tokens)
def test_an_interior_one_goes_where_it_costs_less(host: float, ssd: float, worth: float) -> None:
    chosen = historical_tier(host, ssd, worth, is_end=False, refused=False)
    if ssd >= MOST_PRICE:
        assert chosen is Tier.SSD, "it is asked, and says what it refuses"
    else:
        assert chosen is (Tier.HOST if host < ssd else Tier.SSD)


@given(tokens, tokens, tokens)
def test_an_end_is_offered_to_the_ssd_whatever_it_costs(host: float, ssd: float, worth: float) -> None:
    assert historical_tier(host, ssd, worth, is_end=True, refused=False) is Tier.SSD


@given(tokens, tokens, tokens, st.booleans())
def test_what_the_ssd_refuses_has_to_be_worth_the_host(
    host: float, ssd: float, worth: float, is_end: bool
) -> None:
    chosen = historical_tier(host, ssd, worth, is_end=is_end, refused=True)
    assert chosen is (Tier.HOST if worth > host else None)
