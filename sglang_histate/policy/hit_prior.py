"""Where later requests part from a segment, learned from where earlier ones did.

Agents part from their history at few places: just below the end of a prompt (its last message is sent again, changed),
and at a fixed depth, where the system prompt and the tools end. So two tables, both of hits per segment:

- *below the end*: by pages between the place and the end of the segment it lies in, up to `TAIL_PAGES`;
- *at a depth*: by position in the sequence, in bins of equal ratio, per page of segments that cover the bin.

A request that goes on at a segment's end, or where another one parted before, is not counted: a checkpoint is there
anyway. Before there is evidence, hits are uniform over a segment but for the page below its end; that counts as
`PRIOR_SEGMENTS` segments. Counts decay, so a client that changes its habits is followed. The same requests in the same
order give the same numbers on every rank; positions are in pages of the grid.

    prior.segment(start, end)                  # a request computes pages start to end
    prior.parted(at, end)                      # another leaves it after page `at`, the segment went on to `end`
    prior.below_end(1), prior.at_depth(244)    # expected hits: of that place, of one page
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, log2
from typing import Any

TAIL_PAGES = 8
"""Pages below a segment's end that have a table of their own."""

BINS_PER_OCTAVE = 16
"""At page 244, where recorded Claude Code sessions part most often, a bin is 11 pages."""

FEW_PER_OCTAVE, FINE_FROM = 4, 64
"""Fewer bins before that page: little is to be saved there."""

MOST_PAGES = 1 << 20
"""What lies behind is in the last bin."""

PRIOR_SEGMENTS = 64.0
PRIOR_INSIDE = 0.03
"""Hits inside a segment, away from its end, that each is expected to see."""
PRIOR_BELOW = 0.01
"""Hits one page below its end."""

MEMORY = 4096.0
"""Segments over which counts are averaged."""

SMOOTHING = 32.0
"""Segments' worth of coverage by which a bin's own rate is drawn towards the uniform one."""


def _starts() -> list[int]:
    few = {ceil(2 ** (index / FEW_PER_OCTAVE)) for index in range(round(FEW_PER_OCTAVE * log2(FINE_FROM)))}
    fine = range(round(BINS_PER_OCTAVE * log2(FINE_FROM)), round(BINS_PER_OCTAVE * log2(MOST_PAGES)) + 1)
    return sorted(few.union(ceil(2 ** (index / BINS_PER_OCTAVE)) for index in fine))


_START = _starts()
"""First page of each bin, ascending; what follows the last is where it ends."""

BINS = len(_START) - 1
_WIDTH = [end - start for start, end in pairwise(_START)]


def bin_of(page: int) -> int:
    """Return the bin of a position >= 1."""
    return min(bisect_right(_START, page) - 1, BINS - 1)


def bin_edges(start: int, end: int) -> list[int]:
    """Return the first pages of the bins that begin strictly between two pages, ascending."""
    return _START[bisect_right(_START, start) : bisect_left(_START, end)]


class HitPrior:
    """See the module docstring."""

    __slots__ = ("_at", "_below", "_covered", "_inside", "_long", "_segments", "_weight")

    def __init__(self) -> None:
        self._weight = 1.0  # of a new segment; it grows instead of all counts shrinking
        self._segments = PRIOR_SEGMENTS
        self._inside = 0.0  # parted away from the end, anywhere
        self._below = [0.0] * (TAIL_PAGES + 1)
        self._long = [PRIOR_SEGMENTS] * (TAIL_PAGES + 1)  # segments longer than so many pages
        self._below[1] = PRIOR_BELOW * PRIOR_SEGMENTS
        self._at = [0.0] * BINS
        self._covered = [0.0] * BINS

    def segment(self, start: int, end: int) -> None:
        """Count a segment of the pages from `start` to `end` (exclusive)."""
        if end <= start:
            return
        self._weight *= 1 + 1 / MEMORY
        weight = self._weight
        self._segments += weight
        for pages in range(1, min(end - start, TAIL_PAGES + 1)):
            self._long[pages] += weight
        covered, start = self._covered, max(start, 1)
        first, last = bin_of(start), bin_of(max(end - 1, 1))
        if first == last:
            covered[first] += weight * (end - start)
        else:
            covered[first] += weight * (_START[first + 1] - start)
            whole = slice(first + 1, last)
            covered[whole] = [
                pages + weight * width for pages, width in zip(covered[whole], _WIDTH[whole], strict=True)
            ]
            covered[last] += weight * (end - _START[last])
        if weight > 1e9:
            self._rescale()

    def parted(self, at: int, end: int) -> None:
        """Count a request that has the pages before `at` of a segment which went on to `end` > `at`."""
        below = end - at
        if at < 1 or below < 1:
            return
        if below <= TAIL_PAGES:
            self._below[below] += self._weight
        else:
            self._inside += self._weight
            self._at[bin_of(at)] += self._weight

    def below_end(self, pages: int) -> float:
        """Return the hits expected so many pages below the end of a segment, 1 to `TAIL_PAGES`."""
        return self._below[pages] / self._long[pages]

    def inside(self) -> float:
        """Return the hits expected inside a segment away from its end."""
        prior = PRIOR_SEGMENTS
        return (self._inside + PRIOR_INSIDE * prior) / self._segments

    def at_depth(self, page: int, uniform: float) -> float:
        """Return the hits expected at one page; `uniform` is what a page has where nothing is known."""
        return self.at_depths([page], uniform)[0]

    def at_depths(self, pages: Sequence[int], uniform: float) -> list[float]:
        """Return the same for ascending pages in one pass over the bins."""
        at, covered, scale = self._at, self._covered, SMOOTHING * self._weight
        found, index = [], bin_of(pages[0]) if pages else 0
        for page in pages:
            while index < BINS - 1 and _START[index + 1] <= page:
                index += 1
            base = scale * _WIDTH[index]
            found.append((at[index] + uniform * base) / (covered[index] + base))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the figures for the status: hits per segment."""
        below = {str(pages): self.below_end(pages) for pages in range(1, TAIL_PAGES + 1)}
        return {"pages_below_end": below, "inside": self.inside()}

    def _rescale(self) -> None:
        scale = 1 / self._weight
        self._segments *= scale
        self._inside *= scale
        for counts in (self._below, self._long, self._at, self._covered):
            counts[:] = [count * scale for count in counts]
        self._weight = 1.0
