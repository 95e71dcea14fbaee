"""Runs copy plans with torch alone, on any device: the way that always works.

Large pieces are copied one by one, each an ordinary contiguous copy (on CUDA an asynchronous one if the host side is
pinned). Small pieces, such as single rows of a strided pool, would cost more in calls than in bytes: they are gathered
and scattered by index, through a contiguous buffer where the two sides are different devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch

from sglang_histate.copy.engine import CopyEngine
from sglang_histate.copy.plan import CopyPlan, Offsets
from sglang_histate.copy.transfer import Copy, Move, flat_bytes

# From here on a copy of its own is faster than an element-wise one by index (measured on one core).
LARGE_PIECE_BYTES = 32 << 10
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TorchEngine(CopyEngine):
    """For a device whose driver cannot be called directly."""

    name = "torch"

    def submit(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            if isinstance(copy, Move):
                move(copy)
            else:
                copy.check()
                run_plan(copy.plan, copy.source.flat, copy.target.flat)


def move(copy: Move) -> None:
    """Copy one run of bytes into another. Their shapes and dtypes need not be alike."""
    source, target = copy.source, copy.target
    if source.dtype is not target.dtype or source.shape != target.shape:
        source, target = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
    target.copy_(source, non_blocking=True)


def run_plan(plan: CopyPlan, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `plan`'s pieces from `source` to `target`, flat uint8 tensors. On CUDA all is queued on the current stream."""
    size = plan.piece_bytes
    if size is None or size >= LARGE_PIECE_BYTES or len(plan) < 3:
        _one_by_one(plan, source, target)
        return
    width = gcd(size, int(np.gcd.reduce(plan.sources)), int(np.gcd.reduce(plan.targets)), 8)
    rows_from = _as_rows(source, plan.sources, size, width)
    rows_to = _as_rows(target, plan.targets, size, width)
    if rows_from is None or rows_to is None:
        _one_by_one(plan, source, target)
        return
    if source.device == target.device:
        (from_rows, from_index), (to_rows, to_index) = rows_from, rows_to
        to_rows.index_copy_(0, to_index, from_rows.index_select(0, from_index))
    elif target.device.type == "cpu":
        _gather_then_copy(plan, rows_from, target)
    else:
        _copy_then_scatter(plan, source, rows_to)


_Rows = tuple[torch.Tensor, torch.Tensor]  # evenly spaced rows of words, and the row of each piece


def _gather_then_copy(plan: CopyPlan, rows_from: _Rows, target: torch.Tensor) -> None:
    """Pack the pieces where they are, then copy what is one run in the target."""
    rows, index = rows_from
    packed = rows.index_select(0, index)
    _one_by_one(CopyPlan(_packed(plan), plan.targets, plan.sizes), flat_bytes(packed), target)


def _copy_then_scatter(plan: CopyPlan, source: torch.Tensor, rows_to: _Rows) -> None:
    """Copy what is one run in the source into a packed buffer, then put the pieces in their places."""
    rows, index = rows_to
    packed = torch.empty((len(plan), rows.shape[1]), dtype=rows.dtype, device=rows.device)
    _one_by_one(CopyPlan(plan.sources, _packed(plan), plan.sizes), source, flat_bytes(packed))
    rows.index_copy_(0, index, packed)


def _packed(plan: CopyPlan) -> Offsets:
    return np.cumsum(plan.sizes) - plan.sizes


def _one_by_one(plan: CopyPlan, source: torch.Tensor, target: torch.Tensor) -> None:
    for start, to, size in plan.merged().pieces():
        target[to : to + size].copy_(source[start : start + size], non_blocking=True)


def _as_rows(flat: torch.Tensor, offsets: Offsets, size: int, width: int) -> _Rows | None:
    """View `flat` as evenly spaced rows of `size` bytes in words of `width`, and return the rows' numbers by piece.

    Returns None where the pieces are not on one grid without overlap.
    """
    base = int(offsets.min())
    steps = offsets - base
    step = int(np.gcd.reduce(steps)) or size
    if step < size:
        return None
    count = int(steps.max()) // step + 1
    span = flat[base : base + (count - 1) * step + size].view(_WORDS[width])
    rows = span.as_strided((count, size // width), (step // width, 1))
    return rows, torch.from_numpy(steps // step).to(flat.device)
