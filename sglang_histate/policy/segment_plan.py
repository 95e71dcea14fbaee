"""The checkpoints of a new segment where later requests are expected to part from it.

Candidates are the pages below the segment's end, the edges of the prior's bins, an even grid, and places that are given
with the hits expected there (where messages begin): a bounded number however long the segment is. Positions are in pages of the grid, savings and prices in pages too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise

from sglang_histate.policy.greedy_plan import greedy_plan
from sglang_histate.policy.hit_prior import TAIL_PAGES, HitPrior, bin_edges

GRID_PLACES = 16
"""Evenly spread candidates for a segment that lies in few bins."""


def plan_segment(
    prior: HitPrior,
    start: int,
    end: int,
    price: float,
    given: Iterable[int] = (),
    places: Iterable[tuple[int, float]] = (),
) -> tuple[int, ...]:
    """Return the pages of a segment after which to keep a checkpoint, beside the given ones.

    Args:
        prior: what was learned so far.
        start: page where the segment begins.
        end: its last whole page; the checkpoint there is not chosen here.
        price: pages that a checkpoint has to save over all requests to come.
        given: pages that get one in any case.
        places: (page, hits expected there beside those of `prior`), in any order; those outside the segment are ignored.
    """
    if end - start < 2:
        return ()
    tail = max(end - TAIL_PAGES, start + 1)
    length = end - start
    edges = bin_edges(max(start, 1), tail)
    fixed = sorted(page for page in given if start < page < end)
    more: dict[int, float] = {}
    for page, expected in places:
        if start < page < end:
            more[page] = more.get(page, 0.0) + expected
    found = {start + 1, *range(tail, end), *edges, *fixed, *more}
    if len(edges) < GRID_PLACES:
        found.update(start + length * part // GRID_PLACES for part in range(1, GRID_PLACES))
        found.discard(start)
    pages = sorted(found)
    inner = bisect_left(pages, tail)
    depths = prior.at_depths(pages[:inner], prior.inside() / length)
    # Of each place up to the next one; the last before the tail goes up to the tail.
    hits = [rate * (after - page) for rate, (page, after) in zip(depths, pairwise(pages), strict=False)]
    hits += [prior.below_end(end - page) for page in pages[inner:]]
    if more:
        hits = [count + more.get(page, 0.0) for page, count in zip(pages, hits, strict=True)]
    return greedy_plan(pages, hits, start, price, fixed)
