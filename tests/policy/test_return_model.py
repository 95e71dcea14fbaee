"""P(used again | idle for so long): learned, bounded, never rising from nothing, the same for the same requests."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.return_model import BINS, MEMORY, PRIOR_RETURN, ReturnModel, bin_of

AGES = [0, 1, 2, 5, 16, 60, 250, 1000, 5000, 10**9]


def test_before_evidence_it_falls_with_age_from_the_prior() -> None:
    model = ReturnModel()
    found = [model.probability(age) for age in AGES]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(PRIOR_RETURN, abs=0.05)
    assert found[-1] < 0.1


@given(st.lists(st.none() | st.integers(0, 10**12), max_size=60), st.integers(0, 10**12))
def test_it_is_a_probability(ages: list[int | None], age: int) -> None:
    model, again = ReturnModel(), ReturnModel()
    for one in ages:
        model.observe(one)
        again.observe(one)
    assert 0 <= model.probability(age) <= 1
    assert model.probability(age) == again.probability(age)


def test_it_learns_the_share_that_returns_after_an_age() -> None:
    # Of ten spells six end after 10 ticks and two after 600; two never do.
    model = ReturnModel()
    draw = random.Random(0)
    for _ in range(20_000):
        model.observe(draw.choices([10, 600, None], [6, 2, 2])[0])
    assert model.probability(0) == pytest.approx(0.8, abs=0.02)
    assert model.probability(100) == pytest.approx(0.5, abs=0.03)
    assert model.probability(5000) < 0.02


def test_a_change_of_habits_is_learned_within_a_few_memories() -> None:
    model = ReturnModel()
    for _ in range(20_000):
        model.observe(10)
    for _ in range(int(6 * MEMORY)):
        model.observe(None)
    assert model.probability(0) < 0.05


def test_bins_cover_all_ages() -> None:
    assert bin_of(0) == 0
    assert bin_of(10**30) == BINS - 1
    assert [bin_of(age) for age in (1, 2, 3, 4)] == [1, 2, 2, 3]


def test_a_negative_age_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 ticks"):
        ReturnModel().observe(-1)
