"""``python -m eval.simulate``: same bytes, errors that name the flag, records that the report reads."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from eval.metrics import compare, load
from eval.simulate.__main__ import main
from eval.simulate.inputs import BadInput, Workload
from eval.simulate.options import parse
from eval.simulate.systems import SYSTEMS
from eval.workloads.rewriting import SHARES


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Recorded sessions in the form of the Weka traces."""
    draw = random.Random(3)
    file = tmp_path / "trace.jsonl"
    with file.open("w") as lines:
        for number in range(6):
            ids: list[int] = []
            requests = []
            for turn in range(5):
                ids = ids[: len(ids) - draw.choice([0, 0, 1, 20])] if ids else ids
                ids += range(1000 * turn, 1000 * turn + draw.randrange(5, 120))
                requests.append(
                    {
                        "t": 10.0 * turn, "type": "n", "model": "m", "in": 64 * len(ids) + 7, "out": 90,
                        "hash_ids": list(ids), "api_time": 2.0, "think_time": 8.0,
                    }
                )  # fmt: skip
            record = {"id": f"s{number}", "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
            lines.write(json.dumps({**record, "requests": requests}) + "\n")
    return file


def run(trace: Path, out: Path, *more: str) -> int:
    return main(["--workload", str(trace), "--out", str(out), "--live", "3", *more])


def test_every_system_leaves_records_that_compare_and_a_table(trace: Path, tmp_path: Path, capsys) -> None:
    assert run(trace, tmp_path / "a", "--jobs", "2") == 0
    comparison = compare(load([tmp_path / "a"]))
    assert set(comparison.systems) == set(SYSTEMS) and len(comparison.keys) == 30
    assert "30 requests of 6 sessions" in capsys.readouterr().out
    for runs in comparison.systems.values():
        facts = runs[0].facts
        assert facts.source == "simulation" and facts.facts["host_bytes"] == 96 << 30
        assert facts.facts["costs"]["efficiency"] == 0.55 and facts.facts["ssd_written_bytes"] >= 0


def test_same_command_same_bytes(trace: Path, tmp_path: Path) -> None:
    names = "histate,hicache,marconi"
    for jobs in ("1", "2"):
        assert run(trace, tmp_path / "out", "--systems", names, "--half", "--jobs", jobs) == 0
        for name in names.split(","):
            (tmp_path / "out" / f"{name}.jsonl").rename(tmp_path / f"{name}.{jobs}")
    for name in names.split(","):
        first, second = ((tmp_path / f"{name}.{jobs}").read_text().split("\n") for jobs in "12")
        assert first[1:] == second[1:] and len(first) == 32
        assert json.loads(first[0]).pop("facts") == json.loads(second[0]).pop("facts")


def test_half_halves_every_budget_and_costs_can_be_changed() -> None:
    changes = ["--cost", "efficiency=0.45", "--cost", "state_bytes=26345472"]
    options = parse(["--workload", "codex", "--out", "x", "--half", "--cpu", "10GiB", *changes])
    budgets, costs = options.setting.budgets, options.setting.costs
    assert (
        budgets.device_bytes == 45 << 29 and budgets.host_bytes == 5 << 30 and budgets.ssd_bytes == 75 << 30
    )
    assert costs.efficiency == 0.45 and costs.state_bytes == 26_345_472
    assert options.systems == tuple(SYSTEMS) and options.setting.live == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workload codex --out x --systems histate,magic", "--systems: magic is none of none, marconi"),
        ("--workload codex --out x --cap -1", "--cap: -1 is no time in seconds"),
        (
            "--workload codex --out x --cost speed=1",
            "speed is no constant of the cost model: they are kv_token",
        ),
        ("--workload codex --out x --cost efficiency=fast", "'fast' is no number"),
        ("--workload codex --out x --cost efficiency=0", "efficiency 0.0 must be above 0"),
        ("--workload codex --out x --device 45GB", "--device: '45GB' is not a size"),
        ("--workload rewriting --out x --share 99", "share 0.99 is not between 0 and 0.9375"),
        ("--workload rewriting --out x --share 150", "--share: 150 is no share in percent"),
    ],
)
def test_a_wrong_flag_is_named(arguments: str, message: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_what_is_no_workload_ends_with_2(tmp_path: Path, capsys) -> None:
    assert main(["--workload", "nothing", "--out", str(tmp_path / "o")]) == 2
    assert "there is no nothing: give a file, one of w125, rewriting, codex" in capsys.readouterr().err


def test_a_request_that_does_not_fit_ends_with_2_and_the_others_go_on(
    trace: Path, tmp_path: Path, capsys
) -> None:
    assert run(trace, tmp_path / "a", "--device", "100MiB", "--systems", "vllm-cpu,infinite") == 2
    caught = capsys.readouterr()
    assert "vllm-cpu: session s" in caught.err and "give it more (--device)" in caught.err
    assert "infinite: 30 requests" in caught.out


def test_names_of_workloads_tell_what_differs() -> None:
    names = {Workload("rewriting", share=share).name for share in SHARES}
    assert len(names) == 4 and Workload("w125").name == "w125"
    assert Workload("dir/f.jsonl", format="weka", selection="first:3").name == "f.jsonl as weka (first:3)"
    with pytest.raises(BadInput, match="there is no"):
        Workload("w125", traces=Path("nowhere")).sessions()
    with pytest.raises(BadInput, match="no request is left after --select only:x"):
        Workload("rewriting", selection="only:x").sessions()


def test_a_shared_prefix_is_shared() -> None:
    sessions = Workload("rewriting", share=0.0, shared_prefix=6400).sessions()
    assert {one.turns[0].blocks[:100] for one in sessions} == {sessions[0].turns[0].blocks[:100]}
