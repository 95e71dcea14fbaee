"""Plans of checkpoints and KV on pools of every shape: each byte goes where it belongs, and no other byte changes."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_histate.copy.checkpoints import CheckpointPlans, Direction, PoolPart, layer_groups
from sglang_histate.copy.cpu_engine import HostEngine
from sglang_histate.copy.kv_pages import KvPlans, extent_plan
from sglang_histate.copy.plan import PlanError
from sglang_histate.copy.rows import DeviceRows
from sglang_histate.copy.torch_engine import TorchEngine
from sglang_histate.copy.transfer import Space, Transfer, descriptors

CANARY = 0xC7


def aligned(size: int) -> int:
    return -(-size // 16) * 16


@dataclass
class Pool:
    """A device's pool as bytes: for each layer temporal and window rows; what lies between them is canaries."""

    memory: np.ndarray
    temporal: list[torch.Tensor]
    conv: list[torch.Tensor]

    @classmethod
    def separate(cls, layers: int, slots: int, temporal: int, conv: int) -> Pool:
        """As two tensors ``[L, slots, bytes]`` one after the other, like SGLang's plain pool."""
        size = layers * slots * (temporal + conv)
        memory = np.full(size + 64, CANARY, dtype=np.uint8)
        flat = torch.from_numpy(memory)
        cut = 32 + layers * slots * temporal
        a = flat[32:cut].view(layers, slots, temporal)
        b = flat[cut : cut + layers * slots * conv].view(layers, slots, conv)
        return cls(memory, list(a), list(b))

    @classmethod
    def envelopes(cls, layers: int, slots: int, temporal: int, conv: int) -> Pool:
        """As one entry for each slot with all layers in it and padding behind, like a unified pool."""
        entry = layers * (temporal + conv) + 48
        memory = np.full(slots * entry + 64, CANARY, dtype=np.uint8)
        flat = torch.from_numpy(memory)[32 : 32 + slots * entry].view(slots, entry)
        starts = [layer * (temporal + conv) for layer in range(layers)]
        return cls(
            memory,
            [flat[:, start : start + temporal] for start in starts],
            [flat[:, start + temporal : start + temporal + conv] for start in starts],
        )

    def parts(self, segment: int, offset: int) -> list[list[PoolPart]]:
        return [
            [
                PoolPart(DeviceRows.of(a, "states"), layer * segment),
                PoolPart(DeviceRows.of(b, "windows"), layer * segment + offset),
            ]
            for layer, (a, b) in enumerate(zip(self.temporal, self.conv, strict=True))
        ]


def run_by_driver(copies: list[Transfer]) -> None:
    """As a driver does: by address, in calls of at most 7 pieces."""
    for call in descriptors(copies).calls(7):
        for source, target, size in zip(call.sources, call.targets, call.sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(size))


def run_by_torch(copies: list[Transfer]) -> None:
    TorchEngine().submit(copies)


def run_on_host(copies: list[Transfer]) -> None:
    HostEngine().submit(copies)


RUNNERS = {"driver": run_by_driver, "torch": run_by_torch, "host": run_on_host}


