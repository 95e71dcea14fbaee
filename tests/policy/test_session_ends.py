"""Sessions by name: where they ended last, as many as may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.session_ends import End, SessionEnds


def test_where_a_session_ended_last() -> None:
    ends = SessionEnds()
    ends.ended("a", 1, own=True)
    ends.ended("a", 2, own=False)
    assert ends.find("a") == End(2, False) and "a" in ends and not ends.any_at(1)
    assert ends.forget("a") == End(2, False) and ends.forget("a") is None and ends.find("a") is None


def test_what_was_its_own_stays_its_own_when_it_is_sent_again() -> None:
    ends = SessionEnds()
    ends.ended("a", 1, own=True)
    ends.ended("a", 1, own=False)
    assert ends.find("a") == End(1, True)


def test_others_that_ended_there_are_known() -> None:
    ends = SessionEnds()
    ends.ended("a", 1, own=True)
    ends.ended("b", 1, own=False)
    ends.forget("a")
    assert ends.any_at(1)
    ends.clear()
    assert not ends.any_at(1) and len(ends) == 0


events = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans(), st.booleans()), max_size=60)


@given(events, st.integers(1, 4))
def test_no_more_than_the_most_are_remembered_the_latest(what, most) -> None:
    ends, expected = SessionEnds(most), {}
    for name, place, own, over in what:
        before = expected.pop(name, None)
        if over:
            assert ends.forget(name) == before
        else:
            ends.ended(name, place, own=own)
            expected[name] = End(place, own or (before is not None and before.place == place and before.own))
            if len(expected) > most:
                del expected[next(iter(expected))]
        assert len(ends) == len(expected) and all(ends.find(name) == end for name, end in expected.items())
        assert {at for at in range(4) if ends.any_at(at)} == {end.place for end in expected.values()}
