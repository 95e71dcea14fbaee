"""Pools of states for tests: any shape, strides and dtype, with canaries between slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from kernels.table import PoolTable
from sglang_histate.config import CheckpointDtype

POISON = 0xA5


@dataclass(frozen=True)
class Shape:
    """Of a pool. `gap` bytes lie between a slot's state and the next one's, `shift` before the first."""

    layers: int
    slots: int
    temporal: tuple[int, int, int]
    conv: tuple[int, int]
    temporal_dtype: torch.dtype = torch.float32
    conv_dtype: torch.dtype = torch.bfloat16
    gap: int = 0
    shift: int = 0


def strided(
    layers: int, slots: int, row: tuple[int, ...], dtype: torch.dtype, gap: int, shift: int, device="cpu"
):
    """Return a tensor ``[layers, slots, *row]`` in poisoned memory, and that memory."""
    row_bytes = int(torch.tensor(row).prod()) * dtype.itemsize
    step = (row_bytes + gap + dtype.itemsize - 1) // dtype.itemsize
    first = -(-shift // dtype.itemsize)
    memory = torch.full(
        ((first + layers * slots * step + 16) * dtype.itemsize,), POISON, dtype=torch.uint8, device=device
    )
    inner, size = [], 1
    for length in reversed(row):
        inner.insert(0, size)
        size *= length
    view = memory.view(dtype).as_strided((layers, slots, *row), (slots * step, step, *inner), first)
    return view, memory


def empty(shape: Shape, device="cpu") -> tuple[PoolTable, tuple[torch.Tensor, torch.Tensor]]:
    """Return a poisoned pool and the memory under its two tensors."""
    args = (shape.layers, shape.slots)
    temporal, under = strided(*args, shape.temporal, shape.temporal_dtype, shape.gap, shape.shift, device)
    conv, under_conv = strided(*args, shape.conv, shape.conv_dtype, shape.gap, shape.shift, device)
    return PoolTable(temporal, conv), (under, under_conv)


def filled(shape: Shape, seed: int, top: float = 4.0) -> PoolTable:
    """Return a pool of random states on the CPU."""
    pool, _ = empty(shape)
    numbers = torch.Generator().manual_seed(seed)
    for tensor in (pool.temporal, pool.conv):
        tensor.copy_(torch.randn(tensor.shape, generator=numbers) * top)
    return pool


@st.composite
def shapes(draw, encoding: CheckpointDtype = CheckpointDtype.NATIVE) -> Shape:
    """Return small shapes with odd sizes, sometimes the shape of the register tile."""
    odd = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 70))
    temporal = draw(st.one_of(odd, odd, st.tuples(st.integers(1, 2), st.just(128), st.just(128))))
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
    return Shape(
        layers=draw(st.integers(1, 4)),
        slots=draw(st.integers(1, 5)),
        temporal=temporal,
        conv=draw(st.tuples(st.integers(1, 50), st.integers(1, 4))),
        temporal_dtype=draw(dtypes) if encoding is CheckpointDtype.NATIVE else torch.float32,
        conv_dtype=draw(dtypes),
        gap=draw(st.sampled_from([0, 0, 16, 48, 2, 4, 20])),
        shift=draw(st.sampled_from([0, 0, 16, 2, 4])),
    )
