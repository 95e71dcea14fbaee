"""What a byte costs: nothing while there is room, then what the victims were still worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.prefix_nodes import Tier
from sglang_histate.policy.scarcity import (
    LEAST_WRITE_TOKENS,
    READ_TOKENS_PER_BYTE,
    WRITE_TOKENS_PER_BYTE,
    Scarcity,
)
from sglang_histate.policy.storage_price import FREE_BELOW, StoragePrice

victims = st.lists(
    st.tuples(st.floats(0, 1e6), st.integers(1, 1 << 30), st.floats(0, 1)), min_size=1, max_size=50
)


def test_a_tier_with_room_is_free_whatever_it_evicted() -> None:
    price = StoragePrice()
    price.evicted(1000.0, 100, 1.0)
    assert price.per_byte(0.0) == price.per_byte(FREE_BELOW) == 0.0
    assert price.per_byte(1.0) == 10.0
    assert price.per_byte((1 + FREE_BELOW) / 2) == pytest.approx(5.0)


def test_a_full_tier_that_evicted_nothing_is_free() -> None:
    assert StoragePrice().per_byte(1.0) == 0.0


@given(victims)
def test_the_price_lies_among_those_of_the_victims(
    given_up: list[tuple[float, int, float]],
) -> None:
    price, again = StoragePrice(), StoragePrice()
    for one in given_up:
        price.evicted(*one)
        again.evicted(*one)
    worths = [cost * returns / freed for cost, freed, returns in given_up]
    assert min(worths) * (1 - 1e-9) <= price.per_byte(1.0) <= max(worths) * (1 + 1e-9)
    assert price.per_byte(1.0) == again.per_byte(1.0)


def test_it_follows_a_new_load() -> None:
    price = StoragePrice()
    for _ in range(1000):
        price.evicted(100.0, 100, 1.0)
    for _ in range(300):
        price.evicted(0.0, 100, 1.0)
    assert price.per_byte(1.0) < 0.05


def test_a_victim_frees_something() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        StoragePrice().evicted(1.0, 0, 1.0)


def test_victims_that_nobody_would_have_used_again_cost_little() -> None:
    busy, over = Scarcity(), Scarcity()
    for scarcity, age in ((busy, 4), (over, 100_000)):
        for _ in range(2000):
            scarcity.requested(4)
        for _ in range(100):
            scarcity.evicted(Tier.SSD, 1000.0, 1 << 20, age)
    size = 50 << 20
    assert over.checkpoint(Tier.SSD, size, 1.0) < busy.checkpoint(Tier.SSD, size, 1.0) / 10


def test_what_the_ssd_may_give_back_costs_at_least_its_read() -> None:
    scarcity, size = Scarcity(), 50 << 20
    scarcity.evicted(Tier.HOST, 0.0, size, 0, read_back=True)
    returns = scarcity.returns.probability(0)
    assert scarcity.checkpoint(Tier.HOST, size, 1.0) == pytest.approx(returns * size * READ_TOKENS_PER_BYTE)


def test_a_write_has_a_price_that_grows_with_its_bytes_and_scarcity() -> None:
    scarcity, size = Scarcity(), 50 << 20
    assert scarcity.checkpoint(Tier.SSD, size, 0.0) == size * WRITE_TOKENS_PER_BYTE
    assert scarcity.checkpoint(Tier.SSD, 2 * size, 0.0) == 2 * size * WRITE_TOKENS_PER_BYTE
    assert scarcity.checkpoint(Tier.SSD, size, 0.0, 0.5) == 2 * size * WRITE_TOKENS_PER_BYTE
    assert scarcity.checkpoint(Tier.SSD, size, 0.0, 1.0) == float("inf")
    assert scarcity.checkpoint(Tier.HOST, size, 0.0) == 0.0


def test_a_small_checkpoint_is_not_free() -> None:
    scarcity = Scarcity()
    assert (
        scarcity.checkpoint(Tier.SSD, 100, 0.0) == scarcity.checkpoint(Tier.SSD, 1, 0.0) == LEAST_WRITE_TOKENS
    )
    assert scarcity.checkpoint(Tier.SSD, 100, 0.0, 0.5) == 2 * LEAST_WRITE_TOKENS


def test_kv_goes_to_the_ssd_if_it_is_worth_more_than_what_goes_for_it() -> None:
    scarcity, size = Scarcity(), 1 << 20
    for _ in range(2000):
        scarcity.requested(4)
    assert scarcity.worth_copying(0.0, size, 4, fill=0.5), "there is room"
    for _ in range(100):
        scarcity.evicted(Tier.SSD, 100.0, size, 4)
    for cost, now, ahead in ((50.0, False, False), (150.0, True, False), (500.0, True, True)):
        assert scarcity.worth_copying(cost, size, 4, fill=1.0) is now
        assert scarcity.worth_copying(cost, size, 4, fill=1.0, ahead=True) is ahead
    assert scarcity.worth_copying(50.0, size, 4, fill=0.5, ahead=True), "there is room"
    assert not scarcity.worth_copying(150.0, size, 100_000, fill=1.0), "nobody comes back to it"
