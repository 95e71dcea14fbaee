"""Which writes the SSD takes while bytes per second, bytes per day or the writer itself are short.

Owns budget, floor and the measured time of writes; not the queue of writes, the index or the counters. What is
worth little is refused first: worth is what the caller says a record saves, in tokens of recomputation per byte.
Everything follows from the calls and from the time that the ranks agreed on, so all ranks refuse the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sglang_histate.policy.value_floor import ValueFloor
from sglang_histate.policy.write_budget import Grant, WriteBudget
from sglang_histate.policy.write_time import WriteTime

from .kinds import Key
from .layout import RecordLayout
from .operations import WriteOperation
from .reasons import PutResult
from .stats import WriteStats


@dataclass(frozen=True)
class WriteLimits:
    """None: no limit."""

    bytes_per_s: int | None = None
    bytes_per_day: int | None = None
    queue_age_s: float | None = None
    """How long a write may be expected to wait for those before it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Bytes that were given for one record. `value` in tokens per byte, None for one that is worth any price."""

    size_bytes: int
    value: float | None
    grant: Grant


class Admission:
    """Scheduler thread only."""

    def __init__(self, limits: WriteLimits, layout: RecordLayout) -> None:
        self.budget = WriteBudget(limits.bytes_per_s, limits.bytes_per_day, layout.slab_bytes)
        self.now_s = 0.0
        self._queue_age_s = limits.queue_age_s
        self._layout = layout
        self._floor = ValueFloor()
        self._time = WriteTime()

    def tick(self, now_s: float) -> None:
        """It is `now_s`, seconds since 1970, on every rank. It never falls."""
        self.now_s = now_s
        self.budget.advance(now_s)

    def claim(self, name: Key, size_bytes: int, value: float | None) -> Claim | PutResult:
        """Take the bytes for one write, or say why not."""
        # Also what cannot be had counts as offered: it tells what the bytes are worth.
        worth_it = value is None or self._floor.admits(name, value, size_bytes, self.budget.scarcity)
        shortage = self.budget.shortage(size_bytes)
        if shortage is not None:
            return PutResult(shortage.value)
        if not worth_it:
            return PutResult.LOW_VALUE
        return Claim(size_bytes, value, self.budget.take(size_bytes))

    @property
    def waits_for_time(self) -> bool:
        """Whether a later time would change an answer; if not, `tick` may be left out."""
        return self.budget.waits_for_time

    def only_daily(self) -> None:
        """Forget the other limits: they are for reads, and there will be none any more."""
        self.budget.bucket = None
        self._queue_age_s = None

    def logical(self) -> tuple[object, ...]:
        """Return what must be equal on every rank after the same calls."""
        bucket = self.budget.bucket
        return (
            self.now_s,
            None if bucket is None else bucket.level,
            self.budget.state(),
            self._time.s_per_byte,
        )

    def stats(self, writes: Iterable[WriteOperation]) -> WriteStats:
        budget, bucket = self.budget, self.budget.bucket
        return WriteStats(
            bytes_per_s=None if bucket is None else bucket.rate,
            burst_bytes=None if bucket is None else bucket.burst,
            bytes_now=None if bucket is None else int(bucket.level),
            bytes_per_day=budget.today.cap,
            bytes_today=budget.today.taken,
            price=budget.scarcity,
            wait_s=self.wait_s(writes),
        )

    def give_back(self, claim: Claim) -> None:
        """It is not written after all."""
        self.budget.give_back(claim.grant)

    def submitted(self, write: WriteOperation, queued: bool) -> None:
        """`write` goes to the writer; `queued`: others are on their way already."""
        write.submitted_s = self.now_s
        self._time.submitted(self.now_s, queued)

    def committed(self, writes: Iterable[WriteOperation], queued: bool) -> None:
        """`writes` were committed in this step; `queued`: others are still on their way."""
        size_bytes = sum(map(self._size, writes))
        if size_bytes:
            self._time.committed(self.now_s, size_bytes, queued)

    def wait_s(self, writes: Iterable[WriteOperation]) -> float:
        """Return how long one more write is expected to wait for the uncommitted `writes`, oldest first."""
        pending = list(writes)
        oldest_s = pending[0].submitted_s if pending else None
        return self._time.wait_s(self.now_s, sum(map(self._size, pending)), oldest_s)

    def crowded_out(
        self, writes: Iterable[WriteOperation], value: float | None
    ) -> WriteOperation | PutResult | None:
        """Return None if one more write need not wait too long, else the write that should go for it, or QUEUE_AGE.

        The one that is worth least goes, not the newest: one of `writes` (uncommitted, oldest first) or the one more. The
        oldest stays: it is most likely being written. So does what is being read from memory.
        """
        if self._queue_age_s is None:
            return None
        pending = list(writes)
        if self.wait_s(pending) <= self._queue_age_s:
            return None
        queued = [write for write in pending[1:] if write.abandoned is None and not write.entry.pins]
        least = min(queued, key=lambda write: _rank(write.value), default=None)
        if least is None or _rank(least.value) >= _rank(value):
            return PutResult.QUEUE_AGE
        return least

    def _size(self, write: WriteOperation) -> int:
        """What has to be written. Of what was abandoned, nothing: at most it ends what it has begun."""
        entry = write.entry
        return 0 if write.abandoned is not None else self._layout.transfer_bytes(entry.kind, entry.n_pages)


def _rank(value: float | None) -> float:
    return float("inf") if value is None else value
