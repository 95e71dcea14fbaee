"""Where the parts of a prompt begin, as places for checkpoints, and how often requests part there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.hit_prior import HitPrior
from sglang_histate.policy.place_prior import (
    MEMORY,
    MOST_PLACES,
    PRIOR,
    PlaceKind,
    PlacePrior,
    segment_places,
)
from sglang_histate.policy.segment_plan import plan_segment
from sglang_histate.policy.structure import Part, Span

GRID = 64


def spans(*parts: tuple[Part, int]) -> list[Span]:
    found, at = [], 0
    for part, tokens in parts:
        found.append(Span(part, 0, at, at + tokens))
        at += tokens
    return found


TALK = spans(
    (Part.SYSTEM, 500), (Part.TOOLS, 500), (Part.USER, 200), (Part.ASSISTANT, 100), (Part.THINKING, 100), (Part.TOOL_RESULT, 300),
    (Part.USER, 200), (Part.ASSISTANT, 200), (Part.USER, 200), (Part.ASSISTANT, 100),
)  # fmt: skip


def test_each_part_begins_a_place_and_the_head_ends_in_one() -> None:
    assert segment_places(TALK, 0, 2400, GRID) == [
        (15, PlaceKind.AFTER_TOOLS),
        (18, PlaceKind.ANSWER),
        (20, PlaceKind.THINKING),
        (21, PlaceKind.TOOL_RESULT),
        (26, PlaceKind.USER_BEFORE),
        (29, PlaceKind.ANSWER),
        (32, PlaceKind.LAST_USER),
        (35, PlaceKind.ANSWER),
    ]


def test_only_places_inside_the_segment_count() -> None:
    assert segment_places(TALK, 26 * GRID, 35 * GRID, GRID) == [
        (29, PlaceKind.ANSWER),
        (32, PlaceKind.LAST_USER),
    ]


def test_a_prompt_without_markers_has_no_places() -> None:
    assert segment_places([], 0, 1000, GRID) == []
    assert segment_places(spans((Part.HEAD, 1000)), 0, 1000, GRID) == []


def test_a_later_system_message_is_no_end_of_tools() -> None:
    found = segment_places(
        spans((Part.USER, 500), (Part.SYSTEM, 500), (Part.USER, 500), (Part.USER, 500)), 0, 2000, GRID
    )
    assert found == [(15, PlaceKind.USER_BEFORE), (23, PlaceKind.LAST_USER)]


def test_a_long_conversation_gives_its_last_places_and_the_end_of_the_tools() -> None:
    found = segment_places(spans((Part.TOOLS, 640), *[(Part.TOOL_RESULT, 64)] * 500), 0, 640 + 64 * 500, GRID)
    assert len(found) == MOST_PLACES + 1 and found[0] == (10, PlaceKind.AFTER_TOOLS)
    assert found[-1] == (509, PlaceKind.TOOL_RESULT)


def test_rates_are_learned_and_forgotten() -> None:
    prior = PlacePrior()
    kind = PlaceKind.TOOL_RESULT
    assert prior.expected(kind) == pytest.approx(PRIOR[kind])
    for _ in range(20):
        prior.seen(kind)
        prior.parted(kind)
    assert prior.expected(kind) > 0.5 and prior.expected(PlaceKind.THINKING) == PRIOR[PlaceKind.THINKING]
    for _ in range(int(4 * MEMORY)):
        prior.seen(kind)
    assert prior.expected(kind) < 0.002


def test_a_place_is_planned_where_its_hits_pay() -> None:
    prior = HitPrior()
    before = plan_segment(prior, 0, 1000, price=2.0)
    assert 333 not in before
    assert 333 in plan_segment(prior, 0, 1000, price=2.0, places=[(333, 0.1), (333, 0.1)])
    assert 333 not in plan_segment(prior, 0, 1000, price=1e9, places=[(333, 0.2)])
    assert plan_segment(prior, 0, 1000, price=2.0, places=[(0, 9.0), (1000, 9.0), (2000, 9.0)]) == before


@given(st.lists(st.tuples(st.sampled_from(list(Part)), st.integers(1, 300)), max_size=120), st.data())
def test_places_are_bounded_inside_and_ascending(parts: list[tuple[Part, int]], data: st.DataObject) -> None:
    found = spans(*parts)
    total = found[-1].end if found else 0
    start = data.draw(st.integers(0, total // GRID)) * GRID
    places = segment_places(found, start, total, GRID)
    assert len(places) <= MOST_PLACES + 1
    assert all(start < page * GRID < total // GRID * GRID for page, _ in places)
    pages = [page for page, kind in places if kind is not PlaceKind.AFTER_TOOLS]
    assert pages == sorted(pages)
