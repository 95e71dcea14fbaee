"""The ring of staged states: blocks never overlap what is not copied yet, and a wait is made only where one is needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.copy.ordering import EventMark, Rule, StreamLane
from sglang_histate.copy.staging import StagingRing, ring_bytes

from .fake_device import FakeDevice, bytes_of


class Lane(StreamLane):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__(torch.device("cpu"), device)
        self.held: list[tuple[EventMark, Rule]] = []

    def hold_current(self, mark: EventMark, rule: Rule) -> None:
        self.held.append((mark, rule))
        super().hold_current(mark, rule)


def ring(size: int) -> tuple[StagingRing, Lane]:
    lane = Lane(FakeDevice())
    return StagingRing(torch.zeros(size, dtype=torch.uint8), lane), lane


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=40),
    seal_every=st.integers(1, 3),
)
def test_a_block_is_written_again_only_behind_its_copy(sizes, seal_every) -> None:
    made, lane = ring(1024)
    live: list[tuple[tuple[int, int], EventMark | None]] = []
    for number, size in enumerate(sizes):
        block = made.take((size,), torch.uint8)
        if block is None:
            assert live and live[-1][1] is None, "only what is not sealed is in the way"
            mark = lane.mark()
            made.seal(mark)
            live = [(span, mark if old is None else old) for span, old in live]
            block = made.take((size,), torch.uint8)
        assert block is not None and block.numel() == size
        start, end = bytes_of(block)
        # A later mark of the same lane stands for all before it.
        waited = max((mark.event.number for mark, _ in lane.held), default=0)
        for span, mark in live:
            if span[0] < end and start < span[1]:
                assert mark is not None and mark.event.number <= waited
        live = [one for one in live if not (one[0][0] < end and start < one[0][1])]
        live.append(((start, end), None))
        if number % seal_every == 0:
            mark = lane.mark()
            made.seal(mark)
            live = [(span, mark if old is None else old) for span, old in live]
    assert all(rule is Rule.RESTAGE for _, rule in lane.held)


def test_a_ring_with_room_makes_nobody_wait() -> None:
    made, lane = ring(ring_bytes(100, 4))
    for _ in range(2):
        assert made.take((5, 5), torch.float32) is not None
        made.seal(lane.mark())
    assert lane.held == []


def test_too_large_for_the_ring() -> None:
    made, _ = ring(64)
    with pytest.raises(ValueError, match="65 bytes to stage in a ring of 64"):
        made.take((65,), torch.uint8)
    assert made.rows_per_block((2, 4), torch.float32) == 1
    with pytest.raises(AssertionError):
        made.rows_per_block((64,), torch.float32)


def test_rows_are_gathered_and_converted() -> None:
    made, lane = ring(4096)
    source, rows = torch.arange(12, dtype=torch.float32).view(4, 3), torch.tensor([3, 1])
    for dtype in (torch.float32, torch.float16):
        block = made.take((2, 3), dtype)
        assert block is not None
        made.fill(block, source, slice(0, 2), rows)
        assert torch.equal(block, source[rows].to(dtype))
    block = made.take((1, 3), torch.float32)
    assert block is not None
    made.fill(block, source, slice(2, 3))
    assert torch.equal(block, source[2:3])
    made.seal(lane.mark())
    made.reset()
    assert made.take((4096,), torch.uint8) is not None and lane.held == []
