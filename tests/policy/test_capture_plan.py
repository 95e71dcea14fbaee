from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.policy.capture_plan import ChunkPlan, plan_positions, positions_in_chunk
from sglang_histate.policy.interval import DEFAULT_INTERVALS, NO_INTERVAL, interior_count

grids = st.sampled_from([64, 128, 192, 256, 576])


@st.composite
def segments(draw, on_grid=False):
    grid = draw(grids)
    start = grid * draw(st.integers(0, 100))
    end = start + draw(st.integers(0, 20_000))
    step = grid if on_grid else draw(st.sampled_from([1, 64]))
    return start, end, step * draw(st.integers(1, 40)), grid


@given(segments())
def test_positions_lie_on_the_grid_inside_the_segment(segment):
    start, end, interval, grid = segment
    plan = plan_positions(start, end, interval, grid)
    assert list(plan) == sorted(set(plan))
    assert all(p % grid == 0 and (p - start) % 64 == 0 and start < p < end for p in plan)
    exact = range(start + interval, end, interval)
    assert set(plan) == {p // grid * grid for p in exact} - {start}


@given(segments(on_grid=True))
def test_intervals_on_the_grid_are_spaced_exactly(segment):
    start, end, interval, grid = segment
    plan = plan_positions(start, end, interval, grid)
    assert plan == tuple(start + k * interval for k in range(1, len(plan) + 1))
    assert len(plan) == interior_count(end - start, interval)
    assert start + (len(plan) + 1) * interval >= end


@given(segments(), st.data())
def test_chunks_of_whole_steps_capture_the_plan_exactly_once(segment, data):
    start, end, interval, grid = segment
    plan = plan_positions(start, end, interval, grid)
    steps = st.lists(st.integers(0, max(0, end - 1 - start) // 64), max_size=12)
    cuts = [start, *(start + 64 * n for n in sorted(data.draw(steps))), end]
    parts = [positions_in_chunk(plan, a, b) for a, b in pairwise(cuts)]
    assert tuple(p for part in parts for p in part.capture) == plan
    assert all(part.misaligned == () for part in parts)


@given(segments(), st.data())
def test_any_chunks_account_for_every_position_exactly_once(segment, data):
    start, end, interval, grid = segment
    plan = plan_positions(start, end, interval, grid)
    cuts = [start, *sorted(data.draw(st.lists(st.integers(start, end), max_size=12))), end]
    seen = []
    for chunk_start, chunk_end in pairwise(cuts):
        part = positions_in_chunk(plan, chunk_start, chunk_end)
        assert all((p - chunk_start) % 64 == 0 for p in part.capture)
        assert all((p - chunk_start) % 64 for p in part.misaligned)
        assert all(chunk_start < p <= chunk_end for p in part.capture + part.misaligned)
        seen += part.capture + part.misaligned
    assert sorted(seen) == list(plan)


def test_plan_by_hand():
    assert plan_positions(128, 128 + 1025, 512, 64) == (640, 1152)
    assert plan_positions(128, 128 + 1024, 512, 64) == (640,)
    assert plan_positions(0, 1400, 320, 256) == (256, 512, 768, 1280)
    assert plan_positions(0, 600, 64, 256) == (256, 512)


@pytest.mark.parametrize("interval", DEFAULT_INTERVALS)
def test_empty_segment_has_no_positions(interval):
    assert plan_positions(4096, 4096, interval, 64) == ()


def test_no_interval_has_no_positions():
    assert plan_positions(0, 1_000_000, NO_INTERVAL, 64) == ()


def test_state_at_a_chunk_end_belongs_to_that_chunk():
    plan = (256, 512)
    assert positions_in_chunk(plan, 0, 256) == ChunkPlan(capture=(256,), misaligned=())
    assert positions_in_chunk(plan, 256, 512) == ChunkPlan(capture=(512,), misaligned=())
    assert positions_in_chunk(plan, 512, 700) == ChunkPlan(capture=(), misaligned=())


def test_chunk_that_starts_between_steps_reports_what_it_cannot_capture():
    assert positions_in_chunk((256, 512), 100, 600) == ChunkPlan(capture=(), misaligned=(256, 512))


@pytest.mark.parametrize(
    ("start", "end", "interval", "grid", "named"),
    [
        (64, 1000, 256, 128, "start 64"),
        (-64, 1000, 256, 64, "start -64"),
        (128, 100, 256, 64, "end 100"),
        (0, 1000, -64, 64, "interval -64"),
        (0, 1000, 256, 96, "grid 96"),
        (0, 1000, 256, 0, "grid 0"),
    ],
)
def test_impossible_segments_are_refused(start, end, interval, grid, named):
    with pytest.raises(ValueError, match=named):
        plan_positions(start, end, interval, grid)


def test_backward_chunk_is_refused():
    with pytest.raises(ValueError, match="chunk end 5"):
        positions_in_chunk((), 6, 5)
