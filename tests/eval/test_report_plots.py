"""The plots: their data, and that each is written for every kind of run."""

from __future__ import annotations

import os
import struct
import zlib

import numpy as np
import pytest
from fake_runs import random_run, request, run, tiny

pytest.importorskip("matplotlib")
from eval.metrics import compare, sensitive
from eval.metrics.runs import ORDER
from eval.records import RecordsError
from eval.report import cost_plots, interval_plot, landing, style, tiers, ttft
from eval.report.plots import write_all
from eval.simulate.costs import Costs


def test_where_hits_land() -> None:
    runs = [
        run(
            "histate",
            request(turn=0, prompt=1000, output=24, kv=0),
            request(turn=1, prompt=2000, output=10, device=896, kv=960, reusable=1024),
            request(turn=2, prompt=3000, device=1000, kv=5000, reusable=2000),
            request(turn=4, prompt=3000, kv=None, reusable=100),
            request("s2", turn=1, prompt=500, kv=300, host=300, error="gone"),
        )
    ]
    assert landing.checkpoint_distances(runs) == [64, 4000]
    # 1,000 + 24 - 960; the next match goes past the turn's end; turn 4 has no turn 3 before it
    assert landing.turn_end_distances(runs) == [64, 0]
    assert landing.turn_end_distances(runs, reusable=True) == [0, 10]


