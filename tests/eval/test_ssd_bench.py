"""The bench of the SSD tier recovers what it wrote, says what was met, and ends with a status that tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval import ssd_bench
from eval.ssd_bench import main


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--slabs",
        "200",
        "--entries",
        "200",
        "--calls",
        "500",
        "--tries",
        "1",
        "--dir",
        str(tmp_path),
    ]
    status = main(arguments)
    shown = capsys.readouterr().out
    assert status == (1 if "NOT MET" in shown else 0)
    assert "recover      200" in shown and "lookup       200" in shown and "p99" in shown
    assert not list(tmp_path.iterdir())


def test_a_missed_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ssd_bench, "LOOKUP_TARGET_US", 0.0)
    assert main(["lookup", "--entries", "100", "--calls", "50", "--dir", str(tmp_path)]) == 1
    assert "NOT MET" in capsys.readouterr().out
