"""Which sessions are kept longer because a client asked for it. Never for ever, and never more than a share of a tier.

A kept session ranks as if it were used again some requests from now, so it decays like any other from there; it still
goes when there is nothing else. What is asked for beyond the share is not kept. Times are ticks of the logical clock. A
place is whatever names a session's end, an owner a session that has a name, None one without; positions are those of the
checkpoints that are kept.

    retention = Retention(limit_bytes=tiers' smallest // 4)
    granted = retention.keep(place, (2048,), token_bytes=t, state_bytes=s, now=now, requests=200, owner=owner)
    retention.until(place, 2048)       # what it is kept until, 0 if it is not
    retention.release(owner)           # what has to be ranked anew
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

MOST_REQUESTS = 1000
"""Ticks for which a session can be kept."""

SLEEP_REQUESTS = 500
"""Ticks for which a session is kept that says no more than that it is about to sleep."""

FORK_REQUESTS = 50
"""Ticks for which a session is kept for each request that is said to go on from it."""

SHARE = 4
"""A quarter of the smallest tier may be kept."""

MOST_KEPT = 512
"""Sessions that can be kept at a time, however small: each hint looks at all of them."""

Owner = Any
Place = Any
Spot = tuple[Place, int]
"""A place, and the position of a checkpoint at or before it."""


@dataclass(frozen=True)
class Forks:
    """Requests that are expected: `left` of them, each begins with the `position` tokens that `key` names."""

    position: int
    key: bytes
    left: int


class Granted(NamedTuple):
    """`dropped`: what was kept for the same owner before."""

    until: int
    dropped: tuple[Spot, ...]


@dataclass(frozen=True)
class _Kept:
    until: int
    token_bytes: int
    state_bytes: int
    positions: tuple[int, ...]
    forks: Forks | None
    below: tuple[Place, Owner] | None = None  # while that is kept it has the tokens too


class Retention:
    """`limit_bytes` for all that is kept at a time."""

    __slots__ = ("_expecting", "_kept", "_limit")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._kept: dict[tuple[Place, Owner], _Kept] = {}
        self._expecting: tuple[tuple[Place, Owner], ...] = ()  # those of them with forks

    def keep(
        self,
        place: Place,
        positions: tuple[int, ...],
        *,
        token_bytes: int,
        state_bytes: int,
        now: int,
        requests: int,
        owner: Owner = None,
        above: Collection[Place] = (),
        forks: Forks | None = None,
    ) -> Granted | None:
        """Keep `place`, with `token_bytes` of KV before it and `state_bytes` of checkpoints; None if there is no room for it.

        A session with a name is kept once: it replaces what was kept for it. One without is kept for the longest that
        was asked. `above`: places on the way to this one, whose tokens count only once.

        Raises:
            ValueError: no bytes, or no requests.
        """
        if min(token_bytes, state_bytes) < 0 or token_bytes + state_bytes <= 0 or requests <= 0:
            raise ValueError(f"{token_bytes} + {state_bytes} bytes cannot be kept for {requests} requests")
        until = now + min(requests, MOST_REQUESTS)
        name = (place, owner)
        kept: dict[tuple[Place, Owner], _Kept] = {}
        dropped: list[Spot] = []
        for other, one in self._kept.items():
            if one.until <= now:
                continue
            if other[1] == owner and (owner is not None or other[0] == place):
                dropped += [(other[0], position) for position in one.positions]
                if owner is None and one.until > until:
                    until, forks = one.until, one.forks
                continue
            kept[other] = replace(one, below=name) if other[0] == place or other[0] in above else one
        kept[name] = _Kept(until, token_bytes, state_bytes, positions, forks)
        if len(kept) > MOST_KEPT or _bytes(kept) > self._limit:
            return None
        self._take(kept)
        return Granted(until, tuple(dropped))

    def until(self, place: Place, position: int) -> int:
        """Return until when the checkpoint at a place is kept, 0 if it is not (any more, since something was said of it)."""
        found = [
            one.until
            for (where, _), one in self._kept.items()
            if where == place and position in one.positions
        ]
        return max(found, default=0)

    def release(self, owner: Owner, place: Place = None) -> tuple[Spot, ...]:
        """Return what is not kept any more: all for a session with a name, what has none at `place`."""
        if owner is None:
            return self._drop([name for name in self._kept if name == (place, None)])
        return self._drop([name for name in self._kept if name[1] == owner])

    def began(self, now: int, begins_with: Callable[[int, bytes], bool]) -> tuple[Spot, ...]:
        """Count a request into the forks that it is one of; return what need not be kept any more.

        `begins_with`: whether so many of its first tokens are those that the key names.
        """
        complete: list[tuple[Place, Owner]] = []
        for name in self._expecting:
            one = self._kept[name]
            forks = one.forks
            assert forks is not None
            if one.until <= now or not begins_with(forks.position, forks.key):
                continue
            self._kept[name] = replace(one, forks=replace(forks, left=forks.left - 1))
            if forks.left == 1:
                complete.append(name)
        return self._drop(complete)

    def clear(self) -> None:
        self._take({})

    @property
    def bytes(self) -> int:
        """Bytes that were asked to be kept and have not run out yet, as of the last `keep`."""
        return _bytes(self._kept)

    def _drop(self, names: Collection[tuple[Place, Owner]]) -> tuple[Spot, ...]:
        if not names:
            return ()
        dropped = [(name[0], position) for name in names for position in self._kept[name].positions]
        self._take({name: one for name, one in self._kept.items() if name not in names})
        return tuple(dropped)

    def _take(self, kept: dict[tuple[Place, Owner], _Kept]) -> None:
        self._kept = kept
        self._expecting = tuple(name for name, one in kept.items() if one.forks is not None)


def _bytes(kept: dict[tuple[Place, Owner], _Kept]) -> int:
    return sum(one.state_bytes + (0 if one.below in kept else one.token_bytes) for one in kept.values())
