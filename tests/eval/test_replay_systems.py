"""Flags and bytes of the systems, the rounds, and what is told of a finished run."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.eviction.budgets import DEMO_UNITS
from eval.internal_hits.budgets import Units
from eval.internal_hits.systems import command_line
from eval.records import Record, RecordsError, RunFacts
from eval.replay import machine
from eval.replay.engine import difference_of, server_facts
from eval.replay.kept import GrowingRun, complete
from eval.replay.options import parse
from eval.replay.recorded_tokens import SERVER_FLAG
from eval.replay.rounds import Limit, plan
from eval.replay.systems import SYSTEMS, Bytes, TooSmall, in_proportion, scaled, setup_of, split, start_only

UNITS = Units(DEMO_UNITS.kv_token, DEMO_UNITS.checkpoint)
GIVEN = Bytes(8 << 20, 20 << 20, 30 << 20, 2 << 20)


def flags(name: str, tmp_path: Path, recorded: bool = True, scale: float = 1 / 16) -> list[str]:
    budgets = split(GIVEN, UNITS, 4096, 4)
    setup = setup_of(
        SYSTEMS[name],
        budgets,
        UNITS,
        model=None,
        work_dir=tmp_path,
        running=4,
        chunk=512,
        scale=scale,
        recorded=recorded,
    )
    return command_line(SYSTEMS[name].base, setup)[0]


def value(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_has_the_same_pools_batch_and_chunks(name, tmp_path) -> None:
    command = flags(name, tmp_path)
    for flag, wanted in (
        ("--page-size", "64"),
        ("--max-running-requests", "4"),
        ("--chunked-prefill-size", str(512 + SYSTEMS[name].tail_at(1 / 16))),
    ):
        assert value(command, flag) == wanted
    kv = int(value(command, "--max-total-tokens")) * UNITS.kv_bytes_per_token
    # One state more for HiState: its one pool has the sink for padding rows inside.
    sink = 1 if SYSTEMS[name].has_histate else 0
    states = (int(value(command, "--max-mamba-cache-size")) - sink) * UNITS.checkpoint_bytes
    assert 0.99 * GIVEN.device < kv + states <= GIVEN.device
    assert states / (kv + states) == pytest.approx(0.9 / 1.9, abs=0.01)
    assert {SERVER_FLAG, "--enable-cache-report"} <= set(command)
    assert SERVER_FLAG not in flags(name, tmp_path, recorded=False)
    assert SYSTEMS[name].has_histate == ("--disable-histate" not in command)


def test_host_and_disk_bytes_are_equal_too(tmp_path) -> None:
    ours, theirs = flags("histate", tmp_path), flags("hicache", tmp_path)

    def host(command: list[str]) -> float:
        kv = int(value(command, "--max-total-tokens")) * UNITS.kv_bytes_per_token
        device = kv + int(value(command, "--max-mamba-cache-size")) * UNITS.checkpoint_bytes
        return float(value(command, "--hicache-ratio")) * device

    # HiState's ratio sizes the arena, what is in flight comes on top; HiCache's ratio is all it has.
    inflight = int(value(ours, "--histate-inflight-size"))
    assert host(ours) + inflight == pytest.approx(GIVEN.host, rel=1e-3)
    assert host(theirs) == pytest.approx(GIVEN.host, rel=1e-3)
    assert value(ours, "--histate-ssd-size") == str(GIVEN.disk)
    assert f'"max_size": {GIVEN.disk}' in value(theirs, "--hicache-storage-backend-extra-config")


@pytest.mark.parametrize(
    ("name", "flag", "wanted"),
    [
        ("histate-lru", "--histate-eviction", "lru"),
        ("histate-lru-refresh", "--histate-eviction", "lru-refresh"),
        ("histate-align", "--histate-interval", "align"),
        ("histate-fixed", "--histate-interval", "fixed:128"),
        ("histate-none", "--histate-interval", "none"),
    ],
)
def test_an_ablation_is_one_flag_away(name, flag, wanted, tmp_path) -> None:
    command = flags(name, tmp_path)
    assert value(command, flag) == wanted
    at = command.index(flag)
    assert command[:at] + command[at + 2 :] == flags("histate", tmp_path)


def test_stock_servers_find_the_ends_of_answers_as_histate_s_launcher_does(tmp_path) -> None:
    for name in ("stock", "hicache"):
        assert value(flags(name, tmp_path), "--mamba-track-interval") == "64"
        assert "tracked at every page of an answer" in SYSTEMS[name].description
    for name in ("histate", "nocache"):
        assert "--mamba-track-interval" not in flags(name, tmp_path)


@pytest.mark.parametrize(
    ("recorded", "scale", "sent"),
    [
        (8192, 1.0, 8192),
        (8192, 4 / 64, 512),
        (8192, 4 / 512, 64),
        (8192, 1 / 512, 64),
        (8192, 4 / 16, 2048),
        (2048, 4 / 64, 128),
        (2048, 64 / 64, 2048),
        (1000, 1.0, 1024),
    ],
)
def test_lengths_of_servers_shrink_as_prompts_do_in_whole_pages(recorded, scale, sent) -> None:
    assert scaled(recorded, scale) == sent


def test_a_fixed_interval_shrinks_as_prompts_do(tmp_path) -> None:
    assert value(flags("histate-fixed", tmp_path, scale=1.0), "--histate-interval") == "fixed:2048"


def test_a_tail_is_for_ends_of_prompts_and_not_taken_from_the_step(tmp_path) -> None:
    plain, tailed = flags("histate", tmp_path, scale=1 / 16), flags("histate-all", tmp_path, scale=1 / 16)
    step = int(value(plain, "--chunked-prefill-size"))
    assert value(tailed, "--histate-step-tail") == "128" and "--histate-step-tail" not in plain
    assert int(value(tailed, "--chunked-prefill-size")) == step + 128


def test_a_server_that_only_starts_has_room_whatever_the_chunk(tmp_path) -> None:
    assert start_only("m", tmp_path, 64, 1 << 20, ()).budgets.device_kv_tokens == 2 * 8192
    assert start_only("m", tmp_path, 16384, 1 << 20, ()).budgets.device_kv_tokens == 2 * 16384


def test_budgets_are_in_the_paper_s_proportion() -> None:
    gib = 1 << 30
    assert in_proportion(510 * gib, 7) == Bytes(45 * gib, 96 * gib, 150 * gib, 7)
    assert in_proportion(510 * gib, 7).scaled(0.5) == Bytes(45 * gib // 2, 48 * gib, 75 * gib, 7)


def test_what_cannot_run_is_refused_in_one_sentence() -> None:
    with pytest.raises(TooSmall, match=r"the longest prompt with its answer takes 32896: give at least"):
        split(GIVEN, UNITS, 32768, 4)
    with pytest.raises(TooSmall, match="--host-size"):
        split(Bytes(8 << 20, 1 << 20, 0, 2 << 20), UNITS, 1000, 4)
    # So many running requests need their states, even if half of the bytes would not hold them.
    assert split(GIVEN, UNITS, 1000, 30).device_states == 91


def test_rounds_alternate() -> None:
    found = [(one.system, one.round, one.position, one.path.name) for one in plan(("a", "b"), 3, Path("d"))]
    assert found == [
        ("a", 1, 1, "a-1.jsonl"),
        ("b", 1, 2, "b-1.jsonl"),
        ("b", 2, 1, "b-2.jsonl"),
        ("a", 2, 2, "a-2.jsonl"),
        ("a", 3, 1, "a-3.jsonl"),
        ("b", 3, 2, "b-3.jsonl"),
    ]


def test_only_a_finished_run_is_complete(tmp_path) -> None:
    path, run = tmp_path / "a.jsonl", RunFacts("a", "engine", "w", "c", "x")
    assert not complete(path, run)
    growing = GrowingRun(path, run, ())
    growing.add(Record("s", "", 0, 0, 0, 1, 2, 70, 3, {}, "", None, 64, False))
    assert not complete(path, run)
    growing.finish({"complete": True})
    assert complete(path, run)
    path.write_text("no records")
    with pytest.raises(RecordsError, match=r"a\.jsonl:1"):
        complete(path, run)


def test_counters_are_those_of_the_replay_alone() -> None:
    before = {"a": 3, "by": {"x": 1}, "name": "n", "flag": True}
    after = {"a": 10, "by": {"x": 1, "y": 2}, "new": 4, "name": "n", "flag": True}
    assert difference_of(before, after) == {"a": 7, "by": {"x": 0, "y": 2}, "new": 4}
    earlier = {"recomputed_tokens_with_kv_total": 5, "intervals_chosen_total": {"0": 1, "256": 2}}
    later = {"recomputed_tokens_with_kv_total": 25, "intervals_chosen_total": {"0": 1, "256": 5, "512": 1}}
    facts = server_facts(SYSTEMS["histate-none"], earlier, later)
    assert facts["recomputed_with_kv_tokens"] == 20
    assert facts["intervals"] == {"256": 3, "512": 1}
    assert server_facts(SYSTEMS["hicache"], {}, {}) == {"counters": None}


def test_written_bytes_are_those_of_a_process_group(tmp_path) -> None:
    for process, group, written, cancelled in ((1, 50, 1000, 0), (2, 50, 700, 200), (3, 51, 9, 0)):
        folder = tmp_path / str(process)
        folder.mkdir()
        (folder / "stat").write_text(f"{process} (a) b) S 1 {group} 0 0")
        (folder / "io").write_text(f"rchar: 1\nwrite_bytes: {written}\ncancelled_write_bytes: {cancelled}\n")
    assert machine.written_bytes(50, tmp_path) == 1500
    assert machine.written_bytes(52, tmp_path) is None


def test_the_page_cache_is_dropped_or_said_not_to_be(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(machine.os, "sync", lambda: None)  # slow on a busy disk
    switch = tmp_path / "drop"
    switch.touch()
    assert machine.drop_page_cache(switch) == "dropped"
    assert switch.read_text() == "1\n"
    assert machine.drop_page_cache(tmp_path / "none" / "drop") == "not dropped: No such file or directory"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "histate,other"], "other is not one of histate, hicache"),
        (["--systems", "histate,histate"], "name each once"),
        (["--tokens-per-block", "5"], "does not divide the page of 64"),
        (["--chunk", "100"], "--chunk 100: must be whole pages of 64 tokens"),
        (["--cap", "-1"], "--cap -1.0: must not be negative"),
        (["--budget-factor", "0"], "--budget-factor 0: must be above 0"),
        (["--live", "0"], "not a positive number"),
        (["--host-size", "2MB"], "2MB"),
    ],
)
def test_a_wrong_command_line_is_named(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--workload", "weka", "--out", "o", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_url_says_what_it_likes_unless_told_otherwise() -> None:
    common = ["--workload", "weka", "--out", "o"]
    assert parse(common).shape.recorded_outputs
    assert not parse([*common, "--url", "http://x/v1"]).shape.recorded_outputs
    assert parse([*common, "--url", "http://x/v1", "--outputs", "recorded"]).shape.recorded_outputs
    given = parse([*common, "--budget-factor", "0.5", "--host-size", "7MiB"])
    assert given.bytes_from(Bytes(100, 200, 300, 1)) == Bytes(50, 7 << 20, 150, 2 << 20)


def test_no_round_begins_that_would_end_too_late() -> None:
    now_s = [100.0]
    limit = Limit(10, 0.0, clock=lambda: now_s[0])
    begins = []
    for took_s in (200.0, 150.0, 100.0, 100.0):
        begins.append(limit.allows_another())
        now_s[0] += took_s
    # Begun at 100, 300 and 450 s; the longest took 200 s, and 600 s are the end.
    assert begins == [True, True, False, False]
    unlimited = Limit(None)
    assert all(unlimited.allows_another() for _ in range(3))
    assert Limit(1, -1000.0, clock=lambda: 0.0).allows_another()
