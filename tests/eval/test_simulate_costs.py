"""The cost model gives the paper's own arithmetic and the published measurements."""

from __future__ import annotations

import pytest

from eval.simulate.costs import Costs, access_ratio
from eval.simulate.links import Link, Links

COSTS = Costs()


def test_sizes_of_the_paper() -> None:
    assert COSTS.kv_token_bytes == 32_768 and COSTS.state_bytes == 51_511_296
    assert COSTS.state_tokens == pytest.approx(1572, abs=0.5)
    assert 32 * COSTS.state_bytes / 1e9 == pytest.approx(1.6, abs=0.05)
    assert 32_768 * COSTS.kv_token_bytes / 1e9 == pytest.approx(1.1, abs=0.05)


def test_access_ratios_of_the_paper() -> None:
    assert access_ratio(32_768, 1024) == pytest.approx(0.031, abs=0.0005)
    assert access_ratio(32_768, 4096) == 0.125


def test_reading_from_the_ssd_takes_what_the_paper_says() -> None:
    ssd = Links.of(COSTS).ssd_read
    assert ssd.send(0.0, COSTS.state_bytes) == pytest.approx(0.010, abs=0.0005)
    ssd = Links.of(COSTS).ssd_read
    assert ssd.send(0.0, 131_072 * COSTS.kv_token_bytes) == pytest.approx(0.86, abs=0.01)  # "near one second"


@pytest.mark.parametrize(
    ("tokens", "before", "ms"),
    [
        (8192, 0, 218),
        (32_768, 0, 971),
        (80_000, 0, 2825),
        (131_072, 0, 5435),
        (1400, 80_000, 63),
        (8192, 80_000, 376),
    ],
)
def test_prefill_times(tokens: int, before: int, ms: float) -> None:
    assert 1000 * COSTS.prefill_s(tokens, before) == pytest.approx(ms, rel=0.02)


def test_the_published_measurement_of_32000_tokens() -> None:
    assert 0.90 < COSTS.prefill_s(32_000) < 1.02


@pytest.mark.parametrize(("context", "us"), [(0, 25.7), (32_000, 33.4), (80_000, 44.9), (128_000, 56.5)])
def test_recomputing_one_more_token_costs(context: int, us: float) -> None:
    flop = COSTS.prefill_flop(1000, context) - COSTS.prefill_flop(0, context)
    assert 1e6 * flop / 1000 / (COSTS.efficiency * COSTS.peak_flop_s) == pytest.approx(us, rel=0.02)


def test_chunks_take_as_many_operations_as_the_whole() -> None:
    parts = sum(COSTS.prefill_flop(8192, at) for at in range(0, 131_072, 8192))
    assert parts == pytest.approx(COSTS.prefill_flop(131_072, 0))


def test_a_step_has_a_floor_and_decoding_beside_a_prompt_reads_no_weights_again() -> None:
    assert COSTS.prefill_s(1) == COSTS.least_prefill_s and COSTS.prefill_s(0) == 0
    alone = COSTS.step_time_s(0.0, 4, 400_000)
    assert alone == pytest.approx(0.0065 + 4 * 0.00003 + 400_000 * 12e-9)
    mixed = COSTS.step_time_s(COSTS.prefill_flop(8192, 0), 4, 400_000)
    assert mixed == pytest.approx(COSTS.prefill_s(8192) + alone - 0.0065)


@pytest.mark.parametrize("name", ["state_bytes", "efficiency", "ssd_read_bytes_s"])
def test_what_is_not_positive_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} 0"):
        Costs(**{name: 0})


def test_a_link_is_first_come_first_served() -> None:
    link = Link(100.0, 0.5)
    assert link.send(1.0, 200) == 3.5
    assert link.send(1.5, 100) == 4.5  # waits for the first; latency is no part of the queue
    assert link.send(10.0, 100) == 11.5
    assert link.send(10.0, 0) == 10.0
    assert link.carried_bytes == 400


def test_writes_on_their_way_are_counted_until_they_end() -> None:
    links = Links.of(Costs(ssd_write_bytes_s=100))
    assert [links.write_ssd(0.0, 100) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert [links.writes_at(now_s) for now_s in (0.0, 1.0, 2.5, 3.0)] == [3, 2, 1, 0]


def test_a_checkpoint_may_take_less_on_the_ssd() -> None:
    for share, size in ((0.51145, 26_345_472), (0.27481, 14_155_776)):  # bf16 and int8
        costs = Costs(ssd_state_share=share)
        assert costs.ssd_state_bytes == pytest.approx(size, rel=1e-4)
        assert costs.state_bytes == COSTS.state_bytes, "device and host keep it as it is"
        assert costs.state_tokens == pytest.approx(size / 32_768, rel=1e-4), (
            "what one more costs, the SSD says"
        )
