"""Finds what breaks every prompt at the same place: a date or an id near the head that changes with each request.

One such break costs its request all that follows; a standing one costs every request, and only the client can end it.
So it is worth one sentence to the operator, and not more than one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

TIMES = 3
"""Breaks at one place before it is called standing: two can be one session that was edited twice."""

WIDTH = 16
"""Tokens: nearer breaks are at one place. Two ids may begin alike by chance."""

PLACES = 64
"""Places that are remembered; the one that broke least recently is forgotten."""

EXAMPLES = 3


@dataclass
class StandingBreak:
    """A place where prompts of one tenant differ for a few tokens and then go on alike.

    `position` is the earliest of the breaks, in tokens; `lost_tokens` what all of them had to compute again after it
    though it was alike.
    """

    namespace: bytes
    position: int
    place: str | None
    times: int = 0
    lost_tokens: int = 0
    examples: list[str] = field(default_factory=list)  # request ids, the first ones

    @property
    def standing(self) -> bool:
        return self.times >= TIMES


class StandingBreaks:
    """Counts breaks by place."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, StandingBreak] = OrderedDict()
        self._made = 0

    def observe(
        self, namespace: bytes, position: int, place: str | None, lost_tokens: int, rid: str
    ) -> StandingBreak | None:
        """Count one break; return the place when it has just become a standing one, else None."""
        number, found = next(
            (
                (number, seen)
                for number, seen in reversed(self._seen.items())
                if seen.namespace == namespace and abs(seen.position - position) <= WIDTH
            ),
            (0, None),
        )
        if found is None:
            self._made += 1
            number, found = self._made, StandingBreak(namespace, position, place)
            self._seen[number] = found
            if len(self._seen) > PLACES:
                self._seen.popitem(last=False)
        self._seen.move_to_end(number)
        if position < found.position:
            found.position, found.place = position, place
        found.times += 1
        found.lost_tokens += lost_tokens
        if len(found.examples) < EXAMPLES:
            found.examples.append(rid)
        return found if found.times == TIMES else None

    def standing(self) -> list[StandingBreak]:
        """Return the places that are standing ones, the latest first."""
        return [seen for seen in reversed(self._seen.values()) if seen.standing]

    def forget(self, namespace: bytes | None) -> None:
        """Forget the places of a tenant, or (None) all."""
        gone = [n for n, seen in self._seen.items() if namespace is None or seen.namespace == namespace]
        for number in gone:
            del self._seen[number]
