"""Rewriting requests over several seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.metrics import compare, load
from eval.report import seeds
from eval.simulate import __main__ as simulate


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("seeds")
    folders = []
    for share in ("5", "10"):
        for seed in ("0", "1"):
            folders.append(root / f"{share}-{seed}")
            line = f"--workload rewriting --share {share} --seed {seed} --select first:8 --jobs 1 --out {folders[-1]}"
            assert simulate.main([*line.split(), "--systems", "infinite,histate,vllm-disk"]) == 0
    return folders


def test_seeds_of_one_share_are_one_row(runs: list[Path]) -> None:
    rows = seeds.pooled([compare(load([folder])) for folder in runs], "vllm-disk")
    assert len(rows) == 2 and all(list(row) == ["infinite", "histate", "vllm-disk"] for row in rows.values())
    for row, folders in zip(rows.values(), (runs[:2], runs[2:]), strict=True):
        records = [
            record
            for folder in folders
            for run in compare(load([folder])).systems["histate"]
            for record in run.records
            if record.rewrite
        ]
        ours, base = row["histate"], row["vllm-disk"]
        assert ours.requests == len(records) > 0
        assert ours.mean_s == pytest.approx(sum(record.ttft_s for record in records) / len(records))
        assert ours.change == pytest.approx(ours.mean_s / base.mean_s - 1)
        assert ours.low <= ours.change <= ours.high
        assert (base.change, base.low, base.high) == (0, 0, 0)
        assert row["infinite"].reusable_share == 1 >= ours.reusable_share > 0


def test_the_table_says_how_many_and_against_what(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert seeds.main([*map(str, runs), "--baseline", "vllm-disk"]) == 0
    said = capsys.readouterr().out
    assert said.count("rewriting requests") == 2 and said.count("against vllm-disk") == 2


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda runs: [str(runs[0]), "--baseline", "marconi"], "no run of marconi"),
        (lambda runs: [str(runs[0]), str(runs[0])], "given twice"),
        (lambda runs: [str(runs[0].parent)], "compare runs of one workload"),
    ],
)
def test_what_makes_no_table(runs: list[Path], change, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert seeds.main(change(runs)) == 2
    assert word in capsys.readouterr().err
