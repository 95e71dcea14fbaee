"""Greedy placement against the exact optimum, and the optimum against all sets."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.greedy_plan import MOST_CHECKPOINTS, greedy_plan
from tests.policy.best_plan import best_plan, saving


@st.composite
def segments(draw: st.DrawFn, most: int = 9) -> tuple[list[int], list[float], int]:
    start = draw(st.integers(0, 50))
    gaps = draw(st.lists(st.integers(1, 40), min_size=1, max_size=most))
    places = [start + sum(gaps[: index + 1]) for index in range(len(gaps))]
    hits = draw(st.lists(st.floats(0, 1), min_size=len(places), max_size=len(places)))
    return places, hits, start


def worth(segment: tuple[list[int], list[float], int], chosen: tuple[int, ...], price: float) -> float:
    places, hits, start = segment
    return saving(places, hits, start, chosen) - price * len(chosen)


@given(segments(), st.floats(0, 40))
def test_the_exact_plan_is_the_best_of_all_sets(
    segment: tuple[list[int], list[float], int], price: float
) -> None:
    places, hits, start = segment
    best, chosen = best_plan(places, hits, start, price)
    every = [set_ for size in range(len(places) + 1) for set_ in combinations(places, size)]
    assert best == pytest.approx(max(worth(segment, one, price) for one in every))
    assert worth(segment, chosen, price) == pytest.approx(best)


@given(segments(10), st.floats(0, 40))
def test_the_greedy_plan_saves_as_much_of_the_best_as_its_bound_says(
    segment: tuple[list[int], list[float], int], price: float
) -> None:
    places, hits, start = segment
    chosen = greedy_plan(places, hits, start, price)
    size = len(chosen)
    saved = saving(places, hits, start, chosen)
    same_size = max(saving(places, hits, start, one) for one in combinations(places, size))
    assert saved >= (1 - 1 / 2.718281828) * same_size - 1e-9
    # No set pays that greedy found nothing for: what it stops at is worth less than a price each.
    assert worth(segment, chosen, price) >= -1e-9


@given(segments(10), st.floats(0, 40))
def test_no_checkpoint_is_added_that_costs_more_than_it_saves_and_none_is_left_out_that_pays(
    segment: tuple[list[int], list[float], int], price: float
) -> None:
    places, hits, start = segment
    chosen = greedy_plan(places, hits, start, price)
    saved = saving(places, hits, start, chosen)
    for place in set(places) - set(chosen):
        assert saving(places, hits, start, (*chosen, place)) - saved <= price + 1e-6


@given(segments(), st.data())
def test_given_checkpoints_are_counted_and_not_returned(
    segment: tuple[list[int], list[float], int], data: st.DataObject
) -> None:
    places, hits, start = segment
    fixed = tuple(sorted(data.draw(st.sets(st.sampled_from(places)))))
    chosen = greedy_plan(places, hits, start, 0.5, fixed)
    assert not set(chosen) & set(fixed)
    with_all = saving(places, hits, start, (*chosen, *fixed))
    for place in set(places) - set(chosen) - set(fixed):
        assert saving(places, hits, start, (*chosen, *fixed, place)) - with_all <= 0.5 + 1e-6


def test_a_place_where_all_hits_are_comes_first_and_alone() -> None:
    places = list(range(64, 6400, 64))
    hits = [0.0] * len(places)
    hits[40] = 0.02
    assert greedy_plan(places, hits, 0, price=4.0) == (places[40],)
    assert greedy_plan(places, hits, 0, price=1000.0) == ()


def test_the_number_of_checkpoints_is_bounded() -> None:
    places = list(range(1, 1000))
    assert len(greedy_plan(places, [1.0] * len(places), 0, 0.0)) == MOST_CHECKPOINTS
