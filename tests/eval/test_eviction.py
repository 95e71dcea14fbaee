"""The comparison of the rankings: its requests, the simulation's bookkeeping, the table and the command line."""

from __future__ import annotations

import json
import lzma
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.eviction import __main__ as program
from eval.eviction import sweep
from eval.eviction.budgets import DEMO_UNITS, Budgets
from eval.eviction.options import BIG_FILE, SAMPLES, parse
from eval.eviction.requests import PAGE, Request, choose, requests_of, working_set
from eval.eviction.rows import Mode, Row, quantile, table
from eval.eviction.served import arguments
from eval.eviction.simulation import Simulation
from eval.workloads.sessions import Session, Turn
from sglang_histate.policy.prefix_nodes import TIERS, Tier
from sglang_histate.policy.score import Eviction

ENDLESS = Budgets(10**9, 10**6, 10**12, 0, 10**12)
TIGHT = Budgets(40 * PAGE, 6, 90 * PAGE * DEMO_UNITS.kv_token, 0, 10 * DEMO_UNITS.slab, one_device_pool=False)
DEVICE_BYTES = 40 * PAGE * DEMO_UNITS.kv_token + 6 * DEMO_UNITS.checkpoint
MODES = [Mode(Eviction.LRU, 0.0), Mode(Eviction.LRU_REFRESH, 0.0), Mode(Eviction.SCORE, 1.0), Mode(Eviction.SCORE, 100.0)]  # fmt: skip


