import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.policy.interval import (
    DEFAULT_INTERVALS,
    NO_INTERVAL,
    IntervalPolicy,
    check_grid,
    choose_interval,
    continuous_interval,
    interior_count,
    parse_interval,
    parse_intervals,
    recompute_tokens,
    storage_tokens,
)

lengths = st.integers(0, 3000)
long_lengths = st.integers(0, 200_000)
intervals = st.one_of(st.just(NO_INTERVAL), st.integers(1, 3500))
state_sizes = st.floats(0, 5000)
pressures = st.floats(0, 64)


def width(interval):
    return math.inf if interval == NO_INTERVAL else interval


def supported_sets(widest_steps=256):
    finite = st.sets(st.integers(1, widest_steps).map(lambda n: 64 * n), max_size=8).map(sorted)
    return st.tuples(finite, st.booleans()).map(
        lambda t: (*t[0], NO_INTERVAL) if t[1] or not t[0] else tuple(t[0])
    )


def brute_distance_sum(length, interval):
    checkpoints = {0} if interval == NO_INTERVAL else set(range(0, length, interval))
    total = last = 0
    for hit in range(length):
        if hit in checkpoints:
            last = hit
        total += hit - last
    return total


def brute_count(length, interval):
    return 0 if interval == NO_INTERVAL else sum(1 for p in range(interval, length, interval) if p < length)


def exact_cost(length, interval, state_tokens, pressure):
    recompute = Fraction(brute_distance_sum(length, interval), max(length, 1))
    return recompute + brute_count(length, interval) * Fraction(state_tokens * pressure)


@given(lengths, intervals)
def test_recompute_equals_the_sum_over_every_hit_position(length, interval):
    expected = brute_distance_sum(length, interval) / length if length else 0.0
    assert recompute_tokens(length, interval) == expected


@given(lengths, intervals, state_sizes, pressures)
def test_storage_counts_checkpoints_strictly_inside(length, interval, state_tokens, pressure):
    assert interior_count(length, interval) == brute_count(length, interval)
    expected = brute_count(length, interval) * (state_tokens * pressure)
    assert storage_tokens(length, interval, state_tokens, pressure) == expected


@settings(deadline=None)
@given(lengths, supported_sets(60), state_sizes, pressures)
def test_choice_is_the_cheapest_and_the_widest_of_equals(length, supported, state_tokens, pressure):
    chosen = choose_interval(length, supported, state_tokens, pressure)
    costs = {i: exact_cost(length, i, state_tokens, pressure) for i in supported}
    assert costs[chosen] == min(costs.values())
    assert width(chosen) == max(width(i) for i in supported if costs[i] == costs[chosen])


@given(long_lengths, supported_sets(), state_sizes, pressures, st.randoms(use_true_random=False))
def test_order_of_the_set_does_not_matter(length, supported, state_tokens, pressure, random):
    shuffled = list(supported)
    random.shuffle(shuffled)
    assert choose_interval(length, shuffled, state_tokens, pressure) == choose_interval(
        length, supported, state_tokens, pressure
    )


@given(long_lengths, supported_sets(), state_sizes, pressures, pressures)
def test_higher_pressure_is_never_narrower(length, supported, state_tokens, one, other):
    low, high = sorted((one, other))
    relaxed = choose_interval(length, supported, state_tokens, low)
    tight = choose_interval(length, supported, state_tokens, high)
    assert width(tight) >= width(relaxed)


@given(long_lengths, supported_sets(), pressures, state_sizes, state_sizes)
def test_bigger_checkpoint_is_never_narrower(length, supported, pressure, one, other):
    small, big = sorted((one, other))
    assert width(choose_interval(length, supported, big, pressure)) >= width(
        choose_interval(length, supported, small, pressure)
    )


@given(st.sets(st.integers(2, 6).map(lambda n: 64 * n), min_size=1), st.booleans(), st.data(), state_sizes)
def test_longer_is_never_narrower_between_common_multiples(finite, with_none, data, state_tokens):
    supported = (*sorted(finite), NO_INTERVAL) if with_none else tuple(sorted(finite))
    common = math.lcm(*finite)
    short, long = sorted(data.draw(st.tuples(st.integers(2, 300), st.integers(2, 300))))
    assert width(choose_interval(long * common, supported, state_tokens)) >= width(
        choose_interval(short * common, supported, state_tokens)
    )


def test_longer_may_be_narrower_between_other_lengths():
    chosen = [choose_interval(length, (256, 512, NO_INTERVAL), 120) for length in (512, 513, 768)]
    assert chosen == [256, NO_INTERVAL, 512]


def test_worked_example():
    assert continuous_interval(8000, 100) == pytest.approx(1264.9, abs=0.05)
    assert continuous_interval(8000, 100, pressure=4) == pytest.approx(2529.8, abs=0.05)
    assert choose_interval(8000, DEFAULT_INTERVALS, 100) == 1024
    assert choose_interval(8000, DEFAULT_INTERVALS, 100, pressure=4) == 2048
    cost = {i: recompute_tokens(8000, i) + storage_tokens(8000, i, 100, 1.0) for i in DEFAULT_INTERVALS}
    assert cost[1024] == pytest.approx(501.516 + 700)
    assert sorted(cost, key=cost.__getitem__)[:2] == [1024, 2048]  # the two neighbours of 1265


