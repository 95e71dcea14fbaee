"""How much of the host tier is kept ready to be given away at once: free, or *clean* (the SSD has it too).

Evictions never wait for a write, so what one step takes has to be there before the step. Two marks: below the low one
the reserve is filled up to the high one. Both are shares of the tier, and follow the largest recent step where that is
large next to the tier, for a single long prompt can be.
"""

from __future__ import annotations

LOW_SHARE, HIGH_SHARE, MOST_SHARE = 1 / 8, 1 / 4, 3 / 4
"""Shares of the tier: low mark, high mark, and what no mark exceeds."""

LOW_STEPS, HIGH_STEPS = 1.5, 2.5
"""The marks as multiples of the largest recent step."""

HALF_LIFE = 64
"""Requests after which a step counts half: long enough for a session to come back, short enough to forget a burst."""


class Reserve:
    """The marks for a tier of `total` pages.

    Raises:
        ValueError: `total` is not positive.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a tier of {total} pages has no reserve")
        self._total = total
        self._largest = 0  # pages that one step took, halved every HALF_LIFE requests
        self._halved_at = 0

    def step(self, taken: int, clock: int) -> None:
        """Count a step that took `taken` pages at request number `clock`; clocks do not fall."""
        while self._largest and clock - self._halved_at >= HALF_LIFE:
            self._largest //= 2
            self._halved_at += HALF_LIFE
        if taken >= self._largest:
            self._largest, self._halved_at = taken, clock

    @property
    def low(self) -> int:
        """Pages below which the reserve is filled up."""
        return self._mark(LOW_SHARE, LOW_STEPS)

    @property
    def high(self) -> int:
        """Pages up to which it is."""
        return self._mark(HIGH_SHARE, HIGH_STEPS)

    def duplicates(self, free: int, host_only: int, device: int) -> int:
        """Return how many pages the device should let go of that the host has too.

        While both have them they cannot leave the host. What can, and what is free, is to be the low mark at least: else
        a read for one long prompt finds no room, or pushes out what the SSD does not have yet. A host that is smaller than the
        device always is full of copies, and letting go of them would only make the cache smaller.

        Args:
            free: free pages of the tier.
            host_only: pages of KV that the tier has and the device has not.
            device: pages that the device has room for.
        """
        return max(self.low - free - host_only, 0) if device <= self._total else 0

    def _mark(self, share: float, steps: float) -> int:
        return int(min(max(self._total * share, self._largest * steps), self._total * MOST_SHARE))
