"""Which restores are checked: the share that was asked for, spread over keys and over restores of one key."""

from __future__ import annotations

from sglang_histate.policy.sampling import is_sampled


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_all_or_none() -> None:
    assert all(is_sampled(key(n), n, 1.0) for n in range(100))
    assert not any(is_sampled(key(n), n, 0.0) for n in range(100))


def test_a_share() -> None:
    for rate in (0.01, 0.25, 0.9):
        different = sum(is_sampled(key(n), 1, rate) for n in range(20_000)) / 20_000
        repeated = sum(is_sampled(key(7), n, rate) for n in range(20_000)) / 20_000
        assert abs(different - rate) < 0.02 and abs(repeated - rate) < 0.02


def test_a_higher_rate_keeps_what_a_lower_one_has() -> None:
    low = {n for n in range(1000) if is_sampled(key(n), n, 0.1)}
    assert low < {n for n in range(1000) if is_sampled(key(n), n, 0.5)}
