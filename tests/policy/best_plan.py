"""What a plan of checkpoints saves, and the exact optimum: what `greedy_plan` is held against."""

from __future__ import annotations

from collections.abc import Sequence


def saving(places: Sequence[int], hits: Sequence[float], start: int, chosen: Sequence[int]) -> float:
    """Return the tokens that the chosen places are expected to save."""
    total, before = 0.0, start
    wanted = set(chosen)
    for place, count in zip(places, hits, strict=True):
        if place in wanted:
            before = place
        total += count * (before - start)
    return total


def best_plan(
    places: Sequence[int], hits: Sequence[float], start: int, price: float
) -> tuple[float, tuple[int, ...]]:
    """Return the largest saving minus price and a set that has it. O(n ** 2) for n places."""
    n = len(places)
    after = [0.0] * (n + 1)
    for index in range(n - 1, -1, -1):
        after[index] = after[index + 1] + hits[index]
    # worth[i]: the most that is to be had behind place i - 1, if that is a checkpoint (0: the start is)
    worth, step = [0.0] * (n + 1), [-1] * (n + 1)
    for last in range(n, -1, -1):
        before = start if last == 0 else places[last - 1]
        for index in range(last, n):
            gain = (places[index] - before) * after[index] - price + worth[index + 1]
            if gain > worth[last]:
                worth[last], step[last] = gain, index
    chosen, at = [], 0
    while step[at] >= 0:
        chosen.append(places[step[at]])
        at = step[at] + 1
    return worth[0], tuple(chosen)
