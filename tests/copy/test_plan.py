"""Copy plans, and the torch form that runs them, against plain byte loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.copy import torch_engine as running
from sglang_histate.copy.plan import CopyPlan
from sglang_histate.copy.torch_engine import LARGE_PIECE_BYTES, run_plan
from sglang_histate.copy.transfer import flat_bytes


def expected(plan: CopyPlan, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    wanted = target.clone()
    for start, to, size in plan.pieces():
        for i in range(size):
            wanted[to + i] = source[start + i]
    return wanted


def check(plan: CopyPlan, source_bytes: int, target_bytes: int) -> None:
    source = torch.randint(0, 256, (source_bytes,), dtype=torch.uint8)
    target = torch.randint(0, 256, (target_bytes,), dtype=torch.uint8)
    wanted = expected(plan, source, target)
    run_plan(plan, source, target)
    assert torch.equal(target, wanted)


@settings(max_examples=150)
@given(
    size=st.integers(1, 24),
    stride=st.integers(0, 9),
    base=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    order=st.permutations(range(9)),
    count=st.integers(0, 9),
)
def test_equal_pieces_on_any_grid(size, stride, base, order, count) -> None:
    sources = np.array(order[:count], dtype=np.int64) * (size + stride) + base[0]
    targets = np.array(order[::-1][:count], dtype=np.int64) * (size + 8 - stride % 9) + base[1]
    check(CopyPlan.blocks(sources, targets, size), 512, 512)


def test_pieces_on_no_grid_and_overlapping_sources() -> None:
    check(CopyPlan.blocks(np.array([0, 3, 4, 11]), np.array([40, 7, 61, 20]), 5), 64, 96)
    check(CopyPlan.blocks(np.array([0, 2, 4, 6]), np.array([0, 8, 16, 24]), 8), 64, 64)


def test_large_pieces() -> None:
    size = LARGE_PIECE_BYTES
    source = torch.randint(0, 256, (4 * size,), dtype=torch.uint8)
    target = torch.zeros(4 * size, dtype=torch.uint8)
    run_plan(CopyPlan.blocks(np.array([3, 1, 0, 2]) * size, np.arange(4) * size, size), source, target)
    assert torch.equal(target.view(4, size), source.view(4, size)[[3, 1, 0, 2]])


def test_between_two_devices_small_pieces_go_through_a_packed_buffer() -> None:
    """The two ways that a run between devices takes, here on one."""
    rows = np.array([5, 2, 3, 7])
    strided, runs = (
        rows * 24 + 8,
        np.array([0, 16, 32, 64]),
    )  # 16 bytes out of 24; the first three are one run
    for forth in (True, False):
        plan = CopyPlan.blocks(strided, runs, 16) if forth else CopyPlan.blocks(runs, strided, 16)
        source = torch.randint(0, 256, (256,), dtype=torch.uint8)
        target = torch.randint(0, 256, (256,), dtype=torch.uint8)
        wanted = expected(plan, source, target)
        if forth:
            view = running._as_rows(source, plan.sources, 16, 8)
            assert view is not None
            running._gather_then_copy(plan, view, target)
        else:
            view = running._as_rows(target, plan.targets, 16, 8)
            assert view is not None
            running._copy_then_scatter(plan, source, view)
        assert torch.equal(target, wanted)


@settings(max_examples=150)
@given(
    page_bytes=st.integers(1, 40),
    pages=st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True),
    data=st.data(),
)
def test_a_range_of_a_scattered_object_and_back(page_bytes, pages, data) -> None:
    start = data.draw(st.integers(0, len(pages) * page_bytes))
    size = data.draw(st.integers(0, len(pages) * page_bytes - start))
    arena = torch.randint(0, 256, (16 * page_bytes,), dtype=torch.uint8)
    whole = torch.cat([arena[page * page_bytes : (page + 1) * page_bytes] for page in pages])
    plan = CopyPlan.from_pages(pages, page_bytes, start, size, 5)
    assert plan.total_bytes == size and len(plan) <= len(pages)
    target = torch.zeros(size + 9, dtype=torch.uint8)
    run_plan(plan, arena, target)
    assert torch.equal(target[5 : 5 + size], whole[start : start + size])
    before, back = arena.clone(), torch.randint(0, 256, (size + 9,), dtype=torch.uint8)
    run_plan(plan.reversed(), back, arena)
    run_plan(plan, arena, target)
    assert torch.equal(target[5 : 5 + size], back[5 : 5 + size])
    assert int((arena != before).sum()) <= size  # nothing else was touched


def test_a_range_outside_the_pages() -> None:
    for start, size in ((0, 21), (-1, 3), (20, 1)):
        with pytest.raises(ValueError):
            CopyPlan.from_pages([3, 1], 10, start, size, 0)


def test_merged_joins_what_is_one_run_on_both_sides() -> None:
    plan = CopyPlan.blocks(np.array([0, 4, 8, 20, 24]), np.array([10, 14, 30, 34, 38]), 4)
    assert list(plan.merged().pieces()) == [(0, 10, 8), (8, 30, 4), (20, 34, 8)]
    assert plan.merged().total_bytes == plan.total_bytes and plan.merged().piece_bytes is None


def test_flat_bytes_is_the_storage_under_a_view() -> None:
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    view = base[1:, 2:4]
    flat = flat_bytes(view)
    assert flat.numel() == base.nbytes
    start = view.storage_offset() * 4
    assert flat[start : start + 8].view(torch.float32).tolist() == [8.0, 9.0]
    flat[start : start + 4] = 0
    assert base[1, 2] == 0
