"""Which requests are reuse-sensitive."""

from __future__ import annotations

from fractions import Fraction

import pytest
from fake_runs import random_run, request, run, tiny

from eval.metrics import compare, sensitive


def keys(*runs, baseline=None):
    found = sensitive(compare(runs), baseline).keys
    return None if found is None else {(session, turn) for session, _, turn in found}


@pytest.mark.parametrize(("hit", "chosen"), [(949, True), (950, True), (951, False)])
def test_five_points_below_the_infinite_cache_count(hit, chosen) -> None:
    base = request("a", 1, prompt=1000, device=hit, reusable=1000)
    assert keys(run("vllm-disk", base)) == ({("a", 1)} if chosen else set())


@pytest.mark.parametrize(("hit", "chosen"), [(450, True), (451, False), (549, False), (550, True)])
def test_five_points_apart_from_histate_count_in_either_direction(hit, chosen) -> None:
    base = request("a", 1, prompt=1000, device=500, reusable=500)
    ours = request("a", 1, prompt=1000, ssd=hit, reusable=500)
    assert keys(run("vllm-disk", base), run("histate", ours)) == ({("a", 1)} if chosen else set())


def test_repeats_count_by_their_mean() -> None:
    once = run("vllm-disk", request("a", 1, device=900, reusable=1000), path="1.jsonl")
    good = run("vllm-disk", request("a", 1, device=1000, reusable=1000), path="2.jsonl")
    assert keys(once, good) == {("a", 1)}  # 950 on average
    assert keys(once, good, run("vllm-disk", good.records[0], path="3.jsonl")) == set()


def test_a_request_that_failed_in_the_baseline_is_none() -> None:
    assert keys(run("vllm-disk", request("a", 1, reusable=1000, error="gone"))) == set()


def test_the_baseline_depends_on_the_source_and_can_be_named() -> None:
    low, full = request("a", 1, reusable=1000), request("a", 1, device=1000, reusable=1000)
    engine = [run("hicache", low, source="engine"), run("stock", full, source="engine")]
    assert keys(*engine) == {("a", 1)} and keys(*engine, baseline="stock") == set()
    assert "hicache" in sensitive(compare(engine)).rule and "vLLM" in sensitive(compare(engine)).rule
    assert keys(*engine, baseline="vllm-disk") is None


def test_the_rule_says_when_histate_is_missing() -> None:
    assert "there is none" in sensitive(compare(tiny()[1:])).rule
    assert "there is none" not in sensitive(compare(tiny())).rule


@pytest.mark.parametrize("seed", range(20))
def test_the_papers_two_conditions(seed) -> None:
    ours, base = random_run("histate", seed), random_run("vllm-disk", seed, share=0.6)
    expected = set()
    for mine, theirs in zip(ours.records, base.records, strict=True):
        rate = Fraction(theirs.hit, theirs.prompt_tokens)
        below = Fraction(theirs.reusable, theirs.prompt_tokens) - rate >= Fraction(5, 100)
        apart = abs(Fraction(mine.hit, mine.prompt_tokens) - rate) >= Fraction(5, 100)
        if below or apart:
            expected.add((mine.session, mine.turn))
    assert expected and keys(ours, base) == expected
