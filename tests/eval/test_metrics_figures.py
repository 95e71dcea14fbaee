"""Figures of runs: a run that was worked out by hand, and rules that hold for every run."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from fake_runs import random_run, request, run, tiny

from eval.metrics import compare, figures, sensitive, summary, text_table
from eval.metrics.spread import spread


def of(*runs, baseline=None):
    comparison = compare(runs)
    return figures(comparison, sensitive(comparison, baseline))


def test_a_run_worked_out_by_hand() -> None:
    one = of(*tiny())["histate"]
    assert (one.requests, one.errors, one.missing, one.runs) == (4, 0, 0, 1)
    assert one.all.hit_rate == 1500 / 6000
    assert one.all.tier_rates == {"device": 1000 / 6000, "host": 0.0, "ssd": 500 / 6000}
    assert one.all.reusable_share == 1500 / 2000
    assert one.all.recomputed_with_kv == 400
    # TTFT 0.2, 0.6, 1, 2: rank 1.5, 2.85 and 2.97 of 0 to 3
    ttft = one.all.ttft
    assert [ttft.mean, ttft.p50, ttft.p95, ttft.p99] == pytest.approx([0.95, 0.8, 1.85, 1.97])
    assert one.later.requests == 2 and one.later.ttft.mean == pytest.approx(0.4)
    assert one.makespan_s == pytest.approx(23.6)
    assert one.itl.mean == pytest.approx(6.0 / 40) and one.itl.p50 == pytest.approx(0.1)
    # end to end 2, 1.2, 3, 3.6 s
    assert one.end_to_end.p99 == pytest.approx(3.0 + 0.97 * 0.6)
    assert one.ssd_written_bytes == 5000
    assert one.sensitive is not None
    assert (one.sensitive.requests, one.sensitive.hit_rate, one.sensitive.reusable_share) == (1, 0.25, 0.5)
    assert one.sensitive.ttft.p99 == pytest.approx(0.6)


def test_a_request_that_failed_is_counted_and_nothing_else() -> None:
    runs = tiny()
    failed = request("s3", 0, prompt=10**6, ttft=500.0, start=900.0, reusable=10**6, error="timed out")
    with_it = of(replace(runs[0], records=(*runs[0].records, failed)), runs[1])
    without = of(*runs)
    assert with_it["histate"].requests == 5 and with_it["histate"].errors == 1
    for name in ("all", "later", "sensitive", "rewriting", "makespan_s", "itl", "end_to_end"):
        assert getattr(with_it["histate"], name) == getattr(without["histate"], name)
    assert with_it["vllm-disk"].missing == 1


def test_kv_that_is_not_told_is_not_zero() -> None:
    told, untold = request("a", 0, kv=100), request("a", 1, kv=None)
    assert of(run("hicache", told))["hicache"].all.recomputed_with_kv == 100
    assert of(run("hicache", told, untold))["hicache"].all.recomputed_with_kv is None


def engine(*counts):
    told = [request(f"s{n}", kv=None) for n in range(2)]
    return [
        run("histate", *told, source="engine", path=f"{n}.jsonl", recomputed_with_kv_tokens=count)
        for n, count in enumerate(counts)
    ]


def test_a_server_s_own_count_stands_where_no_request_tells() -> None:
    runs = engine(64, 32)
    one = of(*runs)["histate"]
    # a sum over the repeats, as the requests are; nothing is known of parts
    assert (one.all.recomputed_with_kv, one.requests, one.later.recomputed_with_kv) == (96, 4, None)
    assert summary(runs)["systems"]["histate"]["recomputed_with_kv_tokens"] == 96
    assert " 96 " in text_table(compare(runs))


def test_requests_that_tell_count_and_not_the_server() -> None:
    one = of(run("histate", request(kv=100), recomputed_with_kv_tokens=7))["histate"]
    assert one.all.recomputed_with_kv == 100


@pytest.mark.parametrize("lacks", [None, True, "many"])
def test_a_server_s_count_is_not_known_unless_every_run_tells(lacks) -> None:
    assert of(*engine(64, lacks))["histate"].all.recomputed_with_kv is None
    assert of(*engine(64), *tiny_engine())["hicache"].all.recomputed_with_kv is None


def tiny_engine():
    return [run("hicache", request("s0", kv=None), request("s1", kv=None), source="engine")]


def test_tokens_and_requests_are_sums_of_the_repeats_and_whole_runs_means() -> None:
    first = run("histate", request(kv=10), request("s2", start=4.0), ssd_written_bytes=100)
    second = run(
        "histate", request(kv=30), request("s2", start=8.0), ssd_written_bytes=300, path="again.jsonl"
    )
    found = summary([first, second])["systems"]["histate"]
    assert (found["requests"], found["recomputed_with_kv_tokens"]) == (4, 40)
    assert (found["ssd_written_bytes"], found["makespan_s"]) == (200, (6.0 + 10.0) / 2)


def test_hits_past_the_bound_do_not_make_up_for_others() -> None:
    one = of(run("histate", request("a", 0, device=900, reusable=500), request("a", 1, reusable=500)))
    assert one["histate"].all.reusable_share == 0.5


def test_repeats_are_put_together() -> None:
    first, disk = tiny()
    second = replace(first, path=first.path.with_name("again.jsonl"))
    both, alone = of(first, second, disk)["histate"], of(first, disk)["histate"]
    assert (both.runs, both.requests, both.missing) == (2, 8, 0)
    assert both.all.hit_rate == alone.all.hit_rate and both.makespan_s == alone.makespan_s
    assert both.ssd_written_bytes == alone.ssd_written_bytes
    assert both.all.recomputed_with_kv == 800


def test_what_was_written_is_not_known_unless_every_run_tells() -> None:
    first, disk = tiny()
    again = run("histate", *first.records, path="again.jsonl")
    assert of(first, again, disk)["histate"].ssd_written_bytes is None


@pytest.mark.parametrize("records", [(), (request(error="refused"), request("s2", error="refused"))])
def test_nothing_to_measure_is_none_and_not_zero(records) -> None:
    one = of(run("histate", *records), run("vllm-disk", *records))["histate"]
    assert one.errors == len(records) and one.makespan_s is None
    assert (one.all.hit_rate, one.all.reusable_share, one.all.recomputed_with_kv) == (None, None, None)
    assert one.all.ttft.mean is one.all.ttft.p99 is one.itl.mean is None
    assert "-" in text_table(compare([run("histate", *records)]))


def test_a_prompt_of_one_token_has_no_gap() -> None:
    assert of(run("histate", request(output=1)))["histate"].itl.mean is None


def test_an_agents_first_request_is_not_its_sessions() -> None:
    main, agent = request("a", 0, ttft=1.0), request("a", 0, agent="sub", ttft=3.0, start=5.0)
    later = of(run("histate", agent, main))["histate"].later
    assert later.requests == 1 and later.ttft.mean == pytest.approx(3.0)


@pytest.mark.parametrize("seed", range(20))
def test_percentiles_are_numpys_linear_ones(seed) -> None:
    draw = random.Random(seed)
    values = [draw.expovariate(1) for _ in range(draw.randrange(1, 300))]
    found = spread(values)
    expected = [np.mean(values), *np.percentile(values, [50, 95, 99], method="linear")]
    assert [found.mean, found.p50, found.p95, found.p99] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_rates_add_up(seed) -> None:
    for one in of(random_run("histate", seed), random_run("vllm-disk", seed, share=0.5)).values():
        parts = [one.all, one.later, one.sensitive, one.rewriting]
        for part in parts:
            assert part is not None
            if part.requests:
                assert part.hit_rate == pytest.approx(sum(rate or 0 for rate in part.tier_rates.values()))
                assert 0 <= part.hit_rate <= 1
                assert part.ttft.p50 <= part.ttft.p95 <= part.ttft.p99
        assert one.all.requests == 48 and one.later.requests == 40


def test_the_table_of_the_terminal() -> None:
    lines = text_table(compare(tiny())).splitlines()
    assert lines[0] == "All requests of tiny"
    assert lines[2].split() == [
        "histate", "4", "0", "25.0", "75.0", "400", "0.950", "0.800", "1.850", "1.970", "24", "0.0",
    ]  # fmt: skip
    assert lines[-1].split()[:5] == ["vllm-disk", "1", "0.0", "0.0", "1,000"]


def test_the_table_says_why_there_is_no_second_part() -> None:
    assert text_table(compare(tiny()[:1])).endswith("there is no run of the baseline, vllm-disk")
    assert text_table(compare([run("vllm-disk", request())])).endswith(": none")
