from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from fake_answers import record

from eval.internal_hits.checks import MET, NOT_MET, UNCLEAR, check_all, failed
from eval.internal_hits.client import Cached
from eval.internal_hits.machine import cpu_seconds
from eval.internal_hits.options import parse
from eval.internal_hits.records import mismatches
from eval.internal_hits.table import case_table, layout, ratio_table
from eval.internal_hits.zero_reuse import Ratio, ratio_of, spread

ORDER = ("nocache", "hicache", "histate-none", "histate")


def test_table_has_one_line_a_system_and_the_mean_of_repeats() -> None:
    records = [
        record("histate", row="A, new", reusable=None),
        record("histate", cached=Cached(4096, device=4096, ssd_checkpoint=4096), ttft_s=0.1),
        record("histate", repeat=1, cached=Cached(4992, device=4992), ttft_s=0.3),
        record("hicache", ttft_s=0.9),
    ]
    assert case_table(records).splitlines() == [
        "request         system   prompt  reusable  cached  device  host  storage  via-SSD  TTFT-ms  CPU-ms",
        "",
        "b. first rewrite",
        "A[:5000] + 200  histate    5200      4992    4544    4544     0        0     2048      200       -",
        "                hicache    5200      4992       0       0     0        0        0      900       -",
    ]
    assert case_table([]) == "" and ratio_table([]) == ""


def test_layout_aligns_text_left_and_numbers_right() -> None:
    assert layout(("a", "b", "n"), [("x", "long", "1"), "title", ("y", "z", "100")]).splitlines() == [
        "a  b       n",
        "x  long    1",
        "",
        "title",
        "y  z     100",
    ]


def test_different_tokens_are_found_against_the_plainest_system() -> None:
    records = [record("histate", output_ids=(1, 2, 4)), record("nocache"), record("hicache")]
    (found,) = mismatches(records, ORDER)
    assert found.systems == ("nocache", "histate") and found.at == 2
    assert "differ from output token 2 on" in found.text()
    assert mismatches([record("histate"), record("nocache")], ORDER) == []
    (short,) = mismatches([record("histate", output_ids=(1, 2)), record("nocache")], ORDER)
    assert short.at == 2


def test_requests_of_other_repeats_are_not_compared() -> None:
    records = [record("nocache"), record("histate", repeat=1, output_ids=(9, 9, 9))]
    assert mismatches(records, ORDER) == []


def test_checks_follow_the_figures() -> None:
    good = [
        record("histate", cached=Cached(4096, device=4096)),
        record("hicache"),
        record("histate", case="d", cached=Cached(4672, device=4672)),
        record("histate", case="e", cached=Cached(4096, host=4096, ssd_checkpoint=4096)),
    ]
    checks = check_all(good, [], {1024: 10})
    assert [check.verdict for check in checks] == [MET] * 5 and not failed(checks)
    bad = [
        record("histate", cached=Cached(4032, device=4032)),
        record("hicache", cached=Cached(64, device=64)),
        record("histate", case="d", cached=Cached(3904, device=3904)),
        record("histate", case="e", cached=Cached(4096, host=4096)),
    ]
    checks = check_all(bad, [], {1024: 10})
    assert [check.verdict for check in checks] == [NOT_MET] * 5 and failed(checks)


@pytest.mark.parametrize(
    ("ratio", "low", "verdict"),
    [(0.94, 0.9, MET), (1.0, 0.9, UNCLEAR), (1.08, 1.02, UNCLEAR), (1.2, 1.1, NOT_MET)],
)
def test_zero_reuse_is_judged_with_its_spread(ratio: float, low: float, verdict: str) -> None:
    measured = Ratio("nocache", 2048, 20, "ttft", ratio, 1.0, ratio, low, ratio + 0.1, (ratio, ratio))
    (check,) = check_all([], [measured], {})
    assert check.verdict == verdict
    assert "nocache" in ratio_table([measured]) and f"{ratio:.3f}" in ratio_table([measured])


def test_ratio_of_medians_and_its_spread() -> None:
    draw = random.Random(1)

    def half(bias: float) -> list[tuple[float, float]]:
        return [(1.02 * bias * base, base) for base in (draw.uniform(0.9, 1.1) for _ in range(20))]

    # Whichever server is started second is faster by a fifth: the two halves cancel it out.
    halves = [half(1.25), half(0.8)]
    low, high = spread(halves)
    assert low == pytest.approx(1.02) and high == pytest.approx(1.02)
    assert spread([[(2.0, 1.0)] * 5, [(8.0, 1.0)] * 5]) == pytest.approx((4.0, 4.0))
    low, high = spread([[(draw.uniform(0.9, 1.1), draw.uniform(0.9, 1.1)) for _ in range(20)]])
    assert 0.85 < low < 0.99 < 1.01 < high < 1.2
    pairs = [
        [
            (record("histate", ttft_s=first, cpu_s=2 * first), record("nocache", ttft_s=second, cpu_s=second))
            for first, second in values
        ]
        for values in halves
    ]
    ttft = ratio_of(pairs, "nocache", 2048, "ttft")
    assert ttft.ratio == pytest.approx(1.02) and ttft.by_order == pytest.approx((1.275, 0.816))
    assert ttft.pairs == 40
    assert ratio_of(pairs, "nocache", 2048, "cpu").ratio == pytest.approx(2.04)


def test_cpu_seconds_of_this_group_grow(tmp_path: Path) -> None:
    assert cpu_seconds(os.getpgrp()) is not None
    assert cpu_seconds(os.getpgrp(), proc=tmp_path) is None
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a b) c) S 1 42 7 0 -1 0 0 0 0 0 150 50 0 0 20 0 1 0 0 0\n")
    assert cpu_seconds(42, proc=tmp_path) == 2.0


def test_command_line() -> None:
    options = parse(["--cases", "b,g", "--quick", "--systems", "histate,nocache"])
    assert options.cases == ("b", "g") and options.scale.repeats == 1
    assert options.plain_systems == ("histate", "nocache") and options.compared == ("nocache",)
    assert options.work()[0] == 6
    plan = options.plan()
    assert "case b" in plan and "6 server starts" in plan and "minutes" in plan
    assert parse([]).pairs == {2048: 24, 8192: 24}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--cases", "z"], "z is not one of"),
        (["--systems", ""], "nothing is not one of"),
        (["--cases", "g", "--systems", "nocache"], "add it to --systems"),
        (["--device-kv-tokens", "4096"], "too small"),
        (["--disk-size", "64MB"], "KiB, MiB"),
    ],
)
def test_bad_command_lines(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
