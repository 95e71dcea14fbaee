"""What is written as a trace is read back as it was, whatever format it came from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from trace_files import FILES, SHARED, write

from eval.workloads import interleaved, weka
from eval.workloads.codex import codex_workload
from eval.workloads.load import read
from eval.workloads.rewriting import Rewriting, rewriting_sessions
from eval.workloads.save import saved
from eval.workloads.sessions import Agent, Session, Turn


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind != "openai"])
@pytest.mark.parametrize("name", ["kept.jsonl", "new/kept.jsonl.xz", "new/folder"])
def test_every_format_comes_back(tmp_path: Path, kind: str, name: str) -> None:
    file, lines = FILES[kind]
    sessions = list(read(write(tmp_path, file, *lines), kind))
    assert list(saved(sessions, tmp_path / name)) == sessions
    assert list(read(tmp_path / name)) == sessions


def test_made_sessions_come_back(tmp_path: Path) -> None:
    for sessions in (rewriting_sessions(Rewriting(0.1, sessions=3)), codex_workload(sessions=3, requests=50)):
        list(saved(sessions, tmp_path / "kept.jsonl"))
        assert list(weka.read_sessions(tmp_path / "kept.jsonl")) == sessions


def test_agents_come_back_after_the_same_turns(tmp_path: Path) -> None:
    def turn(at: float, *blocks: int) -> Turn:
        return Turn(64 * len(blocks) + 1, 2, blocks, at, 0.0, 0.25)

    agents = (
        Agent("early", -1, 0.1, (turn(0.1, 5),)),
        Agent("one", 0, 0.1, (turn(1.3499999, 6), turn(2.0, 6, 7))),
        Agent("other", 0, 0.0, (turn(1.25, 8),)),
        Agent("none", 1, 0.5, ()),
    )
    whole = Session("s", 64, (turn(1.0, 1), turn(9.0, 1, 2)), agents)
    list(saved([whole], tmp_path / "kept.jsonl"))
    (found,) = weka.read_sessions(tmp_path / "kept.jsonl")
    assert found.turns == whole.turns
    assert [(one.name, one.after, one.turns) for one in found.agents] == [
        (one.name, one.after, one.turns) for one in agents
    ]
    assert [one.delay_s for one in found.agents] == pytest.approx([0.1, 0.1, 0.0, 0.5], abs=1e-5)


@pytest.mark.skipif(not SHARED.exists(), reason="no recorded traces beside the repository")
def test_recorded_sessions_come_back_split_or_not(tmp_path: Path) -> None:
    whole = list(weka.read_sessions(SHARED / "weka_cc/samples"))
    for sessions in (whole, [interleaved.split(one) for one in whole]):
        list(saved(sessions, tmp_path / "kept.jsonl"))
        for found, one in zip(weka.read_sessions(tmp_path / "kept.jsonl"), sessions, strict=True):
            assert (found.turns, len(found.agents)) == (one.turns, len(one.agents))
            for back, agent in zip(found.agents, one.agents, strict=True):
                assert (back.name, back.after, back.turns) == (agent.name, agent.after, agent.turns)
                assert back.delay_s == pytest.approx(agent.delay_s, abs=1e-6)


def test_a_name_that_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.json: a trace's name ends in \.jsonl or \.jsonl\.xz"):
        list(saved([], tmp_path / "x.json"))


def test_sessions_are_not_mixed_with_others_of_a_folder(tmp_path: Path) -> None:
    one = Session("../s", 64, (Turn(64, 2, (1,), 0.0, 0.0, 0.0),))
    many = [replace(one, name=f"{number}/{one.name}") for number in range(12, 0, -1)]
    list(saved(many, tmp_path / "f"))
    assert list(weka.read_sessions(tmp_path / "f")) == many
    with pytest.raises(ValueError, match="has sessions already: name a new folder"):
        list(saved([one], tmp_path / "f"))


PUBLISHED = {
    "session": "id models block_size hash_id_scope tool_tokens system_tokens requests totals",
    "request": "t type model in out hash_ids input_types output_types stop api_time think_time ttft",
    "subagent": "t type agent_id subagent_type duration_ms total_tokens tool_use_count status models tool_tokens "
    "system_tokens requests",
}
NEEDED = {
    "session": "id models block_size hash_id_scope requests",
    "request": "t type model in out",
    "subagent": "t type agent_id subagent_type duration_ms total_tokens tool_use_count status requests models",
}


def test_readers_that_want_exactly_the_published_fields_get_them(tmp_path: Path) -> None:
    def turns(at: float) -> tuple[Turn, ...]:
        return (Turn(70, 2, (1,), at, 0.0, 0.25), Turn(140, 3, (1, 2), at + 1, 0.75, 0.5))

    whole = Session("s", 64, turns(0.0), (Agent("a", 0, 0.1, turns(0.35)), Agent("none", 0, 0.1, ())))
    list(saved([whole, replace(whole, name="later", start_s=7.0)], tmp_path / "f"))
    first, later = (json.loads(file.read_text()) for file in sorted((tmp_path / "f").iterdir()))
    assert later.keys() - first.keys() == {"start_s"}
    agents = [one for one in first["requests"] if one["type"] == "subagent"]
    requests = [one for one in first["requests"] if one["type"] != "subagent"] + agents[0]["requests"]
    assert (len(agents), len(requests)) == (2, 4)
    for kind, values in (("session", [first]), ("subagent", agents), ("request", requests)):
        for value in values:
            assert set(NEEDED[kind].split()) <= value.keys() <= set(PUBLISHED[kind].split())
    assert (agents[0]["duration_ms"], agents[0]["total_tokens"]) == (1500, 215)
    assert (agents[1]["duration_ms"], agents[1]["requests"]) == (0, [])
