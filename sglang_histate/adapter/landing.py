"""A place in host memory that a reader thread copies to, and that may be taken away before it does."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Landing:
    """After `cancel` returns, nothing is copied any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False

    def cancel(self) -> None:
        """The memory belongs to somebody else again. Waits for a copy that is under way."""
        with self._lock:
            self._cancelled = True

    def copy(self, copy: Callable[[], None]) -> None:
        """Any thread: run `copy`, unless the place is gone."""
        with self._lock:
            if not self._cancelled:
                copy()
