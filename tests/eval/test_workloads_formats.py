"""The loaders of traces with lengths and block ids: what each makes of its schema, and every error with its place."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import AIPERF, BAILIAN, CSV, MOONCAKE, TOKENS, TRACELAB, tracelab_round, write

from eval.workloads import aiperf, bailian, mooncake, token_trace, tracelab, tracelab_csv
from eval.workloads.fields import TraceError
from eval.workloads.minted import minted
from eval.workloads.sessions import Session, common
from eval.workloads.tracelab import Reading


def lengths(session: Session) -> list[tuple[int, int]]:
    return [(turn.input_tokens, len(turn.blocks)) for turn in session.turns]


def test_mooncake_leaves_out_short_blocks_and_finds_sessions(tmp_path: Path) -> None:
    first, second = mooncake.read_sessions(write(tmp_path, "m.jsonl", *MOONCAKE))
    assert first.block_tokens == 512 and first.shared_ids
    assert [turn.blocks for turn in first.turns] == [(0, 1), (0, 1, 3)]
    assert [turn.gap_s for turn in first.turns] == [0.0, 0.105]
    assert second.turns[0].blocks == (8, 9) and second.start_s == 3.274


def test_mooncake_requests_may_stay_alone_at_their_times(tmp_path: Path) -> None:
    found = mooncake.read_sessions(write(tmp_path, "m.jsonl", *MOONCAKE), chain=False)
    assert [(session.requests, session.start_s) for session in found] == [(1, 0.0), (1, 0.105), (1, 3.274)]


def test_bailian_chats_go_on_from_their_parents(tmp_path: Path) -> None:
    found = bailian.read_sessions(write(tmp_path, "b.jsonl", *BAILIAN))
    assert [session.name for session in found] == ["chat-1", "chat-3", "chat-6"]
    assert [turn.blocks for turn in found[0].turns] == [(0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6), (0,)]
    assert [turn.gap_s for turn in found[0].turns] == [0.0, 9.5, 10.5]
    assert found[1].turns[0].blocks == (0, 1, 7)  # 50 tokens: the fourth block is not full
    assert [session.start_s for session in found] == [0.0, 10.0, 30.0]


def test_aiperf_turns_add_to_what_was_said(tmp_path: Path) -> None:
    first, second = aiperf.read_sessions(write(tmp_path, "a.jsonl", *AIPERF), 64)
    assert lengths(first) == [(1536, 24), (1536 + 320 + 768, 41)]
    assert common(first.turns[0].blocks, first.turns[1].blocks) == 24
    assert (first.turns[1].gap_s, second.start_s) == (2.45, 0.5)
    # Block 0 of 512 tokens is the same text in both sessions, what follows is not.
    assert common(first.turns[0].blocks, second.turns[0].blocks) == 512 // 64


def test_aiperf_blocks_are_equal_only_if_they_are_cut_alike(tmp_path: Path) -> None:
    lines: list[Any] = []
    for name, output in (("a", 64), ("b", 64), ("c", 10)):
        lines.append({"session_id": name, "input_length": 512, "output_length": output, "hash_ids": [1]})
        lines.append({"session_id": name, "input_length": 512, "output_length": 1, "hash_ids": [2]})
    a, b, c = aiperf.read_sessions(write(tmp_path, "a.jsonl", *lines), 64)
    later = [session.turns[1].blocks[9:] for session in (a, b, c)]
    assert later[0] == later[1] and not set(later[0]) & set(
        later[2]
    )  # answers of 64 keep the grid, of 10 shift it
    assert a.turns[1].blocks[8] != b.turns[1].blocks[8]  # their answers differ


def test_token_traces_keep_their_tokens(tmp_path: Path) -> None:
    trace = token_trace.read_trace(write(tmp_path, "k.jsonl", *TOKENS))
    first, second = trace.sessions
    assert lengths(first) == [(130, 2), (230, 3)] and first.turns[1].gap_s == 1.5
    assert [turn.output_tokens for turn in first.turns] == [4, 3]
    assert trace.tokens.prompt(first, 0) == TOKENS[0]["input_tokens"]
    assert trace.tokens.prompt(first, 1) == TOKENS[1]["input_tokens"]
    assert trace.tokens.prompt(second, 0) == TOKENS[2]["input_tokens"]


def test_equal_blocks_of_tokens_have_equal_ids(tmp_path: Path) -> None:
    a, b = list(range(64)), list(range(64, 128))
    lines = [{"input_tokens": tokens, "num_output_tokens": 1} for tokens in (a + b, b + a, a + a)]
    found = [
        turn for s in token_trace.read_trace(write(tmp_path, "k.jsonl", *lines)).sessions for turn in s.turns
    ]
    assert sorted(turn.blocks for turn in found) == [(0, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize(
    ("reading", "kept"), [(Reading.GROWTH, [100, 1280 // 64]), (Reading.PREFIX, [1280 // 64, 1280 // 64])]
)
def test_tracelab_is_read_in_two_ways(tmp_path: Path, reading: Reading, kept: list[int]) -> None:
    (found,) = tracelab.read_sessions(write(tmp_path, "t.jsonl", *TRACELAB), reading)
    first, second, third = found.turns
    assert lengths(found) == [(6400, 100), (7040, 110), (3200, 50)]
    assert [common(first.blocks, second.blocks), common(second.blocks, third.blocks)] == kept
    assert not found.shared_ids and found.block_tokens == 64


def test_tracelab_times_are_those_of_submission_and_answer(tmp_path: Path) -> None:
    other = tracelab_round(0, "00:01:00", 64, 0, session="codex:0", answered="00:01:01")
    first, second = tracelab.read_sessions(write(tmp_path, "t.jsonl", other, *TRACELAB))
    assert (first.name, first.start_s, second.name, second.start_s) == ("codex:1", 0.0, "codex:0", 59.0)
    assert [turn.start_s for turn in first.turns] == [0.0, 8.0, 29.0]
    assert [turn.service_s for turn in first.turns] == [4.0, 3.5, 1.0]
    assert [turn.gap_s for turn in first.turns] == [0.0, 4.0, 17.5]


def test_tracelab_may_be_compressed(tmp_path: Path) -> None:
    plain = write(tmp_path, "t.jsonl", *TRACELAB)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert tracelab.read_sessions(packed) == tracelab.read_sessions(plain)
    packed.write_bytes(gzip.compress(plain.read_bytes())[:-12])
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz:\d: line: the compressed file is damaged"):
        tracelab.read_sessions(packed)


def test_the_replay_table_is_ordered_by_round(tmp_path: Path) -> None:
    first, second = tracelab_csv.read_sessions(write(tmp_path, "t.csv", *CSV))
    assert lengths(first) == [(640, 10), (768, 12), (320, 5)]
    assert common(first.turns[0].blocks, first.turns[1].blocks) == 10
    assert common(first.turns[1].blocks, first.turns[2].blocks) == 2
    assert [turn.gap_s for turn in first.turns] == [0.0, 0.1, 2.5]
    assert (first.start_s, second.name, second.start_s) == (0.5, "8", 0.9)


@given(
    prompts=st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 2500)), max_size=20),
    block=st.sampled_from([16, 64, 512]),
)
@settings(max_examples=200)
def test_minted_prompts_share_what_they_keep_and_no_more(prompts: list[tuple[int, int]], block: int) -> None:
    found = minted(prompts, block)
    seen: set[int] = set()
    before: tuple[int, ...] = ()
    for (length, kept), ids in zip(prompts, found, strict=True):
        assert len(ids) == length // block
        shared = common(before, ids)
        assert shared == min(len(before), len(ids), kept // block)
        assert not set(ids[shared:]) & seen
        seen |= set(ids)
        before = ids


LOADERS: dict[str, Any] = {
    "mooncake": mooncake.read_sessions,
    "bailian": bailian.read_sessions,
    "aiperf": aiperf.read_sessions,
    "tokens": token_trace.read_trace,
    "tracelab": tracelab.read_sessions,
}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("mooncake", MOONCAKE[0] | {"input_length": 0}, "input_length: a whole number of at least 1 is expected, not 0"),
    ("mooncake", MOONCAKE[0] | {"timestamp": -1}, "timestamp: seconds, not negative, are expected, not -1"),
    ("mooncake", MOONCAKE[0] | {"hash_ids": [0]}, "hash_ids: 1 ids do not fit 1200 tokens in blocks of 512"),
    ("bailian", BAILIAN[0], "chat_id: 1 is an earlier line's too"),
    ("bailian", BAILIAN[1] | {"parent_chat_id": -2}, "parent_chat_id: a whole number of at least -1 is expected, not -2"),
    ("aiperf", AIPERF[0] | {"hash_ids": [0]}, "hash_ids: 1 ids do not fit 1536 tokens in blocks of 512"),
    ("aiperf", AIPERF[0] | {"hash_ids": [0, "x", 1]}, "hash_ids[1]: a whole number is expected, not 'x'"),
    ("aiperf", {"session_id": "s1", "messages": []}, "messages: turns given as text are not read: use lengths and hash_ids"),
    ("aiperf", AIPERF[1] | {"is_restart": True},
     "is_restart: a restart within a session is not read: what it keeps is open"),
    ("tokens", TOKENS[0] | {"input_tokens": []}, "input_tokens: an empty prompt is none"),
    ("tokens", TOKENS[0] | {"input_tokens": [1, -1]}, "input_tokens[1]: a token id is expected, not -1"),
    ("tokens", TOKENS[0] | {"num_input_tokens": 5}, "num_input_tokens: 5 where input_tokens has 130"),
    ("tokens", {"input_tokens": [1]}, "num_output_tokens: is missing"),
    ("tracelab", TRACELAB[0] | {"prefix_tokens": 6401}, "prefix_tokens: 6401 of 6400 input tokens"),
    ("tracelab", TRACELAB[0] | {"timing_events": [{"event_type": "text", "timestamp": "noon"}]},
     "timing_events[0].timestamp: an ISO 8601 time is expected, not 'noon'"),
    ("tracelab", TRACELAB[0] | {"session_id": None}, "session_id: a text is expected, not None"),
]  # fmt: skip
_FIRST = {"mooncake": MOONCAKE, "bailian": BAILIAN, "aiperf": AIPERF, "tokens": TOKENS, "tracelab": TRACELAB}


@pytest.mark.parametrize(("kind", "bad", "message"), BAD, ids=[f"{kind}-{text}" for kind, _, text in BAD])
def test_an_error_names_file_line_and_field(
    tmp_path: Path, kind: str, bad: dict[str, Any], message: str
) -> None:
    file = write(tmp_path, "x.jsonl", _FIRST[kind][0], bad)
    with pytest.raises(TraceError) as error:
        LOADERS[kind](file)
    assert str(error.value) == f"{file}:2: {message}"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "1: line: the file is empty"),
        (["id,round_idx,prefix_len"], "1: input_len: there is no such column"),
        ([CSV[0].replace("session_id", "name")], "1: session_id: there is no such column"),
        ([CSV[0], "1,2"], "2: line: 2 cells where the header has 7"),
        ([CSV[0], CSV[1].replace("640", "many")], "2: input_len: a whole number, not negative, is expected, not 'many'"),
        ([CSV[0], CSV[1].replace("640", "0")], "2: input_len: an empty prompt is none"),
    ],
)  # fmt: skip
def test_an_error_in_the_table_names_the_column(tmp_path: Path, lines: list[str], message: str) -> None:
    file = write(tmp_path, "t.csv", *lines)
    with pytest.raises(TraceError) as error:
        tracelab_csv.read_sessions(file)
    assert str(error.value) == f"{file}:{message}"
