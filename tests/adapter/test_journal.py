"""The policy's journal: with the same events the same policy code gives the same answers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from eval.journal import JournalError, main, read, replay
from sglang_histate.adapter import journal_file
from sglang_histate.adapter.journal_file import JournalFile, open_journal
from sglang_histate.adapter.refusal import Refusal
from sglang_histate.policy.journal import Journal
from sglang_histate.policy.place_prior import PlaceKind
from sglang_histate.policy.score import Eviction
from sglang_histate.policy.segment_plan import plan_segment

from .conftest import GPU
from .engine import PAGE, build, request, tokens
from .test_eviction import history, visit

pytestmark = pytest.mark.skipif(GPU, reason="the tiny engine runs on the CPU engine's stand-in ops")


def recorded(mode: Eviction = Eviction.SCORE, steps: int = 150) -> list:
    """What a tree reported in a random load, with a flush in the middle."""
    events: list = []
    engine = build(mode=mode, journal=Journal(lambda event: events.append(json.loads(json.dumps(event)))))
    history(engine, 3, steps // 2)
    engine.ranking.pressure()
    engine.cache.reset()
    engine.kv.clear()
    engine.states.clear()
    history(engine, 4, steps // 2)
    ids = tokens((5, 4 * PAGE))
    visit(engine, ids)
    lock = engine.cache.inc_lock_ref(engine.match(request(ids + tokens((9, 1)))).best_match_node)
    engine.evict_states(100)  # all but what is locked
    engine.cache.dec_lock_ref(
        engine.match(request(ids + tokens((9, 1)))).best_match_node, lock.to_dec_params()
    )
    engine.ranking.pressure()
    return events


@pytest.mark.parametrize("mode", list(Eviction))
def test_the_same_victims_and_pressures(mode: Eviction) -> None:
    events = recorded(mode)
    outcome = replay(events)
    assert outcome.different == []
    named = [event for event in events if event[0] == "victim" and event[3] is not None]
    assert len(named) > 30 and outcome.victims >= len(named) and outcome.pressures >= 2
    assert any(event[2] for event in events if event[0] == "victim"), "some units could not go"


def test_who_looks_at_the_pressure_leaves_no_trace() -> None:
    events: list = []
    ranking = build(journal=Journal(events.append)).ranking
    before = len(events)
    assert ranking.shown_pressure() == ranking.as_json()["pressure"] and len(events) == before
    assert ranking.pressure() == ranking.shown_pressure() and len(events) == before + 1


def test_another_ranking_is_noticed() -> None:
    events = recorded(Eviction.SCORE)
    changed = [[*event[:3], "lru", event[4]] if event[0] == "reset" else event for event in events]
    assert replay(changed).different


def test_a_lost_access_is_noticed() -> None:
    """Or the comparison would be blind to what the ranking rests on."""
    events = recorded()
    without = [event for event in events if event[0] != "touch"]
    assert any("victim" in sentence for sentence in replay(without).different)


def planned(price: float = 2.0) -> list[list[Any]]:
    """What learned plans report: clients part at tool results and at a depth, then a segment is planned."""
    events: list[list[Any]] = []
    journal = Journal(lambda event: events.append(json.loads(json.dumps(event))))
    hits, places = journal.hit_prior(), journal.place_prior()
    for number in range(40):
        hits.segment(0, 1000)
        places.seen(PlaceKind.TOOL_RESULT)
        if number % 4 == 0:
            hits.parted(244, 1000)
            places.parted(PlaceKind.TOOL_RESULT)
    found = [(600, PlaceKind.TOOL_RESULT)]
    expected = [(page, places.expected(kind)) for page, kind in found]
    journal.plan(0, 1000, price, [999], found, plan_segment(hits, 0, 1000, price, [999], expected))
    return events


def test_learned_plans_are_compared() -> None:
    events = planned()
    assert 600 in events[-1][-1] and replay(events).different == [] and replay(events).plans == 1
    for lost, price in (("segment", 2.0), ("parted", 2.0), ("left at", 50.0), ("seen", 200.0)):
        without = [event for event in planned(price) if event[0] != lost]
        assert len(replay(without).different) == 1, lost


def test_intervals_are_compared() -> None:
    events = [["choices", [512, 1024, 4096]], ["interval", 8000, 100.0, 1.0, 1024]]
    assert replay(events).different == [] and replay(events).intervals == 1
    events[1][4] = 512
    assert "interval" in replay(events).different[0]


def test_the_file_has_all_events_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "policy.jsonl"
    events: list = []
    file = JournalFile(path)

    def emit(event: list) -> None:
        events.append(event)
        file.emit(event)

    engine = build(journal=Journal(emit))
    for seed in range(1, 12):
        visit(engine, tokens((seed, 4 * PAGE)))
        engine.evict_states(1)
    file.close()
    file.emit(["touch", 0, 0, 0])  # after the end nothing is written
    assert list(read(path)) == json.loads(json.dumps(events))
    assert main([str(path)]) == 0 and "0 differ" in capsys.readouterr().out
    with path.open("a") as more:
        more.write('["victim","host",[],["bun')  # the server was killed
    assert main([str(path)]) == 0
    with path.open("a") as more:
        more.write('dle",null,[77]]]\n')
    assert main([str(path)]) == 1 and "victim of host" in capsys.readouterr().out
    with path.open("a") as more:
        more.write('["remove",4711]\n')
    assert main([str(path)]) == 2 and "cannot follow" in capsys.readouterr().err
    path.write_text("{}\n")
    assert main([str(path)]) == 2 and ":1: no event" in capsys.readouterr().err
    with pytest.raises(JournalError, match=":1: no JSON"):
        path.write_text("what\n")
        list(read(path))


def test_every_rank_has_its_own_file(tmp_path: Path) -> None:
    assert open_journal(None, "") is None
    for rank in ("", "dp0-tp1"):
        journal = open_journal(str(tmp_path / "log"), rank)
        assert journal is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.dp0-tp1"]
    with pytest.raises(Refusal, match="--histate-policy-log"):
        open_journal(str(tmp_path / "missing" / "log"), "")


def test_a_slow_disk_ends_the_log_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_file, "MOST_WAITING", 10)
    gate = threading.Event()
    monkeypatch.setattr(journal_file.json, "dumps", lambda event, separators: gate.wait(10) and str(event))
    file = JournalFile(tmp_path / "log")
    for number in range(100):
        file.emit(["touch", number, 0, 0])
    gate.set()
    file.close()
    assert "too slow" in caplog.text and caplog.text.count("ends here") == 1
    assert 10 <= len((tmp_path / "log").read_text().splitlines()) < 20
