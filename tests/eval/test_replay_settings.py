"""What a command's runs have in common: facts, chunks, and that --resume goes on with nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.metrics.runs import SETTINGS
from eval.records import RecordsError, RunFacts, read_run
from eval.replay import rounds
from eval.replay.kept import GrowingRun, complete, keep
from eval.replay.options import parse
from eval.replay.systems import SYSTEMS


def trace(folder: Path, block: int = 64) -> Path:
    """One session of two turns; the second has 20 blocks."""
    requests = [
        {"t": 5.0 * turn, "type": "n", "in": blocks * block, "out": 1, "hash_ids": list(range(blocks))}
        for turn, blocks in enumerate((10, 20))
    ]
    path = folder / f"trace-{block}.jsonl"
    session = {"id": "a", "block_size": block, "hash_id_scope": "local", "requests": requests}
    path.write_text(json.dumps(session))
    return path


def runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str, block: int = 64
) -> dict[str, tuple[RunFacts, list[str]]]:
    """Run a command whose servers are none: every run ends at once. The run and the server's flags by system."""
    found: dict[str, tuple[RunFacts, list[str]]] = {}

    def replayed(system: Any, setup: Any, run: RunFacts, path: Path, work: Any, say: Any) -> None:
        growing = GrowingRun(path, run, ())
        growing.finish({"complete": True})
        found[system.name] = run, [*setup.extra, "--chunked-prefill-size", str(setup.chunk)]

    monkeypatch.setattr(rounds, "replay_system", replayed)
    sizes = ["--device-size", "4MiB", "--host-size", "8MiB", "--disk-size", "8MiB"]
    systems = ["--systems", "histate,histate-fixed"]
    given = ["--workload", str(trace(folder, block)), "--out", str(folder / "out"), *sizes, *systems, *more]
    options = parse(given)
    rounds.run_all(options, rounds.prepare(options), "python -m eval.replay", lambda text: None)
    return found


@pytest.mark.parametrize(
    ("more", "block", "chunk", "recorded", "fixed"),
    [
        ([], 64, 512, 8192, 128),
        (["--tokens-per-block", "64"], 64, 8192, 8192, 2048),
        ([], 16, 2048, 8192, 512),
        ([], 512, 64, 8192, 64),
        (["--tokens-per-block", "1"], 512, 64, 32768, 64),
        (["--chunk", "1024"], 64, 1024, 16384, 128),
    ],
)
def test_the_chunk_shrinks_as_the_prompts_do_and_the_facts_say_so(
    more, block, chunk, recorded, fixed, tmp_path, monkeypatch
) -> None:
    found = runs(tmp_path, monkeypatch, *more, block=block)
    for run, flags in found.values():
        assert flags[flags.index("--chunked-prefill-size") + 1] == str(chunk)
        assert run.facts["chunk_tokens"] == chunk
        assert run.facts["chunk_recorded_tokens"] == recorded
    run, flags = found["histate-fixed"]
    assert flags[flags.index("--histate-interval") + 1] == f"fixed:{fixed}"
    assert run.facts["interval_tokens"] == fixed
    assert "interval_tokens" not in found["histate"][0].facts


def test_the_facts_have_every_setting_that_may_not_differ_in_a_table(tmp_path, monkeypatch) -> None:
    facts = runs(tmp_path, monkeypatch)["histate"][0].facts
    of_the_engine = set(SETTINGS) - {"device_bytes", "host_bytes", "ssd_bytes", "costs", "tuning"}
    assert {"model", "running_requests", "chunk_tokens"} <= of_the_engine <= set(facts)


def test_complete_runs_of_the_same_options_are_not_run_again(tmp_path, monkeypatch) -> None:
    assert set(runs(tmp_path, monkeypatch)) == {"histate", "histate-fixed"}
    assert runs(tmp_path, monkeypatch, "--resume") == {}
    (tmp_path / "out" / "histate-1.jsonl").unlink()
    assert set(runs(tmp_path, monkeypatch, "--resume")) == {"histate"}


def test_records_of_an_earlier_command_do_not_stay_beside_those_of_a_later_one(tmp_path, monkeypatch) -> None:
    runs(tmp_path, monkeypatch, "--repeats", "2")
    assert len(list((tmp_path / "out").glob("*.jsonl"))) == 4
    monkeypatch.setattr(rounds.Limit, "allows_another", lambda self: not list(tmp_path.glob("out/*.jsonl")))
    runs(tmp_path, monkeypatch, "--repeats", "2", "--minutes", "1")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.jsonl")) == [
        "histate-1.jsonl",
        "histate-fixed-1.jsonl",
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--running", "2"], "running_requests 8, not 2"),
        (["--device-size", "5MiB"], "budgets {'device': 4194304"),
        (["--chunk", "64"], "chunk_tokens 512, not 64"),
        (["--live", "3"], "workload"),
        (["--cap", "9"], "workload"),
        (["--server-args", "--dtype", "float32"], r"server_args [], not ['--dtype', 'float32']"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_records_of_other_settings_are_refused(more, words, ended, tmp_path, monkeypatch) -> None:
    run, _ = runs(tmp_path, monkeypatch)["histate"]
    path = tmp_path / "out" / "histate-1.jsonl"
    if not ended:
        GrowingRun(path, run, ()).close()
    before = path.read_bytes()
    with pytest.raises(RecordsError) as caught:
        runs(tmp_path, monkeypatch, "--resume", *more)
    assert words in str(caught.value) and "--resume needs the options" in str(caught.value)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_another_machine_and_place_may_go_on(tmp_path) -> None:
    path, facts = tmp_path / "r.jsonl", {"model": "demo", "machine": {"cores": 2}, "round": 1, "position": 1}
    GrowingRun(path, RunFacts("a", "engine", "w", "old", "x", facts), ()).close()
    moved = {"model": "demo", "machine": {"cores": 9}, "round": 2, "position": 2}
    assert keep(path, RunFacts("a", "engine", "w", "new", "y", moved), ()).records == ()
    assert not complete(path, RunFacts("a", "engine", "w", "new", "y", moved))
    for name, value in (("model", "other"), ("a new fact", 1)):
        with pytest.raises(RecordsError, match=f"recorded with {name}"):
            keep(path, RunFacts("a", "engine", "w", "old", "x", {**facts, name: value}), ())


def test_facts_that_a_file_writes_differently_are_the_same(tmp_path) -> None:
    path, run = tmp_path / "r.jsonl", RunFacts("a", "engine", "w", "c", "x", {"args": ("b",), "by": {1: 2}})
    GrowingRun(path, run, ()).close()
    assert read_run(path)[0] != run
    assert not complete(path, run)


def test_every_system_describes_itself_in_one_line() -> None:
    assert all(system.description and "\n" not in system.description for system in SYSTEMS.values())
