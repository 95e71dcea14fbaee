"""Stops writing after several failed writes in a row, and tries again later.

Counts, never reads a clock: the ranks must open and close it at the same put. After `failures` committed
writes in a row failed, the next `refused_puts` puts are refused; the one after that is let through. If it
fails too, the breaker is open again at once; one committed success closes it for good. Reads are not
affected.
"""

from __future__ import annotations


class Breaker:
    def __init__(self, failures: int, refused_puts: int) -> None:
        self._limit = failures
        self._pause = refused_puts
        self._failed_in_a_row = 0
        self._still_refused = 0

    @property
    def is_open(self) -> bool:
        return self._still_refused > 0

    def admits(self) -> bool:
        """Say whether this put may go on. A refused one counts towards the end of the pause."""
        if self._still_refused == 0:
            return True
        self._still_refused -= 1
        return False

    def record(self, ok: bool) -> bool:
        """Take note of one committed write; return True if it opened the breaker."""
        if ok:
            self._failed_in_a_row = 0
            return False
        self._failed_in_a_row += 1
        if self._failed_in_a_row < self._limit or self.is_open:
            return False
        self._still_refused = self._pause
        return True
