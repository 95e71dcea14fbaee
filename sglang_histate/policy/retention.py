"""Which sessions are kept longer because a client asked for it. Never for ever, and never more than a share of a tier.

A kept session ranks as if it were used again some requests from now, so it decays like any other from there; it still
goes when there is nothing else. What is asked for beyond the share is not kept. Times are ticks of the logical clock.

    retention = Retention(limit_bytes=tiers' smallest // 4)
    until = retention.keep(place, size_bytes, now, requests)      # None: too much is kept already
    retention.release(place)
"""

from __future__ import annotations

from typing import Any

MOST_REQUESTS = 1000
"""Ticks for which a session can be kept."""

SHARE = 4
"""A quarter of the smallest tier may be kept."""


class Retention:
    """`limit_bytes` for all that is kept at a time. A place is whatever names a session's end."""

    __slots__ = ("_kept", "_limit")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._kept: dict[Any, tuple[int, int]] = {}  # place -> until, bytes

    def keep(self, place: Any, size_bytes: int, now: int, requests: int) -> int | None:
        """Return until when `place` is kept; None if there is no room for it. A place that is kept is kept anew.

        Raises:
            ValueError: no bytes, or no requests.
        """
        if size_bytes <= 0 or requests <= 0:
            raise ValueError(f"{size_bytes} bytes cannot be kept for {requests} requests")
        self._kept = {name: kept for name, kept in self._kept.items() if kept[0] > now}
        if self.bytes - self._kept.get(place, (0, 0))[1] + size_bytes > self._limit:
            return None
        until = now + min(requests, MOST_REQUESTS)
        self._kept[place] = until, size_bytes
        return until

    def shrink(self, place: Any, size_bytes: int) -> None:
        """The session went on: of what was kept here only so much is not part of its new end. Nothing if it was not kept."""
        kept = self._kept.get(place)
        if kept is not None:
            self._kept[place] = kept[0], min(kept[1], size_bytes)

    def release(self, place: Any) -> None:
        """The session is over."""
        self._kept.pop(place, None)

    def clear(self) -> None:
        self._kept.clear()

    @property
    def bytes(self) -> int:
        """Bytes that were asked to be kept and have not run out yet, as of the last `keep`."""
        return sum(size for _, size in self._kept.values())
