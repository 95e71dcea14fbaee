"""Where requests part: learned below the end and at a depth, uniform before, and what is planned from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.hit_prior import (
    PRIOR_BELOW,
    PRIOR_INSIDE,
    TAIL_PAGES,
    HitPrior,
    bin_edges,
    bin_of,
)
from sglang_histate.policy.segment_plan import plan_segment


def test_before_evidence_hits_are_uniform_but_for_the_page_below_the_end() -> None:
    prior = HitPrior()
    assert prior.below_end(1) == pytest.approx(PRIOR_BELOW)
    assert [prior.below_end(pages) for pages in range(2, TAIL_PAGES + 1)] == [0.0] * (TAIL_PAGES - 1)
    assert prior.inside() == pytest.approx(PRIOR_INSIDE)
    assert prior.at_depth(3, 0.001) == prior.at_depth(300, 0.001) == pytest.approx(0.001)


def test_a_depth_where_sessions_part_is_learned_and_others_are_not() -> None:
    prior = HitPrior()
    for number in range(400):
        prior.segment(0, 1000)
        if number % 10 == 0:
            prior.parted(244, 1000)
    uniform = prior.inside() / 1000
    assert prior.at_depth(244, uniform) > 10 * uniform
    assert prior.at_depth(500, uniform) < uniform
    (first, *_) = plan_segment(prior, 0, 1000, price=2.0)
    assert bin_of(first) == bin_of(244) and first <= 244


def test_a_page_below_the_end_is_planned_before_anything_is_learned() -> None:
    assert 999 in plan_segment(HitPrior(), 0, 1000, price=2.0)


def test_nothing_is_planned_where_nothing_pays() -> None:
    assert plan_segment(HitPrior(), 0, 1000, price=1e9) == ()
    assert plan_segment(HitPrior(), 10, 11, price=0.0) == ()


def test_habits_are_forgotten() -> None:
    prior = HitPrior()
    for _ in range(1000):
        prior.segment(0, 100)
        prior.parted(97, 100)
    before = prior.below_end(3)
    for _ in range(20_000):
        prior.segment(0, 100)
    assert before > 0.5 and prior.below_end(3) < 0.02


def test_it_stays_finite_over_a_long_life() -> None:
    prior = HitPrior()
    for _ in range(200_000):
        prior.segment(0, 2)
    prior.parted(1, 2)
    assert 0 < prior.below_end(1) < 1


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    found = []
    for _ in range(draw(st.integers(0, 30))):
        start = draw(st.integers(0, 3000))
        end = draw(st.integers(start, start + 3000))
        found.append((start, end, draw(st.integers(start, end))))
    return found


@given(lives(), st.integers(0, 4000), st.integers(0, 4000), st.floats(0, 10))
def test_plans_lie_inside_the_segment_and_are_the_same_for_the_same_life(
    life: list[tuple[int, int, int]], start: int, length: int, price: float
) -> None:
    prior, again = HitPrior(), HitPrior()
    for one in (prior, again):
        for first, end, at in life:
            one.segment(first, end)
            one.parted(at, end)
    end = start + length
    plan = plan_segment(prior, start, end, price, (start + length // 2,))
    assert plan == plan_segment(again, start, end, price, (start + length // 2,))
    assert list(plan) == sorted(set(plan))
    assert all(start < page < end for page in plan)
    assert start + length // 2 not in plan


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_bin_edges_lie_between(start: int, length: int) -> None:
    edges = bin_edges(start, start + length)
    assert edges == sorted(set(edges))
    assert all(
        start < edge < start + length and bin_of(edge) > bin_of(edge - 1) for edge in edges if edge > 1
    )
