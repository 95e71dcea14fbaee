"""Copies between two places of host memory: what the CPU engine moves states and pages with, on any thread.

A plain memory copy for each piece is the fastest there is as long as pieces are not tiny: it goes past the caches where
it is large. Many tiny pieces, such as single rows of a strided pool, are moved by index, all at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_histate.copy.engine import CopyEngine
from sglang_histate.copy.torch_engine import move, run_plan
from sglang_histate.copy.transfer import Copy, Move, Transfer

FEW_PIECES = 64
"""Up to so many, checking and copying them one by one costs less than calls on whole arrays (measured on one core)."""
LARGE_PIECE_BYTES = 4 << 10


class HostEngine(CopyEngine):
    """Done when `submit` returns. The interpreter is left to other threads while bytes are copied."""

    name = "cpu"

    def submit(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            if isinstance(copy, Move):
                move(copy)
            else:
                _run(copy)


def _run(copy: Transfer) -> None:
    plan, count = copy.plan, len(copy.plan.sizes)
    if count <= FEW_PIECES:
        pieces = list(zip(plan.sources.tolist(), plan.targets.tolist(), plan.sizes.tolist(), strict=True))
        if not _is_sound(copy, pieces):
            copy.check()  # says what is wrong
    else:
        copy.check()
        size = plan.piece_bytes
        if size is not None and size < LARGE_PIECE_BYTES:
            run_plan(plan, copy.source.flat, copy.target.flat)
            return
        pieces = list(plan.merged().pieces())
    source, target = copy.source.flat.numpy(), copy.target.flat.numpy()
    for start, to, size in pieces:
        target[to : to + size] = source[start : start + size]


def _is_sound(copy: Transfer, pieces: list[tuple[int, int, int]]) -> bool:
    """Return whether `copy.check` would find nothing wrong, for a few pieces."""
    source_bytes, target_bytes = copy.source.size_bytes, copy.target.size_bytes
    for start, to, size in pieces:
        if start < 0 or to < 0 or size < 0 or start + size > source_bytes or to + size > target_bytes:
            return False
    if len(pieces) > 1:
        end = 0
        for to, size in sorted((to, size) for _, to, size in pieces if size):
            if to < end:
                return False
            end = to + size
    return True