def test_classes_of_distance() -> None:
    found = dict(zip(landing.LABELS, landing.shares([0, 0, 1, 64, 65, 131072, 131073, 10**9]), strict=True))
    assert {label: share for label, share in found.items() if share} == {
        "0": 0.25, "≤64": 0.25, "≤128": 0.125, "≤128K": 0.125, ">128K": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_windows_add_up_to_the_whole(seed) -> None:
    runs = [random_run("histate", seed)]
    last = max(record.sent_s for record in runs[0].records)
    shares, bound = tiers.windows(runs, last)
    prompt = np.zeros(tiers.WINDOWS)
    for record in runs[0].records:
        prompt[min(int(record.sent_s / (last / tiers.WINDOWS)), tiers.WINDOWS - 1)] += record.prompt_tokens
    for row, tier in zip(shares, ("device", "host", "ssd"), strict=True):
        assert np.nansum(row * prompt) == pytest.approx(sum(r.restored[tier] for r in runs[0].records))
    assert np.nansum(bound * prompt) == pytest.approx(sum(r.reusable for r in runs[0].records))


def test_windows_of_a_run_of_no_length() -> None:
    shares, bound = tiers.windows([run("histate", request(device=500, reusable=600))], 0.0)
    assert (shares[0, 0], bound[0]) == (0.5, 0.6) and np.isnan(bound[1:]).all()


def test_intervals_of_repeats_are_added() -> None:
    one = run("histate", intervals={"1024": 3, "none": 1, "512": 0})
    other = run("histate", intervals={1024: 2, 0: 4, "256": 1})
    assert interval_plot.counts((one, other)) == {"1024": 5, "none": 5, "256": 1}
    assert interval_plot.counts((run("histate"),)) == {}
    with pytest.raises(RecordsError, match=r"histate\.jsonl: facts\.intervals: 'wide'"):
        interval_plot.counts((run("histate", intervals={"wide": 1}),))
    made = interval_plot.plot(compare([one, run("vllm-disk")]))
    assert [label.get_text() for label in made.axes[0].get_xticklabels()] == ["1,024", "none"]
    assert interval_plot.plot(compare([run("histate")])) is None


def test_the_papers_arithmetic_is_what_is_drawn() -> None:
    left, right = cost_plots.access(Costs()).axes
    ratios = dict(zip(*left.lines[0].get_data(), strict=True))
    assert (ratios[1024], ratios[4096], ratios[32768]) == (3.125, 12.5, 100)
    sizes = dict(zip(*right.lines[0].get_data(), strict=True))
    assert sizes[1024] == pytest.approx(1.65, abs=0.01)
    assert right.lines[1].get_ydata()[0] == pytest.approx(1.07, abs=0.01)


def test_reading_against_computing() -> None:
    lines = {
        line.get_label(): dict(zip(*line.get_data(), strict=True))
        for line in cost_plots.reading(Costs()).axes[0].lines
    }
    assert lines["one state over SSD"][1024] == pytest.approx(0.0104, rel=0.02)
    assert lines["KV over SSD"][131072] == pytest.approx(0.859, rel=0.01)
    assert lines["compute all of it"][32768] == pytest.approx(0.971, rel=0.01)
    for context in cost_plots.CONTEXTS:
        assert (
            lines["KV over PCIe"][context]
            < lines["KV over SSD"][context]
            < lines["compute all of it"][context]
        )


def test_the_curve_of_times() -> None:
    comparison = compare(tiny())
    above, _, below, _ = ttft.plot(comparison, sensitive(comparison)).axes
    x, y = above.lines[0].get_data()
    assert list(x) == pytest.approx([0.2, 0.6, 1, 2]) and list(y) == [0.25, 0.5, 0.75, 1]
    assert list(below.lines[0].get_ydata()) == [1, 0.75, 0.5, 0.25] and above.get_xscale() == "log"


def test_systems_of_one_report_look_different() -> None:
    looks = {name: style.line(name) for name in ORDER}
    same = {
        frozenset(("none", "nocache")),
        frozenset(("histate-fixed", "histate-fixed32")),
    }  # never in one report
    for name, look in looks.items():
        for other, its in looks.items():
            alike = (look["color"], look["linestyle"]) == (its["color"], its["linestyle"])
            assert name == other or alike == (frozenset((name, other)) in same)
    assert style.line("a new one") == style.line("a new one")


MANY = [random_run(name, 2, share=0.7) for name in (*ORDER[:5], "another")]
ODD = {
    "many": MANY,
    "one": tiny()[1:],
    "empty": [run("histate")],
    "no sensitive": [run(name, request(), request("s2")) for name in ("histate", "vllm-disk")],
    "all errors": [run(name, request(error="gone")) for name in ("histate", "vllm-disk")],
    "one of two failed": [run("histate", request(error="gone")), run("vllm-disk", request())],
    "no KV told": [run("hicache", request(kv=None), request(turn=1, kv=None), source="engine")],
    "no time at all": [run("histate", request(ttft=0.0), request(turn=1, ttft=0.0))],
}


def texts(png: bytes) -> dict[str, str]:
    """The words in a PNG's metadata."""
    found, at = {}, 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        data = png[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + data) == struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0]
        if kind == b"tEXt":
            name, _, value = data.partition(b"\0")
            found[name.decode()] = value.decode("latin-1")
        at += 12 + size
    return found


def test_every_plot_is_written_and_carries_its_command(tmp_path) -> None:
    comparison = compare(tiny())
    written = write_all(comparison, sensitive(comparison), tmp_path, "x", "python -m eval.report build/x")
    names = [plot.file for plot in written]
    assert names == [
        f"x-{short}.png" for short in ("ttft", "tiers", "landing", "intervals", "access", "reading")
    ]
    assert sorted(names) == sorted(os.listdir(tmp_path))
    for name in names:
        assert texts((tmp_path / name).read_bytes()) == {"Description": "python -m eval.report build/x"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ODD)
def test_every_kind_of_run_is_drawn(kind, tmp_path, monkeypatch) -> None:
    for same_for_all in ("access", "reading"):
        monkeypatch.setattr(cost_plots, same_for_all, lambda costs: None)
    comparison = compare(ODD[kind])
    written = write_all(comparison, sensitive(comparison), tmp_path, "x", "python -m eval.report build/x")
    assert [plot.file for plot in written] == ["x-ttft.png", "x-tiers.png", "x-landing.png"]


def test_same_runs_same_bytes(tmp_path) -> None:
    comparison = compare(tiny())
    for name in ("a.png", "b.png"):
        style.save(ttft.plot(comparison, sensitive(comparison)), tmp_path / name, "command")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
