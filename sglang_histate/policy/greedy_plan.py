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
        if index >= 0 and places[index] == place:
            insort(taken, index)
    fixed = set(taken)
    gaps = [_best_between(places, after, start, taken, index) for index in range(len(taken))]
    chosen: list[int] = []
    while len(chosen) < MOST_CHECKPOINTS:
        where = max(range(len(gaps)), key=lambda index: (gaps[index][0], -index))
        saves, index = gaps[where]
        if index < 0 or saves <= price or saves <= 0:
            break
        taken.insert(where + 1, index)
        chosen.append(index)
        gaps[where] = _best_between(places, after, start, taken, where)
        gaps.insert(where + 1, _best_between(places, after, start, taken, where + 1))
    return tuple(places[index] for index in sorted(set(chosen) - fixed))


def _best_between(
    places: Sequence[int], after: Sequence[float], start: int, taken: Sequence[int], where: int
) -> tuple[float, int]:
    """Return what the best candidate behind taken[where] and before the next one saves, and which it is (-1: none)."""
    low = taken[where]
    high = taken[where + 1] if where + 1 < len(taken) else len(places)
    if high - low < 2:
        return 0.0, -1
    before = start if low < 0 else places[low]
    rest = after[high]
    saves = [
        (place - before) * (hits - rest)
        for place, hits in zip(places[low + 1 : high], after[low + 1 : high], strict=True)
    ]
    best = max(saves)
    return best, low + 1 + saves.index(best)
