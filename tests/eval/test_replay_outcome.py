"""The text at the end, and which sessions a name or a file stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.metrics import compare
from eval.metrics.runs import Run
from eval.records import Record, RunFacts
from eval.replay.outcome import outcome, problems
from eval.replay.workload import TRACES, WEKA, Selection, load


def run(system: str, ttft_s: list[float], hit: int, **facts: object) -> Run:
    records = [
        Record(f"s{n}", "", 1, 0.0, 0.0, t, t + 1, 200, 11, {"device": hit}, "device", None, 128, False)
        for n, t in enumerate(ttft_s)
    ]
    known = {"complete": True, "round": 1, "position": 2, "mean_in_flight": 1.5, **facts}
    return Run(
        Path(f"{system}-1.jsonl"), RunFacts(system, "engine", "w", "c0ffee", "x", known), tuple(records)
    )


def test_the_outcome_has_the_ratio_the_share_and_every_run() -> None:
    text = outcome(compare([run("histate", [0.1, 0.2, 0.3], 128), run("hicache", [0.2, 0.4, 0.6], 64)]))
    everything = text.partition("Reuse-sensitive")[0]
    rows = {line.split()[0]: line.split() for line in everything.splitlines()}
    assert [rows[name][4] for name in ("histate", "hicache")] == ["100.0", "50.0"]
    assert "hicache: p50 2.00 (2.00 to 2.00), p99 2.00" in text
    assert "hicache-1.jsonl: place 2 of round 1, TTFT p50 0.400 s, 1.5 requests in flight" in text
    assert "warning" not in text


def test_what_makes_figures_doubtful_is_said() -> None:
    facts = {
        "complete": True,
        "unequal_bytes": "host: 2MiB instead of 1MiB",
        "hits_beyond_bound": 3,
        "resumed_requests": 5,
        "page_cache": "not dropped: Permission denied",
    }
    assert len(problems(facts)) == 4
    assert problems({}) == ["not complete"]
    text = outcome(compare([run("stock", [0.1], 0, **facts)]))
    assert "warning: stock-1.jsonl: resumed with empty caches after 5 requests" in text
    assert "ratio" not in text


def session(name: str, turns: int, tokens: int = 640) -> str:
    requests = [
        {"t": 1.0 * turn, "type": "n", "in": tokens, "out": 1, "hash_ids": list(range(tokens // 64))}
        for turn in range(turns)
    ]
    return json.dumps({"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests})


def test_sessions_are_cut_and_short_ones_passed_over(tmp_path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join([session("a", 2), session("b", 5), session("long", 4, 6400), session("c", 3)]))
    chosen = Selection(str(trace), sessions=2, context=1000, turns=4, least_turns=3)
    assert [(one.name, len(one.turns)) for one in load(chosen)] == [("b", 4), ("c", 3)]
    assert chosen.name == "trace.jsonl, 2 sessions, cut at 1000 tokens and 4 turns, of 3 turns or more"
    only = Selection(str(trace), steps="only:lo")
    assert [one.name for one in load(only)] == ["long"]
    with pytest.raises(ValueError, match="no session has 1 turns below 100 tokens: raise --context"):
        load(Selection(str(trace), context=100))


def test_names_stand_for_workloads() -> None:
    chosen = Selection("rewriting:10", sessions=3)
    assert [len(one.turns) for one in load(chosen)] == [16, 16, 16]
    assert chosen.name.startswith("rewriting-10%-uniform")
    with pytest.raises(ValueError, match="rewriting:lots: a percentage is expected"):
        load(Selection("rewriting:lots"))
    with pytest.raises(ValueError, match="--workload weka: there is no weka_cc"):
        load(Selection("weka", traces=Path("nowhere")))
    with pytest.raises(ValueError, match=r"--workload nowhere\.jsonl: no such file"):
        load(Selection("nowhere.jsonl"))


@pytest.mark.skipif(
    not (TRACES / WEKA).exists(), reason="the recorded sessions are not beside the repository"
)
def test_the_real_sessions_can_be_named() -> None:
    found = load(Selection("weka", sessions=3, context=65536, turns=4, least_turns=3))
    assert [len(one.turns) for one in found] == [4, 4, 4]
