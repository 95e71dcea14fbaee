"""The write budget: never above rate * t + burst in any window nor above the cap in a day; restarts and clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.write_budget import (
    DAY_S,
    DailyCap,
    Shortage,
    TokenBucket,
    WriteBudget,
    burst_bytes,
)

MIB = 1 << 20
NOON = 20_000 * DAY_S + DAY_S / 2
steps = st.lists(
    st.tuples(st.floats(0, 40, allow_nan=False), st.integers(1, 6 * MIB), st.booleans()), max_size=80
)


@given(rate=st.integers(0, 3 * MIB), record=st.integers(1, 4 * MIB), steps=steps)
def test_no_window_gets_more_than_rate_and_burst(rate, record, steps) -> None:
    budget = WriteBudget(rate, None, record)
    burst = burst_bytes(rate, record)
    now_s, written = 0.0, []
    for pause_s, size, returns in steps:
        now_s += pause_s
        budget.advance(now_s)
        if budget.shortage(size) is None:
            grant = budget.take(size)
            if returns:
                budget.give_back(grant)
            else:
                written.append((now_s, size))
    for first, (start_s, _) in enumerate(written):
        total = 0
        for at_s, size in written[first:]:
            total += size
            assert total <= rate * (at_s - start_s) + burst + 1e-3


@given(cap=st.integers(0, 40 * MIB), steps=steps)
def test_no_day_gets_more_than_the_cap(cap, steps) -> None:
    budget = WriteBudget(None, cap, MIB)
    now_s, by_day = NOON, {}
    for pause_s, size, returns in steps:
        now_s += pause_s * 1000
        budget.advance(now_s)
        if budget.shortage(size) is None:
            grant = budget.take(size)
            if returns:
                budget.give_back(grant)
            else:
                day = int(now_s // DAY_S)
                by_day[day] = by_day.get(day, 0) + size
    assert all(total <= cap for total in by_day.values())


@given(
    rate=st.none() | st.integers(0, MIB),
    cap=st.none() | st.integers(0, 20 * MIB),
    steps=steps,
)
def test_the_same_calls_give_the_same_answers_and_time_may_be_left_out_where_it_changes_nothing(
    rate, cap, steps
) -> None:
    one, other = WriteBudget(rate, cap, MIB), WriteBudget(rate, cap, MIB)
    now_s = NOON
    one.advance(now_s)
    other.advance(now_s)
    for pause_s, size, _ in steps:
        now_s += pause_s * 500
        one.advance(now_s)
        if other.waits_for_time:
            other.advance(now_s)
        if size <= MIB:
            assert one.shortage(size) is other.shortage(size) or not other.waits_for_time
        # A caller that has something to write knows the time.
        other.advance(now_s)
        assert one.shortage(size) is other.shortage(size)
        assert one.scarcity == pytest.approx(other.scarcity)
        if one.shortage(size) is None:
            one.take(size)
            other.take(size)


def test_waiting_for_time_ends() -> None:
    budget = WriteBudget(MIB, 20 * MIB, MIB)
    budget.advance(NOON)
    assert not budget.waits_for_time
    budget.take(2 * MIB)
    assert budget.waits_for_time
    budget.advance(NOON + 2)
    assert not budget.waits_for_time, "the bucket is full, and most of the cap is left"
    for second in range(3, 30):
        budget.advance(NOON + second)
        if budget.shortage(MIB) is None:
            budget.take(MIB)
    budget.advance(NOON + 100)
    assert budget.shortage(MIB) is Shortage.DAILY_CAP and budget.waits_for_time
    budget.advance(NOON + DAY_S / 2)
    assert budget.shortage(MIB) is None and not budget.waits_for_time


def test_no_limits() -> None:
    budget = WriteBudget(None, None, MIB)
    budget.advance(1.0)
    assert not budget.waits_for_time and budget.scarcity == 0
    assert budget.shortage(1 << 60) is None
    budget.give_back(budget.take(1 << 60))
    budget.take(1 << 50)
    assert not budget.waits_for_time and budget.scarcity == 0
    assert budget.state() == (0, 1 << 50), "what is written is counted without a limit too"


def test_a_rate_of_nothing_writes_nothing_and_waits_for_nothing() -> None:
    budget = WriteBudget(0, None, MIB)
    budget.advance(1.0)
    budget.advance(1e9)
    assert budget.shortage(1) is Shortage.WRITE_BUDGET and budget.scarcity == 1 and not budget.waits_for_time


@pytest.mark.parametrize(("rate", "record", "burst"), [(0, 9, 0), (100, 9, 500), (1, 9, 36)])
def test_the_burst_is_five_seconds_and_at_least_four_records(rate, record, burst) -> None:
    assert burst_bytes(rate, record) == burst


def test_a_bucket_gets_scarce_below_half() -> None:
    bucket = TokenBucket(rate=10, burst=100)
    assert bucket.scarcity == 0
    bucket.take(50)
    assert bucket.scarcity == 0
    bucket.take(25)
    assert bucket.scarcity == 0.5
    bucket.take(25)
    assert bucket.scarcity == 1


def test_a_bucket_ignores_time_that_does_not_grow() -> None:
    bucket = TokenBucket(rate=10, burst=100)
    bucket.advance(50.0)
    bucket.take(100)
    bucket.advance(40.0)
    bucket.advance(50.0)
    assert bucket.level == 0
    bucket.advance(51.0)
    assert bucket.level == 10
    bucket.advance(1e9)
    assert bucket.level == 100


def test_the_last_quarter_of_the_cap_has_a_price_unless_the_day_ends() -> None:
    cap = DailyCap(1000)
    cap.advance(NOON)
    cap.taken = 750
    assert cap.scarcity == 0
    cap.taken = 875
    assert cap.scarcity == 0.5
    cap.advance(NOON + DAY_S * 7 / 16)  # a sixteenth of the day is left, and an eighth of the bytes
    assert cap.scarcity == 0
    cap.taken = 1000
    assert cap.scarcity == 1


def test_a_cap_survives_a_restart() -> None:
    before = WriteBudget(None, 10 * MIB, MIB)
    before.advance(NOON)
    before.take(8 * MIB)
    after = WriteBudget(None, 10 * MIB, MIB)
    after.restore(*before.state())
    after.advance(NOON + 60)
    assert after.today.left == 2 * MIB
    assert after.shortage(3 * MIB) is Shortage.DAILY_CAP
    after.advance(NOON + DAY_S / 2)
    assert after.today.left == 10 * MIB


def test_a_cap_that_was_lowered_meanwhile_is_used_up() -> None:
    after = WriteBudget(None, MIB, MIB)
    after.restore(int(NOON // DAY_S), 8 * MIB)
    after.advance(NOON)
    assert after.today.left == 0 and after.scarcity == 1


def test_a_clock_set_back_between_two_runs_neither_gives_a_new_cap_nor_stops_writes_for_years() -> None:
    budget = WriteBudget(None, 10 * MIB, MIB)
    budget.restore(40_000, 8 * MIB)  # the clock had been in 2079
    budget.advance(NOON)
    assert budget.today.left == 2 * MIB
    budget.advance(NOON + DAY_S)
    assert budget.today.left == 10 * MIB


def test_what_is_given_back_after_midnight_stays_counted_in_its_own_day() -> None:
    budget = WriteBudget(None, 10, 1)
    budget.advance(NOON)
    grant = budget.take(6)
    budget.advance(NOON + DAY_S)
    budget.take(7)
    budget.give_back(grant)
    assert budget.today.left == 3


@pytest.mark.parametrize(
    "make", [lambda: TokenBucket(-1, 1), lambda: TokenBucket(1, -1), lambda: DailyCap(-1)]
)
def test_negative_sizes_are_refused(make) -> None:
    with pytest.raises(ValueError, match="negative"):
        make()
