"""How often requests part at the beginning of each kind of part of a prompt, learned from where they did.

Clients cut where messages begin: compaction keeps the system prompt and the tools, a last message is edited, thinking is
left out, a tool result is blanked. So for each kind of place a rate of its own: of the segments that had one, how many
were later left there. Before anything is known a few hits are expected at the places that clients are known to cut at
(`PRIOR`); that counts as `PRIOR_SEGMENTS` segments. Counts decay. The same requests in the same order give the same numbers
on every rank; pages are those of the grid.

    for page, kind in segment_places(spans, start, end, grid):
        prior.seen(kind)
        prior.expected(kind)       # hits
    prior.parted(kind)             # a request left a text there
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from sglang_histate.policy.structure import HEAD_PARTS, Part, Span


class PlaceKind(StrEnum):
    """Where a part of a prompt begins, named by what follows."""

    AFTER_TOOLS = "end of system and tools"
    LAST_USER = "last user message"
    USER_BEFORE = "user message before the last"
    USER = "earlier user message"
    ANSWER = "assistant turn"
    THINKING = "thinking"
    TOOL_RESULT = "tool result"


PRIOR = {
    PlaceKind.AFTER_TOOLS: 0.05,
    PlaceKind.LAST_USER: 0.04,
    PlaceKind.USER_BEFORE: 0.03,
    PlaceKind.USER: 0.002,
    PlaceKind.ANSWER: 0.002,
    PlaceKind.THINKING: 0.005,
    PlaceKind.TOOL_RESULT: 0.005,
}
"""Hits expected at a place before there is evidence. The first three are captured wherever storage is free and 80 to 130
tokens are saved."""

PRIOR_SEGMENTS = 16.0
"""Places that the prior counts as."""

MEMORY = 4096.0
"""Places of a kind over which its rate is averaged."""

MOST_PLACES = 64
"""Of one segment: those nearest to its end, and the end of the tools."""

_KINDS = {
    Part.USER: PlaceKind.USER,
    Part.ASSISTANT: PlaceKind.ANSWER,
    Part.THINKING: PlaceKind.THINKING,
    Part.TOOL_RESULT: PlaceKind.TOOL_RESULT,
}


def segment_places(spans: Sequence[Span], start: int, end: int, grid: int) -> list[tuple[int, PlaceKind]]:
    """Return the places inside a segment of the tokens from `start` to `end`, as (page, kind), ascending.

    The page is the last one that ends at or before the place. `spans` are those of the whole prompt; without a chat
    template's markers there are no places. A system prompt in the middle of a conversation is none.
    """
    users = [span.start for span in spans if span.part is Part.USER]
    last, before = users[-1:], users[-2:-1]
    first, last_page = start // grid, end // grid
    heads = next((index for index, span in enumerate(spans) if span.part not in HEAD_PARTS), 0)
    found: list[tuple[int, PlaceKind]] = []
    after_tools: list[tuple[int, PlaceKind]] = []
    for index, span in enumerate(spans):
        page = span.start // grid
        if span.part in HEAD_PARTS or not first < page < last_page:
            continue
        if heads and index == heads:
            after_tools.append((page, PlaceKind.AFTER_TOOLS))
            continue
        kind = _KINDS[span.part]
        if span.start in last:
            kind = PlaceKind.LAST_USER
        elif span.start in before:
            kind = PlaceKind.USER_BEFORE
        found.append((page, kind))
    return after_tools + found[-MOST_PLACES:]


class PlacePrior:
    """See the module docstring."""

    __slots__ = ("_hits", "_seen")

    def __init__(self) -> None:
        self._seen = dict.fromkeys(PlaceKind, PRIOR_SEGMENTS)
        self._hits = {kind: rate * PRIOR_SEGMENTS for kind, rate in PRIOR.items()}

    def seen(self, kind: PlaceKind) -> None:
        """Count a place of a new segment."""
        self._seen[kind] += 1.0
        if self._seen[kind] >= 2 * MEMORY:
            self._seen[kind] /= 2
            self._hits[kind] /= 2

    def parted(self, kind: PlaceKind, share: float = 1.0) -> None:
        """Count a request that leaves an earlier text at such a place; a `share` of it where several kinds meet."""
        self._hits[kind] += share

    def expected(self, kind: PlaceKind) -> float:
        """Return the hits expected at one such place."""
        return self._hits[kind] / self._seen[kind]

    def as_json(self) -> dict[str, float]:
        """Return the figures for the status: hits per place."""
        return {kind.value: self.expected(kind) for kind in PlaceKind}