@settings(max_examples=120, deadline=None)
@given(
    layers=st.integers(1, 5),
    slots=st.integers(1, 6),
    temporal=st.sampled_from([16, 48, 240, 1024, 40 << 10]),
    conv=st.integers(1, 77),
    tp=st.sampled_from([1, 2, 4]),
    unified=st.booleans(),
    page_bytes=st.sampled_from([64, 100, 352, 4096, None]),
    runner=st.sampled_from(sorted(RUNNERS)),
    data=st.data(),
)
def test_checkpoints_there_and_back(
    layers, slots, temporal, conv, tp, unified, page_bytes, runner, data
) -> None:
    """`page_bytes` None: a record, which is one run. Rank shapes are those of one rank divided."""
    temporal, conv = max(16, temporal // tp), max(1, conv // tp)
    pool = (Pool.envelopes if unified else Pool.separate)(layers, slots, temporal, conv)
    offset = aligned(temporal)
    segment = offset + aligned(conv)
    image = layers * segment
    page_bytes = image if page_bytes is None else page_bytes
    per_object = -(-image // page_bytes)
    rows = np.array(data.draw(st.permutations(range(slots))), dtype=np.int64)[
        : data.draw(st.integers(1, slots))
    ]
    held = data.draw(st.permutations(range(len(rows) * per_object + 2)))[: len(rows) * per_object]
    arena = np.full((len(rows) * per_object + 2) * page_bytes, CANARY, dtype=np.uint8)
    host = Space("the arena", torch.from_numpy(arena))
    starts = np.array(held, dtype=np.int64).reshape(len(rows), per_object) * page_bytes
    plans = CheckpointPlans(pool.parts(segment, offset), page_bytes)
    draw = np.random.default_rng(layers * 1000 + temporal)
    for of_layer in (*pool.temporal, *pool.conv):
        for row in rows.tolist():
            of_layer[row] = torch.from_numpy(draw.integers(0, 256, of_layer.shape[1], dtype=np.uint8))
    before = pool.memory.copy()
    groups = layer_groups(layers, data.draw(st.integers(1, 3)))
    assert [layer for group in groups for layer in group] == list(range(layers))
    for group in groups:
        RUNNERS[runner](plans.transfers(host, starts, rows, group, Direction.TO_HOST))
    assert (pool.memory == before).all()
    expected = np.full_like(arena, CANARY)
    for number, row in enumerate(rows.tolist()):
        whole = np.full(per_object * page_bytes, CANARY, dtype=np.uint8)
        for layer in range(layers):
            at = layer * segment
            whole[at : at + temporal] = pool.temporal[layer][row].numpy()
            whole[at + offset : at + offset + conv] = pool.conv[layer][row].numpy()
        for page, start in enumerate(starts[number].tolist()):
            expected[start : start + page_bytes] = whole[page * page_bytes : (page + 1) * page_bytes]
    assert (arena == expected).all()
    pool.memory[:] = CANARY
    order = [int(i) for i in draw.permutation(len(rows))]
    for group in groups:
        RUNNERS[runner](plans.transfers(host, starts[order], rows[order], group, Direction.TO_DEVICE))
    assert (arena == expected).all()
    canaries = np.ones(len(before), dtype=bool)
    base = pool.memory.ctypes.data
    for of_layer in (*pool.temporal, *pool.conv):
        for row in rows.tolist():
            start = of_layer[row].data_ptr() - base
            canaries[start : start + of_layer.shape[1]] = False
    assert (pool.memory[canaries] == CANARY).all()
    assert (pool.memory[~canaries] == before[~canaries]).all()


def test_rows_beyond_four_gibibytes() -> None:
    """The first and the last slot of a pool of 5 GiB, of which only the pages that are touched exist."""
    slots, temporal = 2560, 2 << 20
    memory = mmap.mmap(-1, slots * temporal, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(slots, temporal)
    plans = CheckpointPlans([[PoolPart(DeviceRows.of(pool, "states"), 0)]], 1 << 20)
    arena = np.zeros(4 << 20, dtype=np.uint8)
    rows = np.array([slots - 1, 0])
    pool[slots - 1] = 9
    pool[0, :100] = 5
    starts = np.array([[3, 0], [1, 2]]) << 20
    (copy,) = plans.transfers(
        Space("the arena", torch.from_numpy(arena)), starts, rows, range(1), Direction.TO_HOST
    )
    assert int(copy.plan.sources.max()) > 1 << 32
    for run in RUNNERS.values():
        arena[:] = 0
        run([copy])
        assert (arena[3 << 20 :] == 9).all() and (arena[: 1 << 20] == 9).all()
        assert (arena[1 << 20 :][:100] == 5).all() and arena[(1 << 20) + 100] == 0


def test_a_model_without_windows() -> None:
    pool = torch.arange(64, dtype=torch.uint8).view(1, 4, 16)
    plans = CheckpointPlans([[PoolPart(DeviceRows.of(pool[0], "states"), 0)]], 16)
    record = np.zeros(16, dtype=np.uint8)
    run_by_driver(
        plans.transfers(
            Space("a record", torch.from_numpy(record)),
            np.zeros((1, 1), dtype=np.int64),
            np.array([2]),
            range(1),
            Direction.TO_HOST,
        )
    )
    assert record.tolist() == list(range(32, 48))


def test_one_record_for_several_slots_and_not_the_other_way_round() -> None:
    pool = torch.zeros(1, 4, 16, dtype=torch.uint8)
    plans = CheckpointPlans([[PoolPart(DeviceRows.of(pool[0], "states"), 0)]], 16)
    record = Space("a record", torch.full((16,), 3, dtype=torch.uint8))
    starts, rows = np.zeros((2, 1), dtype=np.int64), np.array([1, 3])
    for run in RUNNERS.values():
        pool.zero_()
        run(plans.transfers(record, starts, rows, range(1), Direction.TO_DEVICE))
        assert pool[0].sum(dim=1).tolist() == [0, 48, 0, 48]
    for run in RUNNERS.values():
        with pytest.raises(PlanError, match="write the same bytes"):
            run(plans.transfers(record, starts, rows, range(1), Direction.TO_HOST))


def test_a_layout_that_cannot_be() -> None:
    rows = DeviceRows.of(torch.zeros(4, 32, dtype=torch.uint8), "states")
    with pytest.raises(PlanError, match="overlap at byte 16"):
        CheckpointPlans([[PoolPart(rows, 0), PoolPart(rows, 16)]], 64)
    with pytest.raises(PlanError, match="begins at byte 40, not on 16 bytes"):
        CheckpointPlans([[PoolPart(rows, 0), PoolPart(rows, 40)]], 64)
    plans = CheckpointPlans([[PoolPart(rows, 0), PoolPart(rows, 32)]], 32)
    with pytest.raises(PlanError, match="2 pages in an object of 1"):
        plans.transfers(
            Space("x", torch.zeros(64, dtype=torch.uint8)),
            np.zeros((1, 1), dtype=np.int64),
            np.array([0]),
            range(1),
            Direction.TO_HOST,
        )


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 3),
    row=st.sampled_from([8, 24, 4096]),
    page=st.sampled_from([1, 4, 16]),
    strided=st.booleans(),
    runner=st.sampled_from(sorted(RUNNERS)),
    data=st.data(),
)
def test_kv_pages_there_and_back(layers, row, page, strided, runner, data) -> None:
    pages, gap = 5, 8 if strided else 0
    rows = [
        [torch.full((pages * page, row + gap), CANARY, dtype=torch.uint8)[:, :row] for _ in "kv"]
        for _ in range(layers)
    ]
    page_bytes = 2 * layers * row * page
    plans = KvPlans([[DeviceRows.of(half, "KV") for half in both] for both in rows], page, page_bytes)
    count = data.draw(st.integers(1, pages))
    mine = np.array(data.draw(st.permutations(range(pages)))[:count], dtype=np.int64)
    theirs = np.array(data.draw(st.permutations(range(pages + 1)))[:count], dtype=np.int64)
    tokens = (mine[:, None] * page + np.arange(page)).ravel()
    arena = np.full((pages + 1) * page_bytes, CANARY, dtype=np.uint8)
    host = Space("the arena", torch.from_numpy(arena))
    draw = torch.Generator().manual_seed(row)
    for both in rows:
        for half in both:
            half[tokens] = torch.randint(0, 256, (len(tokens), row), dtype=torch.uint8, generator=draw)
    wanted = [[half.clone() for half in both] for both in rows]
    for layer in range(layers):
        RUNNERS[runner](plans.transfers(host, theirs, tokens, layer, Direction.TO_HOST))
    for number, to in enumerate(theirs.tolist()):
        found = arena[to * page_bytes :][:page_bytes].reshape(layers, 2, page, row)
        for layer, both in enumerate(wanted):
            for half in range(2):
                source = both[half][int(mine[number]) * page :][:page].numpy()
                assert (found[layer, half] == source).all()
    for to in set(range(pages + 1)) - set(theirs.tolist()):
        assert (arena[to * page_bytes :][:page_bytes] == CANARY).all()
    for both in rows:
        for half in both:
            half[tokens] = 0
    for layer in range(layers):
        RUNNERS[runner](plans.transfers(host, theirs, tokens, layer, Direction.TO_DEVICE))
    for both, same in zip(rows, wanted, strict=True):
        for half, one in zip(both, same, strict=True):
            assert torch.equal(half, one)
            if strided:
                whole = half.as_strided((pages * page, row + gap), (row + gap, 1))
                assert (whole[:-1, row:] == CANARY).all()


@given(data=st.data())
def test_an_extent_there_and_back(data) -> None:
    page_bytes, pages = 48, data.draw(st.lists(st.integers(0, 9), max_size=6, unique=True))
    places = data.draw(st.permutations(range(8)))[: len(pages)]
    arena = torch.randint(0, 256, (10 * page_bytes,), dtype=torch.uint8)
    extent = torch.full((8 * page_bytes,), CANARY, dtype=torch.uint8)
    there, back = Space("the arena", arena), Space("an extent", extent)
    plan = extent_plan(pages, places, page_bytes)
    run_by_driver([Transfer(plan, there, back)])
    before = arena.clone()
    for page, place in zip(pages, places, strict=True):
        assert torch.equal(extent.view(8, -1)[place], arena.view(10, -1)[page])
    assert (extent.view(8, -1)[[i for i in range(8) if i not in places]] == CANARY).all()
    for page in pages:
        arena.view(10, -1)[page] = 0
    run_by_torch([Transfer(plan.reversed(), back, there)])
    assert torch.equal(arena, before)
