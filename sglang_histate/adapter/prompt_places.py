"""Where the parts of a request's prompt begin, and what became of such places in earlier prompts.

All ranks see the same token ids, so all find the same places and learn the same rates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from sglang_histate.adapter.request_state import RequestState
from sglang_histate.adapter.token_spans import MOST_MARKERS, prompt_spans
from sglang_histate.policy.journal import Journal
from sglang_histate.policy.place_prior import PlaceKind, PlacePrior, segment_places
from sglang_histate.policy.structure import Structure

MOST_REMEMBERED = 1 << 14
"""Pages of earlier prompts whose kind of place is known; the longest unused is forgotten first."""


class PromptPlaces:
    """Scheduler thread only. `grid` is in tokens; positions are those of prompts."""

    def __init__(self, structure: Structure, grid: int, journal: Journal | None = None) -> None:
        self._structure = structure
        self._grid = grid
        self._prior = PlacePrior() if journal is None else journal.place_prior()
        self._kinds: OrderedDict[bytes, tuple[PlaceKind, ...]] = OrderedDict()

    def of(self, req: Any, start: int) -> list[tuple[int, PlaceKind]]:
        """Return the places in the segment of the prompt's tokens from `start` on, as pages of the grid."""
        total = len(req.full_untruncated_fill_ids)
        if total // self._grid - start // self._grid < 2:
            return []
        spans = prompt_spans(self._structure, req.full_untruncated_fill_ids, MOST_MARKERS)
        return segment_places(spans, start, total, self._grid)

    def expected(self, kind: PlaceKind) -> float:
        """Return the hits expected at one place."""
        return self._prior.expected(kind)

    def remember(self, req: Any, state: RequestState, places: Sequence[tuple[int, PlaceKind]]) -> None:
        """Count the places of a new segment and know them again when a request leaves its text there."""
        kinds: dict[int, tuple[PlaceKind, ...]] = {}
        for page, kind in places:
            self._prior.seen(kind)
            kinds[page] = (*kinds.get(page, ()), kind)
        for page, those in kinds.items():
            key = state.keys.at(req.full_untruncated_fill_ids, page * self._grid)
            self._kinds[key] = those
            self._kinds.move_to_end(key)
        while len(self._kinds) > MOST_REMEMBERED:
            self._kinds.popitem(last=False)

    def parted(self, req: Any, state: RequestState, at: int) -> bool:
        """Count a request that leaves an earlier text after `at` tokens; False if nothing is known to begin there.

        The words that begin a message are the same in both texts and may fill the page in which it begins.
        """
        for position in (at, at - self._grid):
            if position <= 0:
                continue
            key = state.keys.at(req.full_untruncated_fill_ids, position)
            kinds = self._kinds.get(key)
            if kinds is not None:
                self._kinds.move_to_end(key)
                for kind in kinds:
                    self._prior.parted(kind, 1 / len(kinds))
                return True
        return False

    def as_json(self) -> dict[str, float]:
        """Return the figures for the status: hits per place."""
        return self._prior.as_json()
