"""Where a prompt departs from the best of what came before: in the latest prompts, or on a path of the radix tree.

Display only, so one rank is enough. Nothing is looked at but token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from sglang_histate.adapter.prompt_memory import MOST_COMPARED, Likeness, PromptMemory, compare
from sglang_histate.adapter.request_state import RequestState
from sglang_histate.adapter.token_spans import prompt_spans
from sglang_histate.policy.structure import Part, Span, Structure, span_at

SHORT_TOKENS = 64
"""A difference of at most so many tokens, before all goes on alike, is a date, a number or an id."""

# Tokens by which such a difference may change the length, and that have to be alike behind it.
_SHIFT, _SURE = 32, 32


@dataclass(frozen=True)
class PrefixBreak:
    """The first token that differs, counted from 0, and its place in the structure of both prompts.

    `place` and `before` (in the earlier prompt) are None where no chat template has been at work; `rid` is the earlier
    request, None if only the tree still knows it. `alike_after` counts the tokens that are the same again after a short
    difference; 0 if the prompts part for good.
    """

    position: int
    part: Part | None
    place: str | None
    before: str | None
    rid: str | None
    alike_after: int


class BreakFinder:
    """Compares one prompt with all before it; O(its length)."""

    def __init__(self, core: Any, memory: PromptMemory, page_size: int, structure: Structure | None) -> None:
        """`core` is the cache's tree core, whose nodes stay where their KV is on the SSD only."""
        self._core = core
        self._memory = memory
        self._page_size = page_size
        self._structure = structure

    def find(
        self, req: Any, state: RequestState, tokens: np.ndarray, keys: list[bytes]
    ) -> PrefixBreak | None:
        """Return the break of `req`, whose prompt is `tokens` (int64) with the page hashes `keys`.

        None: nothing is alike, or one of the two prompts begins with all of the other.
        """
        known = self._memory.match(state.keys.namespace, keys, tokens)
        planted = self._in_tree(req, state, tokens, 0 if known is None else known.shared)
        best = known if planted is None else planted
        if best is None or best.position is None:
            return None
        span, before = self._places(tokens, best.other, best.position)
        return PrefixBreak(
            position=best.position,
            part=None if span is None else span.part,
            place=None if span is None else span.label,
            before=None if before is None else before.label,
            rid=best.rid,
            alike_after=alike_after(tokens, best.other, best.position),
        )

    def _in_tree(self, req: Any, state: RequestState, tokens: np.ndarray, known: int) -> Likeness | None:
        """Return the path that shares more tokens than `known`, and the first page at least; None if there is none."""
        page, length = self._page_size, len(tokens) // self._page_size * self._page_size
        if not length:
            return None
        key = state.keys.radix_key(req.full_untruncated_fill_ids, length)
        node, reach, rest = self._core.root_node, 0, None
        while reach < length and (child := node.children.get(key.child_key_at(reach, page))) is not None:
            matched = child.key.match_at(key, reach, page_size=page)
            reach += matched
            if matched < len(child.key):
                rest = child.key.token_ids[matched:]
                break
            node = child
        if not reach or reach + page <= known:
            return None
        if rest is not None:
            nexts = [rest]
        else:
            latest = islice(reversed(node.children.values()), MOST_COMPARED)
            nexts = [child.key.token_ids for child in latest]
        best = Likeness(None, reach, None, tokens[:reach])
        for ids in nexts:
            ahead = np.array(ids[:page], dtype=np.int64)
            shared, position = compare(tokens[reach : reach + page], ahead)
            if reach + shared > best.shared or best.position is None:
                other = np.concatenate([tokens[:reach], np.array(ids, dtype=np.int64)])
                best = Likeness(None, reach + shared, None if position is None else reach + position, other)
        return best if best.shared > known else None

    def _places(
        self, tokens: np.ndarray, other: np.ndarray, position: int
    ) -> tuple[Span | None, Span | None]:
        if self._structure is None:
            return None, None
        longest = max((len(marker.ids) for marker in self._structure.markers), default=1)
        found: list[Span | None] = []
        for ids in (tokens, other):
            # A marker may begin before the token that differs and end behind it.
            span = span_at(prompt_spans(self._structure, ids[: position + longest]), position)
            found.append(None if span.part is Part.HEAD else span)
        return found[0], found[1]


def alike_after(tokens: np.ndarray, other: np.ndarray, position: int) -> int:
    """Return how many tokens are alike again after a difference of at most `SHORT_TOKENS` from `position` on; 0 if none."""
    start = position + SHORT_TOKENS
    wanted = other[start : start + _SURE]
    first = max(position + 1, start - _SHIFT)
    near = tokens[first : start + _SHIFT + _SURE]
    if len(wanted) < _SURE or len(near) < _SURE:
        return 0
    places = np.flatnonzero((np.lib.stride_tricks.sliding_window_view(near, _SURE) == wanted).all(axis=1))
    if not len(places):
        return 0
    middle = start - first  # where the length is the same
    nearest = int(places[np.abs(places - middle).argmin()])
    shared, _ = compare(tokens[first + nearest :], other[start:])
    return shared
