"""A time that is the same on all ranks, for what they have to decide alike.

Each rank says when it started and how long ago that is by a clock that only goes forward; the least of both, over all
ranks, make the time. It never falls and does not jump when the wall clock is set while the server runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang_histate.store import CheckpointStore


class AgreedTime:
    """`mine` goes into the ranks' agreement on the least numbers, the result into `seconds`."""

    COUNT = 2
    """How many numbers `mine` has."""

    def __init__(
        self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._started_ms = int(wall() * 1000)
        self._began_s = monotonic()

    def mine(self) -> list[int]:
        """Return milliseconds since the start, and the start in milliseconds since 1970."""
        return [int((self._monotonic() - self._began_s) * 1000), self._started_ms]

    @staticmethod
    def seconds(agreed: Sequence[int]) -> float:
        """Return the seconds since 1970."""
        passed_ms, started_ms = agreed
        return (started_ms + passed_ms) / 1000


def agree_on_written(store: CheckpointStore, agreement: Any) -> None:
    """Let the daily cap go on with what the ranks wrote before the restart: of the latest day, the most of any rank.

    `agreement.minimum` as in `RankAgreement`. Every rank must call it in the same step, before the first tick.
    """
    day, written = store.written_before
    latest = -agreement.minimum([-day])[0]
    most = -agreement.minimum([-written if day == latest else 0])[0]
    store.admission.budget.restore(latest, most)
