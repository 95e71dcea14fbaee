"""The expected wait of a write, from times that all ranks agree on."""

from __future__ import annotations

import pytest

from sglang_histate.policy.write_time import WARM_UP, WriteTime


def busy(seconds_per_step: float, steps: int = 20, size: int = 100) -> WriteTime:
    """A queue that never runs empty: one write is committed in each step."""
    time = WriteTime()
    time.submitted(0.0, queued=False)
    for step in range(1, steps + 1):
        time.committed(step * seconds_per_step, size, queued=True)
    return time


def test_a_busy_disk_is_measured() -> None:
    time = busy(0.5)
    assert time.wait_s(100.0, 400, None) == pytest.approx(2.0)


def test_nothing_is_expected_before_three_measurements() -> None:
    assert busy(0.5, WARM_UP - 1).wait_s(10.0, 400, None) == 0
    assert busy(0.5, WARM_UP).wait_s(10.0, 400, None) == pytest.approx(2.0)


def test_a_disk_that_gets_slow_is_noticed_within_a_few_writes() -> None:
    time = busy(0.1)
    for step in range(1, 6):
        time.committed(2.0 + step, 100, queued=True)
    assert time.wait_s(7.0, 100, None) > 0.8


def test_a_disk_that_is_done_at_once_is_not_blamed_for_long_steps() -> None:
    time = WriteTime()
    for step in range(50):
        time.submitted(float(step), queued=False)
        time.committed(step + 0.9, 100, queued=False)
    assert time.wait_s(100.0, 2000, None) == 0


def test_a_queue_that_runs_empty_corrects_downwards_only() -> None:
    time = busy(0.5)
    time.submitted(20.0, queued=False)
    time.committed(20.1, 100, queued=False)
    assert time.wait_s(21.0, 100, None) == pytest.approx(0.1)
    time.submitted(30.0, queued=False)
    time.committed(35.0, 100, queued=False)
    assert time.wait_s(36.0, 100, None) == pytest.approx(0.1)


def test_a_disk_that_hangs_is_known_by_the_age_of_its_oldest_write() -> None:
    time = WriteTime()
    time.submitted(3.0, queued=False)
    assert time.wait_s(9.0, 100, 3.0) == 6.0
    assert busy(0.5).wait_s(100.0, 400, 99.5) == pytest.approx(2.0)
