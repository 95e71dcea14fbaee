"""Where in a prompt a token stands: system, tools, user turn 2, thinking of assistant turn 3, tool result 5.

A chat template writes the same token ids before every message of a kind. Given those ids as `Marker`s, the parts of a
prompt follow from its token ids alone; nobody decodes or reads the text. A prompt without markers has one span, `HEAD`.

    structure = Structure(markers)
    spans = structure.spans(tokens, starts)
    span_at(spans, position).label

Content can hold the ids of a marker (a user who quotes a template): it then counts as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Part(StrEnum):
    """A kind of span."""

    HEAD = "head"  # before the first marker
    SYSTEM = "system"
    TOOLS = "tools"  # their definitions
    USER = "user turn"
    ASSISTANT = "assistant turn"
    THINKING = "thinking"
    TOOL_RESULT = "tool result"


@dataclass(frozen=True)
class Marker:
    """Token ids that begin a span of the kind `opens`.

    `inside`: the kinds of span in which the ids have this meaning; empty for all, as of the beginning of a turn.
    `resumes`: what was interrupted goes on, so no new number is counted (the answer after its thinking).
    """

    ids: tuple[int, ...]
    opens: Part
    inside: frozenset[Part] = frozenset()
    resumes: bool = False

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError(f"a marker of {self.opens.value} needs at least one token id")


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `end` (exclusive), the marker's own included.

    `number` counts spans of the kind from 1, that of thinking its assistant turn's; 0 for kinds that are not counted.
    """

    part: Part
    number: int
    start: int
    end: int

    @property
    def label(self) -> str:
        """What to call the span, such as ``user turn 2``."""
        if self.part is Part.THINKING:
            return f"thinking of assistant turn {self.number}"
        return f"{self.part.value} {self.number}" if self.number else self.part.value


HEAD_PARTS = frozenset({Part.HEAD, Part.SYSTEM, Part.TOOLS})
"""What a client keeps when it replaces a conversation by a summary."""

_COUNTED = frozenset({Part.USER, Part.ASSISTANT, Part.TOOL_RESULT})


class Structure:
    """The markers of one chat template."""

    def __init__(self, markers: Iterable[Marker]) -> None:
        self.markers = tuple(markers)
        self._by_first: dict[int, list[Marker]] = {}
        for marker in sorted(self.markers, key=lambda marker: -len(marker.ids)):
            self._by_first.setdefault(marker.ids[0], []).append(marker)

    def spans(self, tokens: Sequence[int], starts: Iterable[int] | None = None) -> list[Span]:
        """Return the spans of `tokens`, in order and without gaps; none for an empty prompt.

        `starts`: positions in ascending order that include all at which a marker begins; None looks at every position.
        Where several markers begin at one position, the longest counts. Markers do not overlap: the first one wins.
        """
        counts = dict.fromkeys(_COUNTED, 0)
        found: list[Span] = []
        part, number, begin, free = Part.HEAD, 0, 0, 0
        for start in range(len(tokens)) if starts is None else starts:
            if start < free:
                continue
            marker = self._at(tokens, start, part)
            if marker is None:
                continue
            if start > begin:
                found.append(Span(part, number, begin, start))
            part, begin, free = marker.opens, start, start + len(marker.ids)
            if part in _COUNTED and not marker.resumes:
                counts[part] += 1
            number = counts[Part.ASSISTANT] if part is Part.THINKING else counts.get(part, 0)
        if len(tokens) > begin:
            found.append(Span(part, number, begin, len(tokens)))
        return found

    def _at(self, tokens: Sequence[int], start: int, part: Part) -> Marker | None:
        for marker in self._by_first.get(tokens[start], ()):
            if marker.inside and part not in marker.inside:
                continue
            if tuple(tokens[start : start + len(marker.ids)]) == marker.ids:
                return marker
        return None


def message_starts(spans: Sequence[Span]) -> list[int]:
    """Return where the messages of a prompt begin, ascending; the answer that it asks for is none.

    Thinking and the answer behind it are one message, and so are system prompt and tools. Each tool result is one.
    """
    found: list[int] = []
    seen: set[tuple[Part, int]] = set()
    before: Part | None = None
    for span in spans:
        part, key = span.part, (span.part, span.number)
        if part is Part.SYSTEM:
            if before is not Part.TOOLS or not found:  # behind the tools it goes on
                found.append(span.start)
        elif part in _COUNTED and key not in seen:
            found.append(span.start)
            seen.add(key)
        before = part
    last = next((span.part for span in reversed(spans) if span.part is not Part.THINKING), None)
    if last is Part.ASSISTANT:
        found.pop()
    return found


def head_end(spans: Sequence[Span]) -> int | None:
    """Return where the first message behind system prompt and tools begins, None if the prompt is not made of messages."""
    return next((span.start for span in spans if span.part not in HEAD_PARTS), None)


def span_at(spans: Sequence[Span], position: int) -> Span:
    """Return the span that has the token at `position`; of positions behind the end, the last one.

    Raises:
        ValueError: there is no span, or `position` is negative.
    """
    if not spans or position < 0:
        raise ValueError(f"no span has token {position}")
    return spans[max(0, bisect_right(spans, position, key=lambda span: span.start) - 1)]
