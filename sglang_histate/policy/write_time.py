"""How long a new write would wait: what is queued, at the speed of the last writes.

The ranks must refuse the same writes, so the speed is not measured where a write ends, but from the times that
all ranks agreed on: between two steps in both of which writes were waiting, the disks were busy all the time,
and what was committed in between is what the slowest one has done. Where the queue ran empty in between, the
time is only an upper bound, and can only correct the average downwards.
"""

from __future__ import annotations

NEW_WEIGHT = 0.3
"""How much one measurement moves the average: it follows a disk that gets slow within a few writes."""
WARM_UP = 3
"""Measurements before which the average counts for nothing."""


class WriteTime:
    """Times are agreed seconds that never fall. A write is submitted, then committed, in order."""

    def __init__(self) -> None:
        self.s_per_byte = 0.0
        self._measured = 0
        self._busy_since_s = 0.0

    def submitted(self, now_s: float, queued: bool) -> None:
        """A write was submitted; `queued`: others were on their way already."""
        if not queued:
            self._busy_since_s = now_s

    def committed(self, now_s: float, size_bytes: int, queued: bool) -> None:
        """Writes of `size_bytes` > 0 in all were committed in this step; `queued`: others are still on their way."""
        found = max(0.0, now_s - self._busy_since_s) / size_bytes
        self._busy_since_s = now_s
        if not queued:
            self.s_per_byte = min(self.s_per_byte, found)
            return
        weight = NEW_WEIGHT if self._measured else 1.0
        self.s_per_byte += (found - self.s_per_byte) * weight
        self._measured += 1

    def wait_s(self, now_s: float, queued_bytes: int, oldest_s: float | None) -> float:
        """Return how long a write submitted now is expected to wait for those before it.

        Args:
            queued_bytes: of all writes submitted and not committed.
            oldest_s: when the oldest of them was submitted, None if there is none. A disk that hangs commits
                nothing: then only the age of that write tells.
        """
        age = 0.0 if oldest_s is None else now_s - oldest_s
        expected = queued_bytes * self.s_per_byte if self._measured >= WARM_UP else 0.0
        return max(age, expected)
