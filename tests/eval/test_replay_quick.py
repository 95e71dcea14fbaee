"""The quick comparison: which command line it makes of what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.replay import quick
from eval.replay.options import parse
from eval.replay.rounds import prepare
from eval.replay.workload import WEKA


def traces(folder: Path) -> Path:
    """A folder that seems to have the recorded sessions."""
    file = folder / WEKA
    file.parent.mkdir(parents=True)
    file.touch()
    return folder


def test_recorded_sessions_are_used_where_they_are_and_made_ones_elsewhere(tmp_path) -> None:
    real = parse(quick.arguments(tmp_path / "out", traces(tmp_path / "traces"), 9.5))
    assert (real.selection.source, real.selection.traces) == ("weka", tmp_path / "traces")
    assert real.selection.least_turns > 1
    made = parse(quick.arguments(tmp_path / "out", tmp_path / "nowhere", 9.5))
    assert made.selection.source.startswith("rewriting:")


@pytest.mark.parametrize("recorded", [True, False])
def test_both_systems_run_first_and_second_on_equal_terms(recorded, tmp_path) -> None:
    folder = traces(tmp_path) if recorded else tmp_path
    options = parse(quick.arguments(tmp_path / "out", folder, 7))
    assert set(options.systems) == {"histate", "hicache"}
    assert options.repeats == 2
    assert options.minutes == 7
    assert options.out == tmp_path / "out"
    assert options.url is None and not options.resume and options.shape.recorded_outputs


def test_the_made_workload_is_ready_to_be_sent_and_has_ends_of_chunks_in_it(tmp_path) -> None:
    options = parse(quick.arguments(tmp_path / "out", tmp_path, 9.5))
    workload = prepare(options)
    chunk = options.chunk_at(workload.scale)
    assert max(len(one.prompt) for session in workload.sessions for one in session.all_requests()) > 4 * chunk


def test_the_command_line_reaches_the_replay(tmp_path, monkeypatch) -> None:
    called: list[list[str]] = []

    def replay(arguments: list[str]) -> int:
        called.append(arguments)
        return 1

    monkeypatch.setattr(quick, "replay", replay)
    given = ["--out", str(tmp_path / "o"), "--traces", str(tmp_path), "--minutes", "3.5"]
    assert quick.main(given) == 1
    assert called == [quick.arguments(tmp_path / "o", tmp_path, 3.5)]
    assert called[0][called[0].index("--minutes") + 1] == "3.5"
    quick.main([])
    assert parse(called[1]).out == quick.DEFAULT_DIR
    assert parse(called[1]).minutes == quick.MINUTES <= 10
