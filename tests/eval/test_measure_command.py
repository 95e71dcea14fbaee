"""The command: the answer in words, the tables, the figures as JSON, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trace_files import CHAT, FILES, weka, weka_request, write

from eval.measure.__main__ import main
from eval.measure.answer import answer, tables
from eval.measure.findings import LANDING_EDGES, findings, prefill_s
from eval.measure.model import sizes_of
from eval.measure.placements import Placement, outcomes
from eval.simulate.budgets import Budgets
from eval.simulate.costs import Costs
from eval.workloads.rewriting import Rewriting, rewriting_sessions
from eval.workloads.sessions import Session, Turn
from sglang_histate.policy.interval import parse_interval

COSTS = Costs()
LONG = list(range(1, 1001))
CUT = [*range(1, 601), *range(2000, 2100)]


def measured(sessions: list[Session], costs: Costs = COSTS):
    return findings(outcomes(sessions, parse_interval("adaptive"), costs.state_tokens), costs)


def flat(text: str) -> str:
    """The text without its line breaks."""
    return " ".join(text.split())


def one_session(*prompts: list[int]) -> list[Session]:
    turns = tuple(
        Turn(64 * len(ids) + 10, 1, tuple(ids), float(n), 0.0, 0.0) for n, ids in enumerate(prompts)
    )
    return [Session("s", 64, turns)]


def test_the_answer_is_the_sum_of_the_requests() -> None:
    sessions = rewriting_sessions(Rewriting(0.1, seed=2))
    each = list(outcomes(sessions, parse_interval("adaptive"), COSTS.state_tokens))
    found = measured(sessions)
    assert (found.requests, found.sessions) == (384, 24)
    assert found.internal == sum(one.internal for one in each)
    for way in Placement:
        row = found.row(way)
        assert row.computed == sum(one.computed(way) for one in each)
        assert row.hit == pytest.approx(1 - row.computed / found.prompt_tokens)
        assert row.prefill_s == pytest.approx(sum(prefill_s(one, way, COSTS) for one in each))
        assert row.checkpoint_bytes == row.checkpoints * COSTS.state_bytes
    assert sum(one.requests for one in found.landings) == found.internal
    assert sum(one.again for one in found.landings) == found.internal_again
    saved = sum(one.saved_s for one in found.landings)
    assert saved == pytest.approx(found.saved_s(Placement.TURN_ENDS), rel=0.02) and saved > 0
    pages = {
        ids
        for session in sessions
        for turn in session.turns
        for ids in ((session.name, b) for b in turn.blocks)
    }
    assert found.kv_bytes == len(pages) * 64 * COSTS.kv_token_bytes


def test_seconds_are_computing_and_reading() -> None:
    _, second = outcomes(one_session(LONG, CUT), parse_interval("adaptive"), COSTS.state_tokens)
    nothing = prefill_s(second, Placement.TURN_ENDS, COSTS)
    assert nothing == pytest.approx(COSTS.prefill_s(second.prompt, 0))
    at = second.restored[Placement.HISTATE]
    assert 0 < at < second.match
    reading = at * COSTS.kv_token_bytes / 55e9 + COSTS.state_bytes * (1 / 55e9 + 1 / 5e9) + 0.0001
    assert prefill_s(second, Placement.HISTATE, COSTS) == pytest.approx(
        COSTS.prefill_s(second.prompt - at, at) + reading
    )


def test_the_ssd_is_paid_for_where_hi_state_has_only_it() -> None:
    """Its newest end is on the host; an earlier turn's end is historical. Stock placements keep theirs on the host."""
    grow, back = LONG[:500], [*LONG[:300], 7777]
    goes_on, returns = list(
        outcomes(one_session(LONG[:300], grow, back), parse_interval("none"), COSTS.state_tokens)
    )[1:]
    ssd = COSTS.state_bytes / COSTS.ssd_read_bytes_s + COSTS.ssd_latency_s
    for one, pays in ((goes_on, 0.0), (returns, ssd)):
        assert set(one.restored.values()) == {300 * 64}
        stock = prefill_s(one, Placement.TURN_ENDS, COSTS)
        assert prefill_s(one, Placement.BRANCH_POINTS, COSTS) == stock
        assert prefill_s(one, Placement.EVERY_PAGE, COSTS) == stock
        assert prefill_s(one, Placement.HISTATE, COSTS) - stock == pytest.approx(pays)


