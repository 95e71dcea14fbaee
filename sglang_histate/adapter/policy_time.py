"""How long the scheduler thread is in HiState's own code: two looks at a clock around each call, by what it is for.

What SGLang's tree tells the ranking while it changes (some microseconds a node) is inside SGLang's own calls and not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Any


class Part(Enum):
    TICK = "tick"  # what has ended on disk and device becomes visible
    LOOKUP = "lookup"  # what a waiting request could resume from, and the start of its reads
    PLAN = "plan"  # what a forward pass captures, and what its requests resumed from
    PUBLISH = "publish"  # checkpoints get their place in the tree
    EVICT = "evict"  # what goes next, and its going
    EXPLAIN = "explain"  # what is said about requests


class PolicyTime:
    """Seconds by part. A call inside of another one counts for the outer one. Scheduler thread only."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = dict.fromkeys(Part, 0.0)
        self._clock = clock
        self._inside = False

    def run(self, part: Part, call: Callable[..., Any], *args: Any) -> Any:
        """Return ``call(*args)`` and count how long it takes."""
        if self._inside:
            return call(*args)
        self._inside = True
        start = self._clock()
        try:
            return call(*args)
        finally:
            self._inside = False
            self.seconds[part] += max(0.0, self._clock() - start)
