"""What a thread does for the store, and how it is given up when it takes too long.

Owns the hand-over between the scheduler thread and the thread that works: who may still touch the buffer, and
whose word on the outcome counts. Knows neither records nor disks.

    waiting -> running -> finished
       |          |
       +----------+--> given up: finished for the scheduler, while a thread may hang in a call for ever

A system call cannot be called back, so a task that was given up keeps its buffer until `running` is False.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

Reason = TypeVar("Reason", bound=StrEnum)


@dataclass(eq=False, kw_only=True)
class Task(Generic[Reason]):
    """One piece of work. `failure` is None after success; it counts once `finished` is True and never changes then."""

    failure: Reason | None = field(default=None, init=False)
    finished: bool = field(default=False, init=False)
    given_up: bool = field(default=False, init=False)
    steps: int = field(default=0, init=False)
    """Grows with each piece that is done. Written by the thread."""
    made_s: float = field(default_factory=time.monotonic, init=False, repr=False)
    begun_s: float | None = field(default=None, init=False, repr=False)
    """When a thread began, None if none did."""
    ended_s: float = field(default=0.0, init=False, repr=False)
    _threads: int = field(default=0, init=False, repr=False)
    _sealed: int = field(default=0, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def running(self) -> bool:
        """A thread may touch the buffer."""
        return self._threads > 0

    def begin(self) -> bool:
        """Thread: start; False if it was given up before, then do nothing. `finish` or `leave` must follow."""
        with self._lock:
            if not self.given_up:
                self._threads += 1
                if self.begun_s is None:
                    self.begun_s = time.monotonic()
            return not self.given_up

    def leave(self) -> None:
        """Thread: this one touches nothing any more; others go on."""
        with self._lock:
            self._threads -= 1

    def finish(self, failure: Reason | None) -> None:
        """Thread: leave with the last word. Of a task that was given up, it is not heard."""
        with self._lock:
            self._threads = max(0, self._threads - 1)
            if not self.given_up:
                self._end(failure)

    @contextmanager
    def sealed(self) -> Iterator[bool]:
        """Thread: what is done inside has effects outside of the buffer. False if it was given up, then do nothing.

        While a thread is inside, nobody gives it up.
        """
        with self._lock:
            allowed = not self.given_up
            self._sealed += allowed
        try:
            yield allowed
        finally:
            with self._lock:
                self._sealed -= allowed

    def give_up(self, failure: Reason) -> bool:
        """Scheduler: count it as failed from now on; False if it has finished or must not be disturbed now."""
        with self._lock:
            if self.finished or self._sealed:
                return False
            self.given_up = True
            self._end(failure)
            return True

    def _end(self, failure: Reason | None) -> None:
        self.ended_s = time.monotonic()
        self.failure = failure
        self.finished = True  # last: others look at it without the lock

    def succeeded(self) -> bool:
        """Say what this rank reports about a finished task."""
        return self.failure is None
