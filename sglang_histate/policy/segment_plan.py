"""The checkpoints of a new segment where later requests are expected to part from it.

Candidates are the pages below the segment's end, the edges of the prior's bins, and an even grid: a bounded number
however long the segment is. Positions are in pages of the grid, savings and prices in pages too.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglang_histate.policy.greedy_plan import greedy_plan
from sglang_histate.policy.hit_prior import TAIL_PAGES, HitPrior, bin_edges

GRID_PLACES = 16
"""Evenly spread candidates, for hits of which only the number is known."""


def plan_segment(
    prior: HitPrior, start: int, end: int, price: float, given: Iterable[int] = ()
) -> tuple[int, ...]:
    """Return the pages of a segment after which to keep a checkpoint, beside the given ones.

    Args:
        prior: what was learned so far.
        start: page where the segment begins.
        end: its last whole page; the checkpoint there is not chosen here.
        price: pages that a checkpoint has to save over all requests to come.
        given: pages that get one in any case.
    """
    if end - start < 2:
        return ()
    tail = max(end - TAIL_PAGES, start + 1)
    length = end - start
    found = {start + 1, *range(tail, end), *bin_edges(start, tail)}
    found.update(start + length * part // GRID_PLACES for part in range(1, GRID_PLACES))
    found.update(page for page in given if start < page < end)
    found.discard(start)
    places = sorted(page for page in found if start < page < end)
    uniform = prior.inside() / length
    hits = []
    for index, page in enumerate(places):
        if page >= tail:
            hits.append(prior.below_end(end - page))
        else:
            following = places[index + 1] if index + 1 < len(places) else tail
            hits.append(prior.at_depth(page, uniform) * (following - page))
    return greedy_plan(places, hits, start, price, sorted(page for page in given if start < page < end))
