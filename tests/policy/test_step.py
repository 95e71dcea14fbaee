"""What a step takes of a prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.step import step_tokens


@given(rest=st.integers(0, 4096), left=st.integers(-512, 2048), tail=st.integers(0, 1024))
def test_all_of_it_what_is_left_or_nothing(rest: int, left: int, tail: int) -> None:
    took, plain = step_tokens(rest, left, tail), min(rest, max(left, 0))
    assert took in (0, left, rest)
    assert plain <= took <= plain + tail
    assert step_tokens(rest, left, 0) == plain


def test_the_tail_is_for_ends_only() -> None:
    assert step_tokens(rest=8500, left=8192, tail=2048) == 8500
    assert step_tokens(rest=10240, left=8192, tail=2048) == 10240
    assert step_tokens(rest=10241, left=8192, tail=2048) == 8192
    assert step_tokens(rest=100, left=0, tail=2048) == 0, "an end has taken of the tail before"
