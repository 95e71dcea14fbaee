"""When a root is left alone and when it is tried again: by puts, by agreed time, never by a clock."""

from __future__ import annotations

import pytest

from sglang_histate.store.breaker import Breaker, BreakerState

OPEN, CLOSED, TRYING = BreakerState.OPEN, BreakerState.CLOSED, BreakerState.TRYING


def opened(failures: int = 3, pause_puts: int = 4, pause_s: float = 30.0) -> Breaker:
    breaker = Breaker(failures, pause_puts, pause_s)
    changes = [breaker.record(False, f"reason {n}") for n in range(failures)]
    assert changes == [None] * (failures - 1) + [OPEN]
    return breaker


def test_failures_in_a_row_open_it():
    breaker = Breaker(3, 4, 30.0)
    for ok in (False, False, True, False, False):
        assert breaker.record(ok, "eio") is None and breaker.admits
    assert breaker.record(False, "enospc") is OPEN and not breaker.admits
    stats = breaker.stats()
    assert (stats.state, stats.times_opened, stats.reason, stats.failed_in_a_row) == (OPEN, 1, "enospc", 3)


def test_puts_end_the_pause():
    breaker = opened(pause_puts=4)
    for _ in range(3):
        breaker.put()
        assert not breaker.admits
    breaker.put()
    assert breaker.admits and breaker.wants_try and breaker.state is TRYING


def test_time_ends_the_pause():
    breaker = opened(pause_s=30.0)
    for now_s in (1000.0, 1010.0, 1029.9):
        breaker.tick(now_s)
        assert not breaker.admits
    breaker.tick(1030.0)
    assert breaker.wants_try


def test_time_that_goes_back_begins_the_pause_again():
    breaker = opened(pause_s=30.0)
    for now_s in (1000.0, 500.0, 529.0):
        breaker.tick(now_s)
    assert not breaker.admits
    breaker.tick(530.0)
    assert breaker.admits


def test_one_try_at_a_time():
    breaker = opened(pause_puts=1)
    breaker.put()
    assert breaker.begin() is True and not breaker.admits and not breaker.wants_try
    assert breaker.record(True, was_try=True) is CLOSED
    assert breaker.admits and breaker.begin() is False


def test_a_try_that_fails_pauses_again_and_is_not_news():
    breaker = opened(pause_puts=2)
    for _ in range(5):
        breaker.put()
        breaker.put()
        breaker.begin()
        assert breaker.record(False, "eio", was_try=True) is None
        assert breaker.state is OPEN
    assert breaker.stats().times_opened == 1
    breaker.put()
    assert not breaker.admits
    breaker.put()
    breaker.begin()
    assert breaker.record(True, was_try=True) is CLOSED
    assert [breaker.record(False, "estale") for _ in range(3)] == [None, None, OPEN]
    assert breaker.stats().times_opened == 2 and breaker.stats().reason == "estale"


def test_a_try_without_a_verdict_is_made_again():
    breaker = opened(pause_puts=1)
    breaker.put()
    breaker.begin()
    breaker.forget_try()
    assert breaker.wants_try


@pytest.mark.parametrize("state", [OPEN, TRYING])
def test_what_was_submitted_before_it_opened(state: BreakerState):
    breaker = opened(pause_puts=1)
    if state is TRYING:
        breaker.put()
    assert breaker.record(False, "eio") is None and breaker.state is state
    assert breaker.record(True) is CLOSED, "it works, whoever asked"


def test_the_try_that_ends_after_an_older_success():
    breaker = opened(pause_puts=1)
    breaker.put()
    breaker.begin()
    assert breaker.record(True) is CLOSED
    assert breaker.record(False, was_try=True) is None and breaker.is_closed
    assert breaker.stats().failed_in_a_row == 1