def sessions(count: int, seed: int) -> list[Session]:
    """Sessions that mostly grow and sometimes go back."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        blocks: tuple[int, ...] = ()
        turns, last = [], 0
        for _ in range(12):
            if draw.random() < 0.2:
                blocks = blocks[: draw.randrange(len(blocks) + 1)]
            grown = draw.randrange(1, 150)
            blocks += tuple(range(last + 1, last + grown + 1))
            last += grown
            blocks = blocks[:600]
            tokens = len(blocks) * 64 + draw.randrange(64)
            turns.append(Turn(tokens, draw.randrange(1, 900), blocks, 0.0, draw.random() * 90, 5.0))
        made.append(Session(f"s{number}", 64, tuple(turns)))
    return made


def requests(count: int = 12, seed: int = 1) -> list[Request]:
    return requests_of(sessions(count, seed), live=5, longest_gap_s=60.0, tokens_per_block=4, most_output=8)


def test_what_an_infinite_cache_would_reuse() -> None:
    first, longer, other = (tuple(range(20)), tuple(range(40)), (*range(18), 99, *range(100, 120)))
    turns = [Turn(len(ids) * 64 + 32, 5, ids, 0.0, 1.0, 1.0) for ids in (first, longer, other)]
    repeated = Turn(32 * 64, 5, longer[:32], 0.0, 1.0, 1.0)
    made = requests_of(
        [Session("s", 64, (*turns, repeated))], live=1, longest_gap_s=9.0, tokens_per_block=4, most_output=8
    )
    assert [len(one.tokens) for one in made] == [82, 162, 158, 128]
    assert [len(one.pages) for one in made] == [1, 2, 2, 2]
    # The third keeps 18 blocks, 72 tokens; the last is known whole, but its last token is computed.
    assert [one.reusable for one in made] == [0, 64, 64, 64]
    assert made[2].pages[0] == made[0].pages[0] and made[2].pages[1] != made[1].pages[1]
    assert working_set(made) == 3 * 64


def test_chosen_sessions_have_turns_left_once_they_are_cut() -> None:
    short = Session("short", 64, sessions(1, 1)[0].turns[:2])
    chosen = choose([short, *sessions(4, 2)], 2, 65536, 5)
    assert [one.name for one in chosen] == ["s0", "s1"] and all(len(one.turns) == 5 for one in chosen)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_nothing_is_computed_twice_where_nothing_is_short(mode: Mode) -> None:
    made = requests()
    simulation = Simulation(ENDLESS, DEMO_UNITS, mode.eviction, mode.tau)
    outcomes = simulation.run(made)
    assert not any(simulation.tiers.evictions.values())
    for request, outcome in zip(made, outcomes, strict=True):
        # A checkpoint lies at every prompt's end and where a prompt left the cached KV: at that place only its
        # first visitor computes again what it shares, as far back as the interval's checkpoints.
        assert outcome.cached + outcome.with_kv == request.reusable
    again = [simulation.serve(request) for request in made]
    assert [one.cached for one in again] == [(len(r.tokens) - 1) // PAGE * PAGE for r in made]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_budgets_hold_and_the_books_are_right(mode: Mode, seed: int) -> None:
    simulation = Simulation(TIGHT, DEMO_UNITS, mode.eviction, mode.tau)
    for request in requests(seed=seed):
        outcome = simulation.serve(request)
        assert 0 <= outcome.cached <= request.reusable and outcome.prompt == len(request.tokens)
        assert_books(simulation)
    peak = simulation.tiers.peak
    assert (peak.device_pages, peak.device_states, peak.host_pages, peak.ssd_states) == (40, 6, 90, 9)
    assert simulation.tiers.evictions["host_bundle"] and simulation.tiers.evictions["ssd_intermediate"]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_one_pool_gives_each_kind_what_the_other_leaves(mode: Mode) -> None:
    budgets = replace(TIGHT, one_device_pool=True)
    simulation = Simulation(budgets, DEMO_UNITS, mode.eviction, mode.tau)
    for request in requests():
        simulation.serve(request)
        used = simulation.tiers.used
        kv = used.device_pages * PAGE * DEMO_UNITS.kv_token
        assert kv + used.device_states * DEMO_UNITS.checkpoint <= DEVICE_BYTES
    assert simulation.tiers.peak.device_pages > 40 or simulation.tiers.peak.device_states > 6


def assert_books(simulation: Simulation) -> None:
    """Count what the tree holds, and compare."""
    tree, used = simulation.tiers.tree, simulation.tiers.used
    pages: list[int] = []
    below = list(tree.children(tree.root))
    while below:
        page = below.pop()
        pages.append(page)
        below += tree.children(page)
    states = [tiers for page in pages for _, tiers in tree.checkpoints(page)]
    assert used.device_pages == sum(tree.has_kv(page, Tier.DEVICE) for page in pages) <= 40
    assert used.host_pages == sum(tree.has_kv(page, Tier.HOST) for page in pages) <= 90
    assert used.device_states == sum(Tier.DEVICE in tiers for tiers in states) <= 6
    assert used.ssd_states == sum(Tier.SSD in tiers for tiers in states) <= 9
    assert all(any(tree.has_kv(page, tier) for tier in TIERS) for page in pages), "nothing without KV"


def test_the_same_requests_give_the_same_result() -> None:
    runs = [Simulation(TIGHT, DEMO_UNITS, Eviction.SCORE, 10.0) for _ in range(2)]
    assert runs[0].run(requests()) == runs[1].run(requests())
    assert runs[0].tiers.evictions == runs[1].tiers.evictions


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit a device of 2560"):
        Simulation(TIGHT, DEMO_UNITS, Eviction.LRU, 0.0).serve(
            Request("s", [0] * 64 * 41, tuple(range(1, 42)), 1, 0)
        )


def test_quantiles_interpolate() -> None:
    assert quantile([4.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_the_table_compares_with_lru() -> None:
    evictions = {
        f"{tier}_{kind}": 7 for tier in ("device", "host", "ssd") for kind in ("intermediate", "bundle")
    }
    rows = [
        Row("lru", 2, 300, 100, 40, 60, 5, evictions, 0.1, 0.2, 9.0),
        Row("score tau=10", 2, 300, 100, 70, 30, 5, evictions),
    ]
    head, first, second = table(rows).splitlines()
    assert head.split()[:4] == ["mode", "requests", "prompt", "cached"]
    assert first.split()[-4:] == ["100", "200", "9", "1.000"]
    assert second.split()[-4:] == ["-", "-", "-", "0.500"] and "7/7" in second


def trace_folder(folder: Path) -> Path:
    """A folder as the program expects it, with small sessions."""
    samples, big = folder / SAMPLES, folder / BIG_FILE.parent
    samples.mkdir(parents=True)
    lines = []
    for number, session in enumerate(sessions(5, 3)):
        value: dict[str, Any] = {"id": f"t{number}", "block_size": 64, "requests": []}
        for turn in session.turns:
            value["requests"].append(
                {"t": 0.0, "type": "n", "in": turn.input_tokens, "out": 9, "hash_ids": list(turn.blocks)}
            )
        lines.append(json.dumps(value))
    (samples / "t0.json").write_text(lines[0])
    with lzma.open(big / BIG_FILE.name, "wt") as file:
        file.write("\n".join(lines))
    return folder


def test_the_dry_run_prints_a_table_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trace_folder(tmp_path / "traces")
    arguments = [
        "--dry",
        "--traces",
        str(folder),
        "--sessions",
        "4",
        "--taus",
        "10,100",
        "--work-dir",
        str(tmp_path),
    ]
    assert program.main([*arguments, "--ssd-states", "8", "--host-kv-tokens", "6144"]) == 0
    printed = capsys.readouterr().out
    assert "60 requests of 5 sessions" in printed and "score tau=100" in printed
    written = json.loads((tmp_path / "dry.json").read_text())
    assert [run["row"]["mode"] for run in written["runs"]] == [
        "score tau=10",
        "score tau=100",
        "lru",
        "lru-refresh",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--modes", "fifo"], "fifo"),
        (["--taus", "-1"], "not negative"),
        (["--tokens-per-block", "5"], "does not divide"),
        (["--device-kv-tokens", "512"], "too small for prompts"),
        (["--sessions", "0"], "positive"),
        (["--inflight-size", "x"], "x"),
        (["--traces", "/nowhere"], "there is no weka_cc/samples in /nowhere: give --traces the folder"),
    ],
)
def test_what_cannot_be_is_refused(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trace_folder(tmp_path)
    with pytest.raises(SystemExit):
        parse(["--traces", str(folder), *given])
    assert message in capsys.readouterr().err


def test_all_modes_get_the_same_flags_but_the_ranking() -> None:
    lines = [arguments(mode, TIGHT, Path("d"), ["--x"]) for mode in MODES]
    for line in lines:
        at = line.index("--histate-eviction")
        del line[at : at + 4]
    assert all(line == lines[0] for line in lines) and lines[0][-1] == "--x"


def test_the_sweep_sums_up_its_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "SKIPS", (0,))
    monkeypatch.setattr(sweep, "LOADS", ((3, 60.0),))
    monkeypatch.setattr(sweep, "SIZES", ((6144, 4), (8192, 8)))
    folder = trace_folder(tmp_path)
    assert sweep.main(["--traces", str(folder), "--taus", "10,100", "--sessions", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == [
        "from session   0,  3 live, gap  60, host 6144, ssd 4",
        "from session   0,  3 live, gap  60, host 8192, ssd 8",
    ]
    assert [line.split(" geometric")[0].strip() for line in lines[2:]] == [
        "lru-refresh", "score tau=10", "score tau=100",
    ]  # fmt: skip
    assert all(line.endswith("of 2") for line in lines[2:])