@given(st.integers(4096, 1_000_000), st.floats(1, 5000), st.floats(0.05, 16))
def test_choice_is_within_a_factor_of_the_continuous_optimum(length, state_tokens, pressure):
    best = continuous_interval(length, state_tokens, pressure)
    chosen = choose_interval(length, DEFAULT_INTERVALS, state_tokens, pressure)
    if 256 <= best <= 16384 and best <= length / 8:
        assert best / 2 <= chosen <= best * 2


@pytest.mark.parametrize("length", [0, 1, 64, 256])
def test_segment_too_short_for_any_checkpoint_chooses_none(length):
    assert choose_interval(length, DEFAULT_INTERVALS, 100) == NO_INTERVAL
    assert choose_interval(length, DEFAULT_INTERVALS, 0) == NO_INTERVAL


def test_free_storage_chooses_the_narrowest():
    assert choose_interval(100_000, DEFAULT_INTERVALS, 1572, pressure=0) == 256


def test_recompute_by_hand():
    assert recompute_tokens(5, 2) == (0 + 1 + 0 + 1 + 0) / 5
    assert recompute_tokens(5, NO_INTERVAL) == 2.0
    assert recompute_tokens(0, 64) == recompute_tokens(1, 64) == 0.0


@pytest.mark.parametrize(
    ("length", "supported", "state_tokens", "pressure", "named"),
    [
        (-1, (64,), 1, 1, "-1"),
        (10, (), 1, 1, "empty"),
        (10, (-64,), 1, 1, "-64"),
        (10, (64,), -2, 1, "-2"),
        (10, (64,), -2, -3, "-3"),
        (10, (64,), 1, math.inf, "inf"),
        (10, (64,), math.nan, 1, "nan"),
        (10, (64,), 1e200, 1e200, "1e"),
    ],
)
def test_impossible_arguments_are_refused(length, supported, state_tokens, pressure, named):
    with pytest.raises(ValueError, match=named):
        choose_interval(length, supported, state_tokens, pressure)


def test_negative_interval_has_no_cost():
    for cost in (lambda: recompute_tokens(100, -64), lambda: storage_tokens(100, -64, 1, 1)):
        with pytest.raises(ValueError, match="interval -64 is negative"):
            cost()


def test_parse_interval():
    assert parse_interval("adaptive") == IntervalPolicy(DEFAULT_INTERVALS)
    assert parse_interval("adaptive", (64, 128)).supported == (64, 128)
    assert parse_interval(" none ").choose(100_000, 1, 0) == NO_INTERVAL
    assert parse_interval("scarce", (64, 128)) == IntervalPolicy((64, 128), scarce=True)
    assert parse_interval("learned") == IntervalPolicy((NO_INTERVAL,), learned=True)
    fixed = parse_interval("fixed:1024")
    assert {fixed.choose(n, 1572, p) for n in (0, 100, 8000) for p in (0, 1, 100)} == {1024}
    assert parse_interval("adaptive").choose(8000, 100) == 1024


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Adaptive",
        "fixed",
        "fixed:",
        "fixed:0",
        "fixed:100",
        "fixed:-64",
        "fixed:6_4",
        "fixed:64.0",
        "1024",
    ],
)
def test_parse_interval_refuses_and_names_the_value(text):
    with pytest.raises(
        ValueError, match="is not an interval: write adaptive, scarce, learned, align, none, or fixed:N"
    ) as error:
        parse_interval(text)
    assert repr(text) in str(error.value)


def test_parse_intervals():
    assert parse_intervals("256, 512,none") == (256, 512, NO_INTERVAL)
    assert parse_intervals("64") == (64,)
    assert parse_intervals("none") == (NO_INTERVAL,)
    assert parse_intervals("256,512,1024,2048,4096,8192,16384,none") == DEFAULT_INTERVALS


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "'' in ''"),
        ("256,,512", "'' in"),
        ("256,500", "'500' in"),
        ("0,256", "'0' in"),
        ("32", "'32' in"),
        ("256,abc", "'abc' in"),
        ("512,256", "256 comes after 512"),
        ("256,256", "256 comes after 256"),
        ("none,256", "256 comes after none"),
        ("256,none,none", "none comes after none"),
    ],
)
def test_parse_intervals_refuses_and_names_the_value(text, named):
    with pytest.raises(ValueError, match=named):
        parse_intervals(text)


@pytest.mark.parametrize("supported", [(), (100,), (-64,), (512, 256), (0, 64)])
def test_policy_refuses_a_bad_set(supported):
    with pytest.raises(ValueError, match="interval"):
        IntervalPolicy(supported)


def test_check_grid():
    check_grid(DEFAULT_INTERVALS, 64)
    check_grid(DEFAULT_INTERVALS, 256)
    with pytest.raises(ValueError, match="interval 256 is not a multiple of 512"):
        check_grid(DEFAULT_INTERVALS, 512)
    with pytest.raises(ValueError, match="grid 96"):
        check_grid(DEFAULT_INTERVALS, 96)