def test_it_is_said_whose_seconds_these_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*more: str) -> str:
        assert main([str(trace(tmp_path)), *more]) == 0
        return flat(capsys.readouterr().out)

    assert "Qwen3.5-9B on one H100. That" in said()
    assert "on one H100 with pcie_bytes_s 1e+09. That" in said("--cost", "pcie_bytes_s=1e9")
    config = {
        "num_hidden_layers": 8, "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ("--model", str(tmp_path))
    assert "its computing counts as that of the 9B model" in said(*model)
    sizes = sizes_of(tmp_path)
    assert f"--cost kv_token_bytes={sizes['kv_token_bytes']} --cost state_bytes=" in said(*model)
    own = said(*model, "--cost", "linear_flop=1e9", "--cost", "pair_flop=1e3")
    assert "of the 9B model" not in own and "checkpoints are your model's." in own


def test_a_log_that_only_appends_is_left_alone() -> None:
    found = measured(one_session(LONG[:10], LONG[:40], LONG))
    said = answer(found, Budgets(), "SIMULATE")
    assert said.startswith("0 of 3 requests (0.0 %) match KV at a point that is no turn's end.\n")
    assert "That is little: leave things alone." in said and "SIMULATE" not in said
    assert "land" not in tables(found)
    small = flat(answer(found, Budgets(1, 0, 0), "SIMULATE"))
    assert (
        "leave things alone" in small and "what is kept decides more" in small and small.endswith("SIMULATE")
    )


def test_a_log_that_rewrites_inside_turns_is_worth_a_try() -> None:
    found = measured(one_session(LONG, CUT))
    said = flat(answer(found, Budgets(), "SIMULATE"))
    assert said.startswith("1 of 2 requests (50.0 %) match KV at a point that is no turn's end.")
    assert "38,400 tokens of them are computed again" in said
    assert "That is worth a try." in said and "nothing has to go" in said
    shown = tables(found)
    assert "Past the turn end before them they land 38,400 tokens (p10)" in shown
    by = {one.upto: one.requests for one in found.landings}
    assert by == {**dict.fromkeys(LANDING_EDGES, 0), None: 1}


def test_a_changed_last_page_is_named_as_such() -> None:
    found = measured(one_session(LONG[:100], [*LONG[:99], 5000, 5001]))
    assert found.landings[0].requests == 1
    assert "1 of them part in the last 64 tokens of a turn" in flat(answer(found, Budgets(), ""))


def test_a_slower_machine_has_more_to_save() -> None:
    sessions = one_session(LONG, CUT)
    fast, slow = measured(sessions), measured(sessions, Costs(peak_flop_s=100e12))
    assert slow.saved_s(Placement.TURN_ENDS) > 3 * fast.saved_s(Placement.TURN_ENDS)


def trace(folder: Path) -> Path:
    requests = [weka_request(float(n), ids) for n, ids in enumerate((LONG, CUT))]
    return write(folder, "w.jsonl", weka("one", *requests), weka("two", *requests))


def test_the_command_prints_the_answer_first_and_writes_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = trace(tmp_path), tmp_path / "new" / "figures.json"
    assert main([str(file), "--json", str(out), "--ssd", "1GiB", "--device", "1GiB", "--cpu", "1GiB"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 of 4 requests (50.0 %)")
    assert f"python -m eval.simulate --workload {file} --format weka --device 1073741824" in said
    figures = json.loads(out.read_text())
    assert (figures["format"], figures["requests"], figures["internal"]) == ("weka", 4, 2)
    assert figures["budgets"]["ssd_bytes"] == 1 << 30 and figures["rows"][2]["placement"] == "HiState"


def test_the_simulator_accepts_the_command_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eval.simulate.options import parse

    main(
        [
            *(str(trace(tmp_path)), "--cpu", "1GiB", "--ssd", "0", "--select", "first:1"),
            *("--shared-prefix", "640", "--cost", "efficiency=0.1", "--cost", "state_bytes=77000"),
        ]
    )
    words = capsys.readouterr().out.split("python -m eval.simulate ")[1].split("\n")[0].split()
    given = parse(words)
    assert given.workload.selection == "first:1" and given.workload.shared_prefix == 640
    assert given.setting.budgets.host_bytes == 1 << 30
    assert given.setting.costs == Costs(efficiency=0.1, state_bytes=77_000)


def test_a_log_of_messages_is_saved_without_its_text_and_measures_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [["x" * 900], ["x" * 900, "ok", "more " * 40], ["x" * 500, "other " * 50]]
    lines = [
        {"ts": n, "session_id": who, "messages": [{"role": "user", "content": text} for text in texts]}
        for n, texts in enumerate(turns)
        for who in "ab"
    ]
    file, kept = write(tmp_path, "o.jsonl", *lines), tmp_path / "kept.jsonl.xz"
    out = [tmp_path / "1.json", tmp_path / "2.json"]
    assert (
        main(
            [
                str(file),
                "--model",
                "demo",
                "--json",
                str(out[0]),
                "--cpu",
                "1MiB",
                "--ssd",
                "0",
                "--device",
                "1MiB",
            ]
        )
        == 0
    )
    assert "--workload FILE.jsonl" in capsys.readouterr().out
    assert main([str(file), "--model", "demo", "--save-trace", str(kept), "--json", str(out[0])]) == 0
    assert main([str(kept), "--json", str(out[1])]) == 0
    first, second = (json.loads(one.read_text()) for one in out)
    assert second["format"] == "weka" and first["internal"] > 0
    assert all(
        first[name] == second[name] for name in ("requests", "prompt_tokens", "matched_tokens", "rows")
    )
    assert main([str(file), "--model", "demo", "--save-trace", str(tmp_path / "x.txt")]) == 2


def test_a_selection_and_a_shared_prefix_change_what_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.json"

    def figures(*more: str) -> dict[str, Any]:
        assert main([str(trace(tmp_path)), "--json", str(out), *more]) == 0
        return json.loads(out.read_text())

    plain, one, shared = figures(), figures("--select", "only:one"), figures("--shared-prefix", "6400")
    assert (one["sessions"], one["requests"]) == (1, 2)
    assert shared["matched_tokens"] == plain["matched_tokens"] + 6400
    assert figures("--interval", "none")["rows"][2]["computed"] > plain["rows"][2]["computed"]
    assert figures("--cost", "ssd_read_bytes_s=1e6")["rows"][2]["prefill_s"] > plain["rows"][2]["prefill_s"]


@pytest.mark.parametrize("kind", FILES)
def test_all_formats_are_measured(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, lines = FILES[kind]
    assert main([str(write(tmp_path, name, *lines)), "--model", "demo"]) == 0
    said = flat(capsys.readouterr().out)
    assert "match KV at a point that is no turn's end" in said
    assert ("one token a byte" in said) == (kind == "openai")


def test_what_is_wrong_is_said_and_ends_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = write(tmp_path, "x.jsonl", weka("one", weka_request(0.0, LONG) | {"in": 5}))
    empty = write(tmp_path, "e.jsonl", weka("one"))
    chat = write(tmp_path, "o.jsonl", *CHAT)
    cases = {
        (str(bad),): f"eval.measure: {bad}:1: requests[0].hash_ids: 1000 ids do not fit 5 tokens",
        (str(tmp_path / "none.jsonl"),): "eval.measure: [Errno 2] No such file",
        (str(chat),): "a log of messages needs the model's tokenizer",
        (str(bad), "--select", "x"): "eval.measure: x selects nothing",
    }
    for arguments, message in cases.items():
        assert main(list(arguments)) == 2
        assert message in capsys.readouterr().err
    assert main([str(empty)]) == 1
    assert "no request in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cost", "speed=1"], "speed is no constant of the cost model"),
        (["--cost", "state_bytes=x"], "state_bytes=x: 'x' is no number"),
        (["--cost", "efficiency=0"], "efficiency 0.0 must be above 0"),
        (["--device", "12"], None),
        (["--interval", "often"], "often"),
        (["--format", "wekka"], "invalid choice: 'wekka'"),
    ],
)  # fmt: skip
def test_wrong_flags_are_named(
    tmp_path: Path, flags: list[str], message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(trace(tmp_path)), *flags]
    if message is None:
        assert main(arguments) == 0
        return
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_models_config_gives_the_sizes(tmp_path: Path) -> None:
    """Qwen3.5-9B: 32 layers, every fourth with full attention; the figures are the cost model's own."""
    config = {
        "num_hidden_layers": 32, "full_attention_interval": 4, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    assert sizes_of(tmp_path) == {}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    expected = {"kv_token_bytes": COSTS.kv_token_bytes, "state_bytes": COSTS.state_bytes}
    assert sizes_of(tmp_path) == expected
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 30})
    )
    assert sizes_of(tmp_path)["kv_token_bytes"] == COSTS.kv_token_bytes // 4
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    assert sizes_of(tmp_path) == {}


def test_the_help_lists_the_formats() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eval.measure", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "tracelab:growth" in done.stdout and "Exit code: 0" in done.stdout
