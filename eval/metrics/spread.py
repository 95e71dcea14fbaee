"""Mean and percentiles, one rule for all: linear interpolation at rank q * (n - 1) of the sorted values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.50, 0.95, 0.99)
COLUMNS = ("mean", "p50", "p95", "p99")


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of times in seconds; None where there was nothing to measure."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None


def spread(values: Iterable[float]) -> Spread:
    """The mean and the percentiles of `values`, in any order."""
    ordered = np.sort(np.fromiter(values, dtype=np.float64))
    if not len(ordered):
        return Spread(None, None, None, None)
    return Spread(*(float(one) for one in statistics(ordered)))


def statistics(ordered: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean, p50, p95 and p99 (shape [4], as `COLUMNS`) of values that are sorted; NaN for no values."""
    if not len(ordered):
        return np.full(len(COLUMNS), np.nan)
    ranks = np.array(QUANTILES) * (len(ordered) - 1)
    below = np.floor(ranks).astype(np.int64)
    above = np.minimum(below + 1, len(ordered) - 1)
    quantiles = ordered[below] + (ranks - below) * (ordered[above] - ordered[below])
    return np.concatenate(([ordered.mean()], quantiles))
