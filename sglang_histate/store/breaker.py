"""Gives a root a rest after several failures in a row, and tries it again later.

One breaker guards the writes of a root, another one its reads. It is closed as long as all is well. After
`failures` committed operations in a row failed it opens: the root is left alone until `pause_puts` puts went
without it or, with `tick`, `pause_s` seconds have passed. Then one try at a time is let through: a write that
comes along, or a read made for the purpose. If it fails, the breaker is open for another pause; if it
succeeds, the breaker closes.

It never reads a clock. What changes it are committed outcomes, puts and the time that the caller's ranks have
agreed on, so that it opens and closes at the same moment on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    TRYING = "trying"  # the pause is over: the next try decides


@dataclass(frozen=True)
class BreakerStats:
    """`reason` is what this rank saw of the failure that opened it last; other ranks may have seen another."""

    state: BreakerState
    times_opened: int
    reason: str | None
    failed_in_a_row: int


class Breaker:
    """Scheduler thread only. `record` says what a committed operation came to, `tick` and `put` end a pause."""

    def __init__(self, failures: int, pause_puts: int, pause_s: float) -> None:
        self._limit = failures
        self._pause_puts = pause_puts
        self._pause_s = pause_s
        self._state = BreakerState.CLOSED
        self._failed_in_a_row = 0
        self._puts_left = 0
        self._since_s: float | None = None  # when the pause began, as far as `tick` has seen
        self._tried = False  # a try is under way
        self._times_opened = 0
        self._reason: str | None = None

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def is_closed(self) -> bool:
        return self._state is BreakerState.CLOSED

    @property
    def wants_try(self) -> bool:
        """The pause is over and no try is under way."""
        return self._state is BreakerState.TRYING and not self._tried

    @property
    def admits(self) -> bool:
        """Say whether an operation may go on now."""
        return self.is_closed or self.wants_try

    def begin(self) -> bool:
        """Take note of an operation that `admits` let through; return whether it is the try."""
        self._tried = not self.is_closed
        return self._tried

    def put(self) -> None:
        """A put goes without this root."""
        if self._state is BreakerState.OPEN:
            self._puts_left -= 1
            if self._puts_left <= 0:
                self._state = BreakerState.TRYING

    def tick(self, now_s: float) -> None:
        """`now_s`: seconds from any start, the same on every rank. If they go back, the pause starts again."""
        if self._state is not BreakerState.OPEN:
            return
        if self._since_s is None or now_s < self._since_s:
            self._since_s = now_s
        elif now_s - self._since_s >= self._pause_s:
            self._state = BreakerState.TRYING

    def record(self, ok: bool, reason: str | None = None, *, was_try: bool = False) -> BreakerState | None:
        """Take note of one committed operation; return OPEN or CLOSED if it opened or closed the breaker.

        The end of another pause without success is not reported: it opened before.
        """
        if was_try:
            self._tried = False
        if ok:
            self._failed_in_a_row = 0
            if self.is_closed:
                return None
            self._state = BreakerState.CLOSED
            return self._state
        self._failed_in_a_row += 1
        if self.is_closed and self._failed_in_a_row >= self._limit:
            self._times_opened += 1
            self._reason = reason
            self._pause()
            return self._state
        if was_try and self._state is BreakerState.TRYING:
            self._pause()
        return None

    def forget_try(self) -> None:
        """The try ended without a verdict: its record was dropped before."""
        self._tried = False

    def stats(self) -> BreakerStats:
        return BreakerStats(self._state, self._times_opened, self._reason, self._failed_in_a_row)

    def logical_state(self) -> tuple[object, ...]:
        """Return what must be equal on every rank."""
        return self._state.value, self._failed_in_a_row, self._puts_left, self._since_s, self._tried

    def _pause(self) -> None:
        self._state = BreakerState.OPEN
        self._puts_left = self._pause_puts
        self._since_s = None
        self._tried = False
