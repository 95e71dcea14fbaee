"""How the overhead of metrics is computed; no server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.metrics_overhead import TARGET, overhead, prompts

seconds = st.floats(0.001, 10, allow_nan=False)


@given(st.lists(seconds, min_size=1, max_size=30), st.sampled_from([0.9, 1.0, 1.01, 1.5]))
def test_a_scheduler_that_is_slower_by_a_factor_is_found_whatever_the_prompts_take(without_s, factor) -> None:
    found = overhead([one * factor for one in without_s], without_s)
    assert found.ratio == pytest.approx(factor) and found.low == pytest.approx(found.high)
    assert found.met == (factor < TARGET) and found.pairs == len(without_s)


def test_one_disturbance_does_not_count() -> None:
    found = overhead([1.0] * 9 + [50.0], [1.0] * 10)
    assert found.ratio == 1.0 and found.met


def test_the_interval_contains_the_median() -> None:
    with_s = [1.0 + 0.01 * number for number in range(20)]
    found = overhead(with_s, [1.0] * 20)
    assert found.low < found.ratio < found.high and not found.met
    assert overhead(with_s, [1.0] * 20) == found, "the same times give the same interval"


@pytest.mark.parametrize(("one", "other"), [([], []), ([1.0], []), ([1.0, 2.0], [1.0])])
def test_what_cannot_be_compared(one, other) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        overhead(one, other)


def test_no_two_prompts_share_a_page() -> None:
    found = prompts(50, 128, 1)
    assert len({tuple(one[:8]) for one in found}) == 50 and all(len(one) == 128 for one in found)
    assert found == prompts(50, 128, 1) and found[0] != prompts(1, 128, 2)[0]
