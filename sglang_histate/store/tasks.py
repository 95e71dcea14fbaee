"""What a thread does for the store, and how it is given up when it takes too long.

Owns the hand-over between the scheduler thread and the thread that works: who may still touch the buffer, and
whose word on the outcome counts. Knows neither records nor disks.

    waiting -> running -> [sealed ->] finished
       |          |
       +----------+--> given up: finished for the scheduler, while the thread may hang in a call for ever

A system call cannot be called back, so a task that was given up keeps its buffer until `running` is False.
"""

from __future__ import annotations

import threading
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
    running: bool = field(default=False, init=False)
    steps: int = field(default=0, init=False)
    """Grows with each piece that is done. Written by the thread."""
    _sealed: bool = field(default=False, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def begin(self) -> bool:
        """Thread: start; False if it was given up before, then do nothing."""
        with self._lock:
            self.running = not self.given_up
            return self.running

    def seal(self) -> bool:
        """Thread: what follows has effects outside of the buffer. False if it was given up; else nobody can any more."""
        with self._lock:
            self._sealed = not self.given_up
            return self._sealed

    def finish(self, failure: Reason | None) -> None:
        """Thread: the last word, after which the thread touches nothing. Of a task that was given up, it is not heard."""
        with self._lock:
            self.running = False
            if not self.given_up:
                self.failure = failure
                self.finished = True

    def give_up(self, failure: Reason) -> bool:
        """Scheduler: count it as failed from now on; False if it has finished or is about to."""
        with self._lock:
            if self.finished or self._sealed:
                return False
            self.given_up = True
            self.failure = failure
            self.finished = True
            return True

    def succeeded(self) -> bool:
        """Say what this rank reports about a finished task."""
        return self.failure is None
