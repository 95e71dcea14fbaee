"""Why tokens were computed again although their KV was there: no request could resume behind them, for a reason.

    note / stored    while checkpoints come and go: why the SSD has none at a position
    attribute        when a request is admitted: which tokens it computes again, and why

A request resumes at the deepest checkpoint that it can have. Of the positions behind that, the deepest one that had a
checkpoint, or should have got one, takes the blame for all tokens up to it: had it been there, none of them would have
been computed again. The tokens behind it had no checkpoint planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_histate.adapter.counters import Miss, Why
from sglang_histate.store import DropReason, MissReason, PutResult

_OF_PUT = {
    PutResult.NO_SLAB: Why.NO_SLAB,
    PutResult.BAD_VICTIM: Why.NO_SLAB,
    PutResult.NO_BUFFER: Why.NO_BUFFER,
    PutResult.WRITE_BUDGET: Why.WRITE_LIMITS,
    PutResult.DAILY_CAP: Why.WRITE_LIMITS,
    PutResult.LOW_VALUE: Why.WRITE_LIMITS,
    PutResult.QUEUE_AGE: Why.WRITE_LIMITS,
    PutResult.BREAKER_OPEN: Why.DISK_DOWN,
    PutResult.QUARANTINED: Why.QUARANTINED,
}
_OF_DROP = {
    DropReason.EVICTED: Why.EVICTED,
    DropReason.PURGED: Why.PURGED,
    DropReason.QUARANTINED: Why.QUARANTINED,
    DropReason.QUEUE_AGE: Why.WRITE_LIMITS,
    DropReason.ABORTED: Why.ABORTED,
    DropReason.ROOT_DOWN: Why.DISK_DOWN,
    DropReason.READ_FAILED: Why.READ_FAILED,
    DropReason.WRITE_FAILED: Why.WRITE_FAILED,
}
_OF_READ = {
    MissReason.ROOT_DOWN: Why.DISK_DOWN,
    MissReason.WRONG_FINGERPRINT: Why.FINGERPRINT,
    **dict.fromkeys(
        (
            MissReason.CORRUPT_HEADER,
            MissReason.CORRUPT_SEGMENT,
            MissReason.CORRUPT_PAGE,
            MissReason.WRONG_KIND,
            MissReason.WRONG_KEY,
            MissReason.WRONG_GENERATION,
            MissReason.WRONG_LENGTH,
            MissReason.NOT_FINITE,
        ),
        Why.DAMAGED,
    ),
}
OF_MISS = {
    Miss.NO_ROOM: Why.NO_ROOM,
    Miss.NO_HOST_KV: Why.NO_HOST_ROOM,
    Miss.DEADLINE: Why.DEADLINE,
    Miss.RETRIES: Why.RETRIES,
}
"""For a checkpoint that is there: what became of the last try to read it for this request."""

REMEMBERED = 1 << 15
"""Positions whose reason is kept, some 5 MiB: more than the checkpoints that most drives hold. What is older counts as
never captured."""


class Absences:
    """Why the SSD has no checkpoint under a key. Scheduler thread only; the oldest are forgotten."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._why: dict[bytes, Why] = {}

    def __len__(self) -> int:
        return len(self._why)

    def note(self, key: bytes, why: Why) -> None:
        self._why.pop(key, None)
        if len(self._why) >= self._most:
            del self._why[next(iter(self._why))]
        self._why[key] = why

    def refused(self, key: bytes, result: PutResult) -> None:
        """The store did not take the checkpoint `key`."""
        why = _OF_PUT.get(result)
        if why is not None:
            self.note(key, why)

    def dropped(self, key: bytes, reason: DropReason) -> None:
        """The checkpoint `key` has left the store."""
        why = _OF_DROP.get(reason)
        if why is not None:
            self.note(key, why)

    def unreadable(self, key: bytes, reason: MissReason | None) -> None:
        """A read of the checkpoint `key` failed; `reason` is what this rank saw of it."""
        self.note(key, _OF_READ.get(reason, Why.READ_FAILED) if reason is not None else Why.READ_FAILED)

    def stored(self, key: bytes) -> None:
        """The store has the checkpoint `key`."""
        self._why.pop(key, None)

    def why(self, key: bytes) -> Why | None:
        return self._why.get(key)

    def clear(self) -> None:
        self._why.clear()


@dataclass(frozen=True)
class Recomputed:
    """The tokens from `start` to `end` of a prompt were computed again though their KV was there."""

    why: Why
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


def attribute(
    resumed: int, reusable: int, page_size: int, cause: Callable[[int], Why | None]
) -> tuple[Recomputed, ...]:
    """Return what is computed again between the position that a request resumes at and the end of its KV.

    `resumed` and `reusable` are tokens, multiples of `page_size`; `cause(position)` says why the request cannot resume at
    a position, None where no checkpoint was ever meant to be. The parts are in order, without a gap.
    """
    for position in range(reusable, resumed, -page_size):
        why = cause(position)
        if why is not None:
            blamed = Recomputed(why, resumed, position)
            if position == reusable:
                return (blamed,)
            return blamed, Recomputed(Why.NOT_CAPTURED, position, reusable)
    return (Recomputed(Why.NOT_CAPTURED, resumed, reusable),) if reusable > resumed else ()
