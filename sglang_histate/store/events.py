"""Log lines of the store: one per kind of event and ten seconds, so that a dying disk does not fill the log.

Nothing but logging depends on the clock that is read here.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

_log = logging.getLogger("sglang_histate.store")
INTERVAL_S = 10.0


class EventLog:
    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warn(self, kind: str, message: str, *arguments: object) -> None:
        """Log a warning unless one of the same `kind` was logged within the last ten seconds."""
        now = time.monotonic()
        if now - self._last_s.get(kind, -INTERVAL_S) < INTERVAL_S:
            self._left_out[kind] += 1
            return
        self._last_s[kind] = now
        more = self._left_out.pop(kind, 0)
        _log.warning(message + (f" [{more} more like this since the last line]" if more else ""), *arguments)
