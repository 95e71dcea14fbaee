"""What a plan must not do, each named in the error; and the descriptors of plans that may."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_histate.copy.cpu_engine import HostEngine
from sglang_histate.copy.plan import CopyPlan, PlanError
from sglang_histate.copy.torch_engine import TorchEngine
from sglang_histate.copy.transfer import MAX_DESCRIPTORS, Move, Space, Transfer, descriptors


def space(name: str, size: int = 100, **facts) -> Space:
    return Space(name, torch.arange(size, dtype=torch.int64).to(torch.uint8), **facts)


def plan(*pieces: tuple[int, int, int]) -> CopyPlan:
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    return CopyPlan(*columns)


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        ([(0, 0, 10), (95, 20, 6)], "piece 1 is bytes 95 to 101 of the arena, which has 100"),
        ([(-1, 0, 10)], "piece 0 is bytes -1 to 9 of the arena"),
        ([(0, 98, 3)], "piece 0 is bytes 98 to 101 of the pool, which has 100"),
        ([(0, -4, 3)], "piece 0 is bytes -4 to -1 of the pool"),
        ([(0, 0, -2)], "a piece of -2 bytes"),
        ([(0, 10, 10), (50, 19, 4)], "pieces 0 and 1 write the same bytes"),
        ([(50, 19, 4), (0, 10, 10)], "pieces 1 and 0 write the same bytes"),
    ],
)
def test_a_wrong_plan_names_what_is_wrong_and_copies_nothing(pieces, complaint) -> None:
    transfer = Transfer(plan(*pieces), space("the arena"), space("the pool"))
    before = transfer.target.flat.clone()
    many = [(i, i, 0) for i in range(100)]  # enough of nothing to be checked in another way
    for wrong in (transfer, Transfer(plan(*pieces, *many), transfer.source, transfer.target)):
        for run in (descriptors, TorchEngine().submit, HostEngine().submit):
            with pytest.raises(PlanError, match=complaint) as error:
                run([wrong])
            assert "the arena" in str(error.value) and "the pool" in str(error.value)
    assert torch.equal(transfer.target.flat, before)


def test_lists_of_other_lengths() -> None:
    one = np.zeros(1, dtype=np.int64)
    with pytest.raises(PlanError, match="1 sources, 1 targets, 0 sizes"):
        descriptors([Transfer(CopyPlan(one, one, one[:0]), space("a"), space("b"))])


def test_a_piece_over_two_registered_chunks() -> None:
    arena = space("the arena", chunk_bytes=40)
    with pytest.raises(PlanError, match="bytes 36 to 44 of the arena, which is registered in chunks of 40"):
        descriptors([Transfer(plan((36, 0, 8)), arena, space("the pool"))])
    # Neighbours are one run, but not over the border of a chunk.
    found = descriptors([Transfer(plan((20, 0, 10), (30, 10, 10), (40, 20, 10)), arena, space("the pool"))])
    assert found.sizes.tolist() == [20, 10]
    back = descriptors([Transfer(plan((0, 20, 10), (10, 30, 10), (20, 40, 10)), space("the pool"), arena)])
    assert back.sizes.tolist() == [20, 10]


def test_copies_of_one_call_know_of_each_other() -> None:
    pool, arena, other = space("the pool"), space("the arena"), space("another")
    with pytest.raises(PlanError, match="write the same bytes"):
        descriptors([Transfer(plan((0, 0, 10)), arena, pool), Transfer(plan((0, 5, 10)), other, pool)])
    with pytest.raises(PlanError, match="piece 1 reads what piece 0 writes"):
        descriptors([Transfer(plan((0, 0, 10)), arena, pool), Transfer(plan((9, 0, 10)), pool, other)])
    # Side by side is fine, and so is one source for two targets.
    assert (
        len(descriptors([Transfer(plan((0, 0, 10)), arena, pool), Transfer(plan((10, 0, 5)), pool, other)]))
        == 2
    )
    assert len(descriptors([Transfer(plan((0, 0, 10), (0, 50, 10)), arena, pool)])) == 2


def test_nothing_is_no_descriptor() -> None:
    pool, arena = space("the pool"), space("the arena")
    found = descriptors(
        [
            Transfer(plan((0, 0, 0), (5, 5, 5), (100, 7, 0)), arena, pool),
            Transfer(plan(), arena, pool),
            Move(torch.zeros(0), torch.zeros(0)),
        ]
    )
    assert found.sizes.tolist() == [5] and found.sources.tolist() == [arena.address + 5]
    assert len(descriptors([])) == 0


def test_alignment() -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    skew = -memory.data_ptr() % 16
    arena, pool = Space("the arena", memory[skew:]), Space("the pool", torch.zeros(512, dtype=torch.uint8)[:])
    begin = -pool.address % 16
    assert len(descriptors([Transfer(plan((16, begin, 32)), arena, pool)], alignment=16)) == 1
    for pieces in ((8, begin, 32), (16, begin + 4, 32), (16, begin, 24)):
        with pytest.raises(PlanError, match="does not lie on 16 bytes"):
            descriptors([Transfer(plan(pieces), arena, pool)], alignment=16)


def test_calls_have_a_bounded_number_of_pieces() -> None:
    count = 2 * MAX_DESCRIPTORS + 1
    big, other = space("big", 4 * count), space("other", 4 * count)
    pieces = CopyPlan.blocks(np.arange(count) * 4, np.arange(count)[::-1] * 4, 2)
    calls = list(descriptors([Transfer(pieces, big, other)]).calls())
    assert [len(call) for call in calls] == [MAX_DESCRIPTORS, MAX_DESCRIPTORS, 1]
    assert np.array_equal(
        np.concatenate([call.sources for call in calls]), big.address + np.arange(count) * 4
    )


def test_a_move_is_between_two_runs_of_as_many_bytes() -> None:
    with pytest.raises(PlanError, match="8 bytes into 4"):
        Move(torch.zeros(2), torch.zeros(1))
    with pytest.raises(PlanError, match="not one run"):
        Move(torch.zeros(4, 4)[:, :2], torch.zeros(8))
    source, target = torch.arange(6, dtype=torch.float32).view(2, 3), torch.zeros(3, 2)
    TorchEngine().submit([Move(source, target)])
    assert target.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    single = torch.zeros(())
    TorchEngine().submit([Move(torch.tensor(7.0), single)])
    assert single == 7
