"""The bench of the policy runs, says what was met, and ends with a status that tells."""

from __future__ import annotations

import pytest

from eval import policy_bench
from eval.policy_bench import Row, main, table


def test_a_small_run_measures_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--units", "200", "600", "--operations", "100"])
    shown = capsys.readouterr().out
    assert status == (1 if "NOT MET" in shown else 0)
    for operation in ("touch", "evict", "grow", "q step, a unit", "choose", "plan", "plan, long", "learn"):
        assert operation in shown
    assert "bytes each" in shown


def test_a_missed_target_is_shown_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(policy_bench.TARGET_US, "touch", 0.0)
    assert main(["--units", "200", "--operations", "50"]) == 1
    assert "NOT MET: touch at 2" in capsys.readouterr().out


def test_the_mean_decides() -> None:
    met = Row(10, "touch", 5, mean=20.0, median=1.0, p99=90.0, longest=900.0, wall_mean=70.0)
    missed = Row(10, "evict", 5, mean=20.1, median=1.0, p99=2.0, longest=3.0, wall_mean=20.0)
    free = Row(10, "grow", 5, mean=500.0, median=1.0, p99=2.0, longest=3.0, wall_mean=2.0)
    assert met.met and free.met and not missed.met
    lines = table([met, missed, free]).splitlines()
    assert lines[1].endswith("<= 20 us: met") and lines[2].endswith("<= 20 us: NOT MET")
    assert lines[3].endswith("2.00")


def test_evictions_empty_the_pool_in_the_end() -> None:
    sessions = policy_bench.Sessions(100, seed=3)
    for _ in range(len(sessions.queue) * 2):
        if not len(sessions.queue):
            break
        sessions.evict()
    assert len(sessions.queue) == 0 and len(sessions.tree) == 0
    with pytest.raises(SystemExit, match="ran out of units"):
        sessions.evict()
