"""The marks of the host tier's reserve."""

from __future__ import annotations

import random

import pytest

from sglang_histate.policy.reserve import HALF_LIFE, Reserve


def test_small_steps_leave_the_shares() -> None:
    reserve = Reserve(800)
    assert (reserve.low, reserve.high) == (100, 200)
    for clock in range(50):
        reserve.step(20, clock)
    assert (reserve.low, reserve.high) == (100, 200)


def test_the_reserve_outlasts_the_largest_recent_step() -> None:
    reserve = Reserve(800)
    reserve.step(200, 1)
    assert (reserve.low, reserve.high) == (300, 500)
    reserve.step(10, 2)
    assert (reserve.low, reserve.high) == (300, 500)


def test_a_burst_is_forgotten() -> None:
    reserve = Reserve(800)
    reserve.step(200, 10)
    reserve.step(1, 10 + HALF_LIFE - 1)
    assert reserve.low == 300
    reserve.step(1, 10 + HALF_LIFE)
    assert reserve.low == 150
    reserve.step(1, 10 + 10 * HALF_LIFE)
    assert (reserve.low, reserve.high) == (100, 200)


def test_part_of_the_tier_is_never_asked_for() -> None:
    reserve = Reserve(800)
    reserve.step(800, 1)
    assert (reserve.low, reserve.high) == (600, 600)


def test_marks_are_in_order_whatever_comes() -> None:
    draw = random.Random(7)
    for _ in range(200):
        total = draw.randint(1, 5000)
        reserve, clock = Reserve(total), 0
        for _ in range(50):
            clock += draw.choice((0, 1, 5, 100))
            taken = draw.randint(0, total)
            reserve.step(taken, clock)
            assert 0 <= reserve.low <= reserve.high <= total
            assert reserve.high >= min(int(total * 0.75), taken)


def test_the_device_lets_go_of_what_is_missing_to_the_low_mark() -> None:
    reserve = Reserve(800)
    reserve.step(200, 1)
    assert reserve.low == 300
    assert reserve.duplicates(free=0, host_only=0, device=700) == 300
    assert reserve.duplicates(free=100, host_only=50, device=800) == 150
    assert reserve.duplicates(free=100, host_only=200, device=700) == 0
    assert reserve.duplicates(free=500, host_only=0, device=700) == 0
    assert reserve.duplicates(free=0, host_only=0, device=801) == 0, "all of this host is copies, always"


def test_no_tier_no_reserve() -> None:
    with pytest.raises(ValueError, match="0 pages"):
        Reserve(0)
