"""Which token positions of a segment get an interior checkpoint, and which of them each prefill chunk passes.

Owns positions only. The interval comes from `interval`; the capture code turns positions into kernel rows.
The end of the segment is not planned here: its checkpoint is always captured (arXiv:2610.41508). Chunk
boundaries are given, never moved: a plan is cut to fit the chunks, not the other way round.

All positions are absolute, in tokens from the start of the sequence; "the state at p" has read the
first p tokens.

    plan = plan_positions(start, end, interval, grid)           # once per segment
    part = positions_in_chunk(plan, chunk_start, chunk_end)     # once per forward
    # capture part.capture; count part.misaligned
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from sglang_histate.policy.interval import NO_INTERVAL, STEP_TOKENS


class ChunkPlan(NamedTuple):
    """The planned positions inside one prefill chunk, absolute, in tokens, ascending."""

    capture: tuple[int, ...]
    """Positions a whole number of 64-token steps past the chunk's start: the kernel has their state."""
    misaligned: tuple[int, ...]
    """Positions between two steps of this chunk: the kernel keeps no state there, the caller counts them."""


def plan_positions(start: int, end: int, interval: int, grid: int) -> tuple[int, ...]:
    """Return the interior checkpoints of the segment from `start` to `end`, ascending and without repeats.

    They are start + k * interval for k >= 1, each rounded down to a multiple of `grid`, and lie strictly
    between `start` and `end`. `start` and the grid are multiples of 64, hence every distance from `start` is
    one too. With an interval that is a multiple of `grid` (see `interval.check_grid`) nothing is rounded and
    the spacing is exact.

    Args:
        start: absolute position where the segment begins, a multiple of `grid`.
        end: absolute position where it ends, exclusive, any number >= start.
        interval: tokens between checkpoints, or `NO_INTERVAL` for no interior checkpoint.
        grid: least common multiple of 64 and the page size, in tokens.

    Raises:
        ValueError: grid is no positive multiple of 64, start is off the grid or negative, end lies before
            start, or interval is negative.
    """
    if grid <= 0 or grid % STEP_TOKENS:
        raise ValueError(f"grid {grid} is not a positive multiple of {STEP_TOKENS}")
    if start < 0 or start % grid:
        raise ValueError(f"segment start {start} is not on the grid of {grid} tokens")
    if end < start:
        raise ValueError(f"segment end {end} lies before its start {start}")
    if interval < 0:
        raise ValueError(
            f"interval {interval} is negative: use a number of tokens, or {NO_INTERVAL} for none"
        )
    if interval == NO_INTERVAL:
        return ()
    rounded = (p - p % grid for p in range(start + interval, end, interval))
    return tuple(dict.fromkeys(p for p in rounded if p > start))


def positions_in_chunk(plan: Sequence[int], chunk_start: int, chunk_end: int) -> ChunkPlan:
    """Return the positions p of an ascending `plan` with chunk_start < p <= chunk_end, split by alignment.

    A state exactly at a chunk's end belongs to the chunk that computes it, not to the next one. Kernels keep
    their states relative to the start of the chunk they run, so only (p - chunk_start) % 64 == 0 can be
    captured; a chunk end off these steps is reported as misaligned too, although the chunk leaves its state.

    Raises:
        ValueError: chunk_end lies before chunk_start.
    """
    if chunk_end < chunk_start:
        raise ValueError(f"chunk end {chunk_end} lies before its start {chunk_start}")
    inside = plan[bisect_right(plan, chunk_start) : bisect_right(plan, chunk_end)]
    return ChunkPlan(
        capture=tuple(p for p in inside if (p - chunk_start) % STEP_TOKENS == 0),
        misaligned=tuple(p for p in inside if (p - chunk_start) % STEP_TOKENS),
    )
