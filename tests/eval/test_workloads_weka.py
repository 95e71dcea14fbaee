"""The loader of the Claude Code sessions: every variant of the schema, and every error with its place."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from eval.workloads.fields import TraceError
from eval.workloads.sessions import Session
from eval.workloads.weka import read_sessions


def request(t: float = 0.0, tokens: int = 200, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    ids = list(range(1, tokens // 64 + 1)) if ids is None else ids
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": 5, "hash_ids": ids, **more}


def session(*requests: Any, **more: Any) -> dict[str, Any]:
    return {
        "id": "one", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "tool_tokens": 0,
        "system_tokens": 0, "requests": list(requests), "totals": {}, **more,
    }  # fmt: skip


def agent(t: float, *requests: Any, **more: Any) -> dict[str, Any]:
    return {"type": "subagent", "t": t, "agent_id": "agent_001", "requests": list(requests), **more}


def load(folder: Path, *sessions: Any) -> list[Session]:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in sessions))
    return list(read_sessions(file))


def test_turns_have_blocks_lengths_and_pauses(tmp_path: Path) -> None:
    (found,) = load(
        tmp_path,
        session(
            request(api_time=2.0, think_time=0.0), request(t=5.0, tokens=256, api_time=1.5, think_time=3.0)
        ),
    )
    first, second = found.turns
    assert (found.name, found.block_tokens, found.shared_ids, found.requests) == ("one", 64, False, 2)
    assert (first.input_tokens, first.output_tokens, first.blocks) == (200, 5, (1, 2, 3))
    assert (first.gap_s, first.service_s, second.gap_s, second.service_s) == (0.0, 2.0, 3.0, 1.5)
    assert second.blocks == (1, 2, 3, 4)


@pytest.mark.parametrize(
    "ids", [[0, 1, 2], [0, 1, 2, 3]], ids=["without the rest", "with an id for the rest"]
)
def test_ids_may_start_at_zero_and_name_the_rest(tmp_path: Path, ids: list[int]) -> None:
    (found,) = load(tmp_path, session(request(tokens=200, ids=ids), hash_id_scope="global"))
    assert found.turns[0].blocks == (0, 1, 2) and found.shared_ids


def test_without_times_of_requests_the_pause_is_the_difference_of_the_starts(tmp_path: Path) -> None:
    (found,) = load(
        tmp_path,
        session(
            request(api_time=10.0),
            request(t=30.0),  # no think_time: 20 s after the end of the first
            request(t=50.0, think_time=49.0),  # nothing is known of the second's length
        ),
    )
    assert [turn.gap_s for turn in found.turns] == [0.0, 20.0, 20.0]
    assert [turn.service_s for turn in found.turns] == [10.0, 0.0, 0.0]


@pytest.mark.parametrize("first", [0.0, 12.0], ids=["from the agent's start", "from the session's start"])
def test_an_agent_starts_after_the_turn_before_it(tmp_path: Path, first: float) -> None:
    (found,) = load(
        tmp_path,
        session(
            request(api_time=4.0),
            agent(12.0, request(t=first, ids=[7, 8, 9]), request(t=first + 3.0, ids=[7, 8, 9])),
            request(t=30.0),
        ),
    )
    (one,) = found.agents
    assert (one.name, one.after, one.delay_s) == ("agent_001", 0, 8.0)
    assert [turn.start_s for turn in one.turns] == [12.0, 15.0]
    assert len(found.turns) == 2 and found.requests == 4
    assert [turn.blocks[0] for turn in found.all_turns()] == [1, 1, 7, 7]


def test_a_session_is_cut_where_its_context_is_full(tmp_path: Path) -> None:
    late = agent(9.0, request(ids=[7, 8, 9]))
    (found,) = load(tmp_path, session(request(), request(tokens=320), late, request(tokens=64)))
    assert found.cut(300).requests == 1
    assert found.cut(325).requests == 4
    assert found.cut(325, turns=2).requests == 3
    assert not found.cut(325, turns=1).agents


def test_files_of_every_kind_and_a_folder_of_them(tmp_path: Path) -> None:
    text = json.dumps(session(request()))
    (tmp_path / "a.json").write_text(json.dumps(session(request(), id="a"), indent=1))
    (tmp_path / "b.jsonl").write_text(text + "\n\n" + text + "\n")
    with lzma.open(tmp_path / "c.jsonl.xz", "wt") as file:
        file.write(text)
    (tmp_path / "notes.txt").write_text("not a trace")
    assert [found.name for found in read_sessions(tmp_path)] == ["a", "one", "one", "one"]


BAD = [
    ("requests: is missing", {"id": "x", "block_size": 64}),
    ("line: an object is expected, not [1]", [1]),
    ("id: is missing", {}),
    ("id: a text is expected, not 5", session(id=5)),
    ("block_size: a whole number of at least 1 is expected, not 0", session(block_size=0)),
    ("hash_id_scope: local or global is expected, not 'else'", session(hash_id_scope="else")),
    ("requests: a list is expected, not None", session() | {"requests": None}),
    ("requests[0]: an object is expected, not 3", session(3)),
    ("requests[0].type: one of n, s, subagent is expected, not 'x'", session(request(type="x"))),
    ("requests[1].in: a whole number of at least 1 is expected, not 0", session(request(), request(tokens=0))),
    ("requests[0].in: a whole number of at least 1 is expected, not True", session(request() | {"in": True})),
    ("requests[0].out: a whole number of at least 0 is expected, not -1", session(request(out=-1))),
    ("requests[0].t: is missing", session({"type": "n", "in": 5})),
    ("requests[0].t: seconds are expected, not null", session(request() | {"t": None})),
    ("requests[0].t: seconds, not negative, are expected, not -1", session(request(t=-1))),
    ("requests[0].api_time: seconds, not negative, are expected, not 'x'", session(request(api_time="x"))),
    ("requests[0].think_time: seconds, not negative, are expected, not nan", session(request(think_time=float("nan")))),
    ("requests[0].hash_ids: a list is expected, not 'ids'", session(request(hash_ids="ids"))),
    ("requests[0].hash_ids[1]: a whole number, not negative, is expected, not -2", session(request(ids=[1, -2, 3]))),
    ("requests[0].hash_ids: 2 ids do not fit 200 tokens in blocks of 64", session(request(ids=[1, 2]))),
    ("requests[0].hash_ids: 3 ids do not fit 128 tokens in blocks of 64", session(request(tokens=128, ids=[1, 2, 3]))),
    ("requests[0].requests[0].type: one of n, s is expected inside a sub-agent", session(agent(0.0, agent(0.0)))),
    ("requests[0].agent_id: is missing", session({"type": "subagent", "t": 1.0, "requests": []})),
]  # fmt: skip


@pytest.mark.parametrize(("message", "bad"), BAD, ids=[message for message, _ in BAD])
def test_an_error_names_file_line_and_field(tmp_path: Path, message: str, bad: Any) -> None:
    with pytest.raises(TraceError) as error:
        load(tmp_path, session(request()), bad)
    assert str(error.value) == f"{tmp_path}/trace.jsonl:2: {message}"


def test_what_is_no_json_or_damaged_is_named_too(tmp_path: Path) -> None:
    broken = tmp_path / "x.json"
    broken.write_text('{"id":\n "a",\n oops}')
    with pytest.raises(TraceError, match=r"x\.json:3: line: no JSON"):
        list(read_sessions(broken))
    whole = lzma.compress(json.dumps(session(request())).encode())
    cut = tmp_path / "y.jsonl.xz"
    cut.write_bytes(whole[:-20])
    with pytest.raises(TraceError, match=r"y\.jsonl\.xz:1: line: the compressed file is damaged"):
        list(read_sessions(cut))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(TraceError, match="no file here ends in"):
        list(read_sessions(empty))
