"""How many bytes may be written to the SSD: a rate with a burst, and a cap per UTC day.

The rate keeps reads fast, the cap keeps the drive alive: flash of 3.84 TB that may be written once a day for
five years takes 44 MB/s on average. Time is an argument, in seconds since 1970; the same calls with the same
times give the same answers on every rank.

    budget = WriteBudget(rate=200 << 20, daily=None, record_bytes=50 << 20)
    budget.advance(now_s)
    if budget.shortage(size) is None:
        grant = budget.take(size)           # budget.give_back(grant) if it is not written after all

Time stands still where a caller's time does not grow: nothing is refilled until it is past the latest one.
Callers who want this to be harmless pass a monotonic time (the adapter adds the seconds since start, which
all ranks agreed on, to the wall clock at the start, so a clock that is set while the server runs changes
nothing). Between two runs the clock may have been set. Set forward over midnight: a new day, with all its
bytes. Set back over midnight: the bytes of the day that was counted last stay counted, in the day that it is
now. So a wrong clock gives away at most one cap each time it crosses midnight, and never stops writes for
longer than until the next midnight.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

DAY_S = 86400
INFINITE = float("inf")
BURST_S = 5.0
"""Burst in seconds of the rate: what one long prompt leaves behind is written as it comes."""
LEAST_RECORDS = 4
"""The least burst in records of the largest size: a bucket that one record empties has no prices."""
SCARCE_BELOW = 1 / 2
"""The share of the burst below which bytes have a price."""
SCARCE_DAY = 1 / 4
"""The share of the day's bytes below which they have one, unless less of the day itself is left."""


class Shortage(StrEnum):
    """Why bytes are not given."""

    WRITE_BUDGET = "write_budget"
    DAILY_CAP = "daily_cap"


@dataclass(frozen=True, slots=True)
class Grant:
    """Bytes that were taken, and the day (since 1970) in which they count."""

    size_bytes: int
    day: int | None


def burst_bytes(rate: int, record_bytes: int) -> int:
    """Return the burst for a rate in bytes per second (0: none) and the size of the largest record."""
    return max(int(rate * BURST_S), LEAST_RECORDS * record_bytes) if rate else 0


class TokenBucket:
    """At most `rate` * t + `burst` bytes in any t seconds. Full at first. Bytes taken are never owed.

    Raises:
        ValueError: a negative rate or burst.
    """

    def __init__(self, rate: int, burst: int) -> None:
        if rate < 0 or burst < 0:
            raise ValueError(
                f"a rate of {rate} bytes per second with a burst of {burst} must not be negative"
            )
        self.rate = rate
        self.burst = burst
        self.level = float(burst)
        """Bytes that could be taken now."""
        self._at_s: float | None = None

    def advance(self, now_s: float) -> None:
        if self._at_s is None:
            self._at_s = now_s
        elif now_s > self._at_s:
            self.level = min(self.level + (now_s - self._at_s) * self.rate, float(self.burst))
            self._at_s = now_s

    def take(self, size_bytes: int) -> None:
        assert size_bytes <= self.level
        self.level -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.level = min(self.level + size_bytes, float(self.burst))

    @property
    def scarcity(self) -> float:
        """0 while the bucket is at least half full, 1 when it is empty."""
        if not self.burst:
            return 1.0
        return max(0.0, 1 - self.level / (self.burst * SCARCE_BELOW))


class DailyCap:
    """At most `cap` bytes in one UTC day; None only counts them.

    Raises:
        ValueError: a negative cap.
    """

    def __init__(self, cap: int | None) -> None:
        if cap is not None and cap < 0:
            raise ValueError(f"a cap of {cap} bytes per day must not be negative")
        self.cap = cap
        self.day: int | None = None
        """Days since 1970, None until the time is known."""
        self.taken = 0
        """Bytes in that day."""
        self._of_day_left = 1.0

    @property
    def left(self) -> float:
        return INFINITE if self.cap is None else max(0, self.cap - self.taken)

    def advance(self, now_s: float) -> None:
        day = int(now_s // DAY_S)
        if self.day is not None and day > self.day:
            self.taken = 0
        # A day before the one that was counted takes over its bytes; see the module docstring.
        self.day = day
        self._of_day_left = 1 - now_s % DAY_S / DAY_S

    @property
    def scarcity(self) -> float:
        """0 while at least a quarter of the cap is left, or as much of it as of the day; 1 when nothing is."""
        if self.cap is None:
            return 0.0
        if not self.left:
            return 1.0
        reserve = min(SCARCE_DAY, self._of_day_left) * self.cap
        return 0.0 if self.left >= reserve else 1 - self.left / reserve

    def is_near(self, size_bytes: int) -> bool:
        """Whether bytes have a price, or may have one at another time of the day, or `size_bytes` are too many."""
        return self.cap is not None and self.left < max(self.cap * SCARCE_DAY, size_bytes)


class WriteBudget:
    """Both limits. None for either: it does not limit."""

    def __init__(self, rate: int | None, daily: int | None, record_bytes: int) -> None:
        """`rate` in bytes per second (0: nothing is ever written), `daily` in bytes; `record_bytes`: the largest record.

        Raises:
            ValueError: a negative size.
        """
        self.bucket = None if rate is None else TokenBucket(rate, burst_bytes(rate, record_bytes))
        self.today = DailyCap(daily)
        self._record_bytes = record_bytes

    @property
    def waits_for_time(self) -> bool:
        """Whether a later time would change an answer: a caller may leave `advance` out while it would not."""
        if self.bucket is not None and self.bucket.rate and self.bucket.level < self.bucket.burst:
            return True
        return self.today.is_near(self._record_bytes)

    def advance(self, now_s: float) -> None:
        """It is `now_s`, seconds since 1970."""
        if self.bucket is not None:
            self.bucket.advance(now_s)
        self.today.advance(now_s)

    def shortage(self, size_bytes: int) -> Shortage | None:
        """Return why `size_bytes` could not be taken now, None if they could."""
        if size_bytes > self.today.left:
            return Shortage.DAILY_CAP
        if self.bucket is not None and size_bytes > self.bucket.level:
            return Shortage.WRITE_BUDGET
        return None

    @property
    def room(self) -> int:
        """How many records of the largest size could be taken now; -1 for any number."""
        level = INFINITE if self.bucket is None else self.bucket.level
        bytes_now = min(level, self.today.left)
        return -1 if bytes_now == INFINITE else int(bytes_now // self._record_bytes)

    @property
    def scarcity(self) -> float:
        """The price of a byte, 0 (free) to 1: that of the limit that is nearer."""
        return max(self.today.scarcity, 0.0 if self.bucket is None else self.bucket.scarcity)

    def take(self, size_bytes: int) -> Grant:
        """Take bytes of which there is no shortage."""
        if self.bucket is not None:
            self.bucket.take(size_bytes)
        self.today.taken += size_bytes
        return Grant(size_bytes, self.today.day)

    def give_back(self, grant: Grant) -> None:
        """What was taken is not written. The bytes of another day stay counted: that day is over."""
        if self.bucket is not None:
            self.bucket.give_back(grant.size_bytes)
        if grant.day == self.today.day:
            self.today.taken -= grant.size_bytes

    def state(self) -> tuple[int, int]:
        """Return the day since 1970 and the bytes taken in it, for `restore` after a restart."""
        return self.today.day or 0, self.today.taken

    def restore(self, day: int, taken: int) -> None:
        """Go on counting where an earlier run ended. Call it before the first `advance`.

        The bucket starts full all the same: a restart is worth one burst.
        """
        if taken > 0:
            self.today.day, self.today.taken = day, taken
