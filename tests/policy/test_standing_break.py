"""A place is named once, however often it breaks, and only when it is one place of one tenant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.standing_break import EXAMPLES, PLACES, TIMES, WIDTH, StandingBreaks

A, B = b"a", b"b"


def test_the_third_break_at_a_place_names_it_and_no_later_one() -> None:
    breaks = StandingBreaks()
    told = [breaks.observe(A, 30 + n % 2, "system", 1000, f"r{n}") for n in range(9)]
    assert [n for n, one in enumerate(told) if one is not None] == [TIMES - 1]
    (found,) = breaks.standing()
    assert (found.position, found.place, found.times, found.lost_tokens) == (30, "system", 9, 9000)
    assert found.examples == ["r0", "r1", "r2"][:EXAMPLES]


def test_tenants_and_places_are_counted_apart() -> None:
    breaks = StandingBreaks()
    for n in range(TIMES - 1):
        assert breaks.observe(A, 30, "system", 1, f"a{n}") is None
        assert breaks.observe(B, 30, "system", 1, f"b{n}") is None
        assert breaks.observe(A, 30 + 2 * WIDTH + 2, "system", 1, f"c{n}") is None
    assert breaks.standing() == []
    told = breaks.observe(B, 30, "system", 1, "last")
    assert told is not None and told.namespace == B


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 5000)), max_size=300))
def test_each_place_is_named_at_most_once_while_it_is_remembered(events) -> None:
    breaks = StandingBreaks()
    told: list[int] = []
    for namespace, position in events:
        one = breaks.observe(namespace, position, None, 5, "r")
        if one is not None:
            assert one.times == TIMES and one.namespace == namespace
            assert id(one) not in told
            told.append(id(one))
    assert len(breaks._seen) <= PLACES
    assert all(one.times >= TIMES and one.lost_tokens == 5 * one.times for one in breaks.standing())


def test_what_is_forgotten_starts_again() -> None:
    breaks = StandingBreaks()
    for n in range(TIMES):
        breaks.observe(A, 10, None, 1, f"a{n}")
        breaks.observe(B, 10, None, 1, f"b{n}")
    breaks.forget(A)
    assert [one.namespace for one in breaks.standing()] == [B]
    breaks.forget(None)
    assert breaks.standing() == []
