"""How values are distributed: counts by bucket and their sum. Only grows; no clock, no thread of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds that tell a good drive from a bad one and a read from a wait for one."""


class Distribution:
    """Values up to and including `bounds[i]` and above the bound before are in `counts[i]`, larger ones in the last."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds ascend"
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.heard: Callable[[float], None] | None = None
        """Called with each value that is added."""

    def add(self, value: float) -> None:
        """Count `value`; a negative one, which only a clock that was set back can give, counts as 0."""
        value = max(value, 0.0)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        if self.heard is not None:
            self.heard(value)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def as_json(self) -> dict[str, object]:
        """Return count, sum and the cumulative counts by upper bound, as a Prometheus histogram has them."""
        total, buckets = 0, {}
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets["+Inf" if bound == float("inf") else str(bound)] = total
        return {"count": total, "sum": self.sum, "buckets": buckets}
