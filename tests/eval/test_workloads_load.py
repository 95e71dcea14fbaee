"""The one entry: formats are found out from content, every one of them can be read, what is none is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trace_files import FILES, SHARED, WEKA, weka, weka_request, write

from eval.workloads.chat_tokens import NoTokenizer
from eval.workloads.fields import TraceError
from eval.workloads.load import FORMATS, UnknownFormat, guess, read
from eval.workloads.sessions import Session

needs_traces = pytest.mark.skipif(not SHARED.exists(), reason="no recorded traces beside the repository")
VARIANTS = {"weka:split": "weka", "tracelab:prefix": "tracelab:growth", "mooncake:single": "mooncake"}


@pytest.mark.parametrize("kind", FILES)
def test_the_format_is_found_out_from_the_first_line(tmp_path: Path, kind: str) -> None:
    name, lines = FILES[kind]
    assert guess(write(tmp_path, name, *lines)) == kind


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_sessions_whose_blocks_fit_their_prompts(tmp_path: Path, kind: str) -> None:
    name, lines = FILES[VARIANTS.get(kind, kind)]
    requests = {"weka": 2, "tracelab:csv": len(lines) - 1}.get(VARIANTS.get(kind, kind), len(lines))
    sessions = list(read(write(tmp_path, name, *lines), kind, model="demo"))
    assert sessions and all(isinstance(session, Session) for session in sessions)
    for session in sessions:
        for turn in session.all_turns():
            assert len(turn.blocks) == turn.input_tokens // session.block_tokens
    assert sum(session.requests for session in sessions) == requests


def test_a_folder_and_a_single_json_are_weka(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(WEKA[0], indent=1))
    assert guess(tmp_path) == guess(tmp_path / "a.json") == "weka"
    assert [session.name for session in read(tmp_path)] == ["w"]
    with pytest.raises(TraceError, match="a folder is read as weka only"):
        list(read(tmp_path, "mooncake"))


def test_the_variant_with_threads_splits_them(tmp_path: Path) -> None:
    ids = [[1, 2, 3], [1, 8, 9, 10], [1, 2, 3, 4], [1, 8, 9, 10, 11]]
    file = write(tmp_path, "w.jsonl", weka("w", *(weka_request(5.0 * n, one) for n, one in enumerate(ids))))
    assert [len(session.turns) for session in read(file)] == [4]
    assert [len(session.turns) for session in read(file, "weka:split")] == [2]


@pytest.mark.parametrize("line", ['{"a": 1}', "[1]", '{"conversations": []}'])
def test_what_is_none_of_the_formats_is_named_with_them(tmp_path: Path, line: str) -> None:
    file = write(tmp_path, "x.jsonl", line)
    with pytest.raises(UnknownFormat) as error:
        list(read(file))
    assert str(error.value).startswith(f"{file}:1: this is none of the formats weka, ")


def test_names_of_no_format_empty_files_and_texts_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormat, match="wekka is no format: use one of weka,"):
        list(read(tmp_path, "wekka"))
    with pytest.raises(TraceError, match=r"x\.jsonl:1: line: the file is empty"):
        guess(write(tmp_path, "x.jsonl"))
    with pytest.raises(TraceError, match=r"x\.jsonl:1: line: no JSON"):
        guess(write(tmp_path, "x.jsonl", "hello"))


def test_a_chat_log_needs_a_model(tmp_path: Path) -> None:
    name, lines = FILES["openai"]
    with pytest.raises(NoTokenizer, match=r"needs the model's tokenizer: name its folder, or demo"):
        list(read(write(tmp_path, name, *lines)))


@needs_traces
@pytest.mark.parametrize(
    "file", sorted((SHARED / "handmade_samples").glob("hand*")), ids=lambda file: file.name
)
def test_every_hand_made_sample_of_a_known_form_is_read(file: Path) -> None:
    if "burstgpt" in file.name or "agentic" in file.name:  # no reuse information, and text in another form
        with pytest.raises((UnknownFormat, TraceError)):
            guess(file)
    else:
        assert sum(session.requests for session in read(file)) >= 2


@needs_traces
@pytest.mark.parametrize(
    ("name", "sessions", "requests"),
    [
        ("mooncake_fast25/synthetic_trace.jsonl", None, 3993),
        ("tracelab_examples/sanitized_round_trace.jsonl", 2, 19),
        ("tracelab_examples/replay_multi_session_large.csv", 48, 303),
        ("weka_cc/samples", 4, None),
    ],
)
def test_recorded_files_give_what_their_readmes_say(
    name: str, sessions: int | None, requests: int | None
) -> None:
    found = list(read(SHARED / name))
    assert sessions in (None, len(found))
    assert requests in (None, sum(session.requests for session in found))
