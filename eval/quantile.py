"""Quantiles of a list of values, as all tables but the bootstrap's use them."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile with linear interpolation between the neighbours.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values have no quantile")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
