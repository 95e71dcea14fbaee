"""The curve of what is reused over the size of the SSD."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.metrics import compare, figures, load, sensitive
from eval.report import ssd_curve
from eval.simulate import __main__ as simulate

GIB = 1 << 30


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Rewriting sessions, at two sizes of the SSD."""
    root = tmp_path_factory.mktemp("curve")
    folders = []
    for size in ("0", "8GiB"):
        folders.append(root / size)
        line = f"--workload rewriting --select first:6 --device 12GiB --cpu 4GiB --ssd {size} --jobs 1 --out {folders[-1]}"
        assert simulate.main([*line.split(), "--systems", "infinite,vllm-disk,histate"]) == 0
    return folders


def test_a_point_for_each_system_and_size_but_the_infinite_cache(runs: list[Path]) -> None:
    points = [point for folder in runs for point in ssd_curve.read(folder)]
    assert [(point.system, point.host_bytes, point.ssd_bytes) for point in points] == [
        (system, 4 * GIB, size) for size in (0, 8 * GIB) for system in ("histate", "vllm-disk")
    ]
    for folder, size in zip(runs, (0, 8 * GIB), strict=True):
        comparison = compare(load([folder]))
        found = figures(comparison, sensitive(comparison))
        for point in points:
            if point.ssd_bytes == size:
                assert point.all_share == found[point.system].all.reusable_share
                part = found[point.system].sensitive
                assert part is not None and point.sensitive_share == part.reusable_share


def test_the_plot_and_the_table_have_every_size(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert ssd_curve.main([*map(str, runs), "--name", "here", "--out", str(tmp_path)]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 4 ")]
    assert [line[1] for line in lines] == ["0", "8"]
    (histate, disk) = (float(lines[1][column].split(" / ")[0]) for column in (2, 3))
    points = {point.system: point.all_share for point in ssd_curve.read(runs[1])}
    assert histate == pytest.approx(100 * (points["histate"] or 0), abs=0.05)
    assert disk == pytest.approx(100 * (points["vllm-disk"] or 0), abs=0.05)
    made = (tmp_path / "here.png").read_bytes()
    assert made.startswith(b"\x89PNG")
    assert ssd_curve.main([*map(str, runs), "--name", "here", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "here.png").read_bytes() == made


def test_folders_that_make_no_point_are_refused(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ssd_curve.main([str(runs[0].parent)]) == 2
    assert "compare runs of equal settings" in capsys.readouterr().err
    text = (runs[0] / "histate.jsonl").read_text()
    (tmp_path / "histate.jsonl").write_text(text.replace("_bytes", "_other"))
    assert ssd_curve.main([str(tmp_path)]) == 2
    assert "tell no size of host and SSD: name folders of eval.simulate" in capsys.readouterr().err
