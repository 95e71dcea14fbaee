"""Admission by value while bytes are short: the best go first, nothing is wasted, nothing depends on the scale."""

from __future__ import annotations

import random

import pytest

from sglang_histate.policy.value_floor import WARM_UP, WINDOW, ValueFloor
from sglang_histate.policy.write_budget import WriteBudget

MIB = 1 << 20


def filled(values) -> ValueFloor:
    floor = ValueFloor()
    for name, value in enumerate(values):
        floor.admits(name, value, 10, 0.0)
    return floor


def test_free_bytes_admit_everything() -> None:
    floor = filled(range(100))
    assert floor.admits("worthless", 0.0, 10, 0.0)


@pytest.mark.parametrize(("scarcity", "share"), [(0.5, 0.25), (0.9, 0.01), (0.1, 0.81)])
def test_scarcity_admits_the_best_share(scarcity, share) -> None:
    floor = filled(range(200))
    admitted = [value for value in range(200) if floor.admits(value, float(value), 10, scarcity)]
    assert len(admitted) == pytest.approx(200 * share, abs=1.5)
    assert admitted == list(range(200 - len(admitted), 200))


def test_the_best_ever_seen_is_admitted_while_there_is_a_byte() -> None:
    floor = filled(range(100))
    assert floor.admits("best", 100.0, 10, 1.0)
    assert not floor.admits("second", 99.5, 10, 1.0)


def test_shares_are_of_bytes() -> None:
    floor = ValueFloor()
    for name in range(20):
        floor.admits(name, 1.0, 1, 0.0)
    floor.admits("large", 3.0, 60, 0.0)
    assert not floor.admits("better than most records", 2.0, 1, 0.5)


def test_equal_values_are_admitted_alike_until_half_is_scarce() -> None:
    floor = filled([5.0] * 50)
    assert floor.admits(1, 5.0, 10, 0.29) and not floor.admits(1, 5.0, 10, 0.3)


def test_nothing_is_known_at_first() -> None:
    floor = filled(range(1, WARM_UP))
    assert floor.admits("worthless", 0.0, 10, 1.0)
    assert not floor.admits("worthless too", 0.0, 10, 1.0)


def test_an_offer_made_again_counts_once() -> None:
    floor = filled(range(20))
    for _ in range(1000):
        floor.admits("again", 30.0, 10, 0.9)
    assert floor.admits(19, 19.0, 10, 0.7), "it would be far from the best among a thousand better ones"


def test_only_the_last_offers_count() -> None:
    floor = filled([1000.0 + value for value in range(50)])
    for name in range(WINDOW):
        floor.admits(("new", name), float(name), 10, 0.0)
    assert floor.admits("good today", 250.0, 10, 0.8)


@pytest.mark.parametrize("scale", [1.0, 1e-9])
@pytest.mark.parametrize("overload", [1.5, 4.0, 10.0])
def test_a_limited_rate_goes_to_what_is_worth_most(overload, scale) -> None:
    """Against first come, first served, and against the best that could be chosen with hindsight."""
    draw = random.Random(7)
    rate, record = 200 * MIB, 50 * MIB
    count = 4000
    pause_s = record / (rate * overload)
    values = [draw.lognormvariate(0, 1.5) * scale for _ in range(count)]

    def run(by_value: bool) -> tuple[float, int]:
        budget, floor = WriteBudget(rate, None, record), ValueFloor()
        kept, written = 0.0, 0
        for name, value in enumerate(values):
            budget.advance(name * pause_s)
            short = budget.shortage(record) is not None
            worth_it = not by_value or floor.admits(name, value, record, budget.scarcity)
            if worth_it and not short:
                budget.take(record)
                kept, written = kept + value, written + 1
        return kept, written

    kept, written = run(by_value=True)
    plain, plain_written = run(by_value=False)
    best = sum(sorted(values)[-plain_written:])
    assert written >= 0.97 * plain_written, "bytes are left over although there is a queue for them"
    assert kept >= 0.9 * best and kept > plain * 1.2
