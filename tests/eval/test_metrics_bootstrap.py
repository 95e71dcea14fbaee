"""Intervals by session."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fake_runs import random_run, request, run, tiny

from eval.metrics import compare, intervals, ratios


def scaled(one, system, factor):
    """The same requests with every TTFT multiplied."""
    records = [
        replace(record, first_token_s=record.eligible_s + factor * record.ttft_s) for record in one.records
    ]
    return run(system, *records)


def test_same_seed_same_intervals_and_another_seed_others() -> None:
    one = random_run("histate", 1)
    assert intervals([one]) == intervals([one])
    assert intervals([one], seed=2) != intervals([one])


@pytest.mark.parametrize("seed", range(5))
def test_an_interval_holds_its_figure_and_is_in_order(seed) -> None:
    one = random_run("histate", seed, sessions=30)
    found = intervals([one])
    hit = sum(record.hit for record in one.records) / sum(record.prompt_tokens for record in one.records)
    mean = sum(record.ttft_s for record in one.records) / len(one.records)
    for name, value in (("hit_rate", hit), ("mean", mean)):
        interval = found[name]
        assert interval is not None and interval.low < value < interval.high


def test_ratios_are_paired_by_session() -> None:
    """Sessions differ by a factor of a thousand, yet one system is twice as fast in each: nothing is uncertain."""
    draw = random.Random(5)
    slow = run(
        "vllm-disk", *(request(f"s{n}", turn, ttft=10 ** draw.uniform(-2, 1)) for n in range(20) for turn in range(5))
    )  # fmt: skip
    found = ratios(compare([slow, scaled(slow, "histate", 0.5)]), "histate", "vllm-disk")
    for ratio in found.values():
        assert ratio.interval is not None and ratio.requests == 100
        assert [ratio.value, ratio.interval.low, ratio.interval.high] == pytest.approx([2.0] * 3)
    own = intervals([slow])["p50"]
    assert own is not None and own.high > 1.5 * own.low


def test_more_turns_of_one_session_are_no_more_evidence() -> None:
    few = [request(f"s{n}", 0, ttft=float(n + 1)) for n in range(12)]
    many = [replace(record, turn=turn) for record in few for turn in range(10)]
    found, again = intervals([run("histate", *few)]), intervals([run("histate", *many)])
    assert found["mean"] is not None and again["mean"] is not None
    assert (again["mean"].low, again["mean"].high) == pytest.approx((found["mean"].low, found["mean"].high))


def test_about_95_of_100_intervals_hold_the_truth() -> None:
    held = 0
    for seed in range(100):
        draw = random.Random(seed)
        one = run("histate", *(request(f"s{n}", 0, ttft=draw.gauss(5, 1)) for n in range(40)))
        interval = intervals([one], resamples=200)["mean"]
        assert interval is not None
        held += interval.low <= 5 <= interval.high
    assert 87 <= held <= 100


def test_a_ratio_takes_only_what_both_have() -> None:
    slow = run("vllm-disk", request("a", 0, ttft=2.0), request("b", 0, ttft=2.0, error="gone"))
    fast = run("histate", request("a", 0, ttft=1.0), request("b", 0, ttft=9.0), request("c", 0, ttft=9.0))
    found = ratios(compare([slow, fast]), "histate", "vllm-disk")["p99"]
    assert (found.value, found.interval, found.requests) == (2.0, None, 1)


def test_repeats_are_paired_as_often_as_both_have_them() -> None:
    ours, disk = tiny()
    again = replace(ours, path=ours.path.with_name("again.jsonl"))
    assert ratios(compare([ours, again, disk]), "histate", "vllm-disk")["mean"].requests == 4


def test_nothing_in_common_is_no_ratio() -> None:
    found = ratios(
        compare([run("histate", request("a")), run("hicache", request("b"))]), "histate", "hicache"
    )
    assert all((one.value, one.interval, one.requests) == (None, None, 0) for one in found.values())


def test_one_session_has_no_interval() -> None:
    found = intervals([run("histate", request("a", 0), request("a", 1))])
    assert set(found.values()) == {None}
    assert set(intervals([run("histate")]).values()) == {None}


def test_only_the_requests_asked_for() -> None:
    one = run("histate", *(request(f"s{n}", turn, ttft=1.0 + turn) for n in range(9) for turn in range(2)))
    found = intervals([one], {(f"s{n}", "", 1) for n in range(9)})["mean"]
    assert found is not None and found.low == found.high == 2.0
    assert intervals([one], {(f"s{n}", "", 1) for n in range(9)})["reusable_share"] is None
