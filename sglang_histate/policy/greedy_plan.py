"""Which positions of a segment get a checkpoint, given where hits are expected and what a checkpoint costs.

The expected saving of a set S of positions is the sum over hit positions h of (hits expected at h) times (distance
from the segment's start, or the checkpoint before, to the deepest of S at or before h). Positions are added one by
one, the one that saves most first, while it saves more than a checkpoint costs. The saving is submodular and monotone,
so the greedy set of a size saves at least 63 % of what the best of that size saves; tests hold it against the exact optimum
of saving minus cost.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

MOST_CHECKPOINTS = 64
"""In one segment. More are no help to a hit, and each has to be written."""


def greedy_plan(
    places: Sequence[int], hits: Sequence[float], start: int, price: float, given: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the chosen places, ascending, without the given ones.

    Args:
        places: candidates in tokens, strictly ascending, all after `start`.
        hits: hits expected from each place up to the next one, the last up to the segment's end; as many as places.
        start: where the segment begins: there is a checkpoint, or it is the start of the sequence.
        price: what a checkpoint has to save, in tokens, > 0 or 0.
        given: places that get a checkpoint in any case.
    """
    after = [0.0]
    for count in reversed(hits):
        after.append(after[-1] + count)
    after.reverse()  # after[i]: hits at place i or behind
    taken = [-1]
    for place in given:
        index = bisect_right(places, place) - 1
        if index >= 0 and places[index] == place and index not in taken:
            insort(taken, index)
    gaps: list[_Gap] = []
    for low, high in pairwise([*taken, len(places)]):
        _add_gap(gaps, places, after, start, low, high, price)
    chosen: list[int] = []
    while gaps and len(chosen) < MOST_CHECKPOINTS:
        _, low, best, high = heappop(gaps)
        chosen.append(best)
        _add_gap(gaps, places, after, start, low, best, price)
        _add_gap(gaps, places, after, start, best, high, price)
    return tuple(places[index] for index in sorted(chosen))


_Gap = tuple[float, int, int, int]
"""Between two taken candidates: what its best one saves, negative; the one before, the best, the one behind. Of equal ones
the first in the segment comes first."""


def _add_gap(
    gaps: list[_Gap],
    places: Sequence[int],
    after: Sequence[float],
    start: int,
    low: int,
    high: int,
    price: float,
) -> None:
    """Add the gap between the candidates `low` (-1: the segment's start) and `high`, unless nothing in it pays."""
    if high - low < 2:
        return
    before = start if low < 0 else places[low]
    rest = after[high]
    saves = [
        (place - before) * (hits - rest)
        for place, hits in zip(places[low + 1 : high], after[low + 1 : high], strict=True)
    ]
    best = max(saves)
    if best > price and best > 0:
        heappush(gaps, (-best, low, low + 1 + saves.index(best), high))
