"""Where the sessions that clients give a name ended last. Nothing is kept alive by it.

    ends.ended(name, place, own=True)      # an answer of the session is complete
    ends.forget(name)                      # it is over: where it ended

A name is whatever tells sessions apart, the tenant included. A place is what the caller has there; it may be gone by the
time that somebody asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

MOST_SESSIONS = 4096
"""Sessions that are remembered; the one that answered longest ago is forgotten first."""


@dataclass(frozen=True)
class End:
    """`own`: the session brought something that was not there before; otherwise another one may have ended at the same place."""

    place: Any
    own: bool


class SessionEnds:
    """See the module docstring. `most`: sessions."""

    __slots__ = ("_at", "_ends", "_most")

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._most = most
        self._ends: OrderedDict[Hashable, End] = OrderedDict()
        self._at: dict[Any, int] = {}  # place -> sessions that ended there

    def __contains__(self, name: Hashable) -> bool:
        return name in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def ended(self, name: Hashable, place: Any, *, own: bool) -> None:
        """An answer of the session is complete. What it brought to the same place before stays its own."""
        before = self.forget(name)
        own = own or (before is not None and before.place == place and before.own)
        self._ends[name] = End(place, own)
        self._at[place] = self._at.get(place, 0) + 1
        if len(self._ends) > self._most:
            self.forget(next(iter(self._ends)))

    def find(self, name: Hashable) -> End | None:
        """Return where the session ended, None if that is not known."""
        return self._ends.get(name)

    def forget(self, name: Hashable) -> End | None:
        """Return the same, and know it no longer."""
        end = self._ends.pop(name, None)
        if end is not None:
            self._at[end.place] -= 1
            if not self._at[end.place]:
                del self._at[end.place]
        return end

    def any_at(self, place: Any) -> bool:
        """Return whether a session that is remembered ended there."""
        return place in self._at

    def clear(self) -> None:
        self._ends.clear()
        self._at.clear()
