"""What the KV on the SSD lies in: records with pages of one path, kept as the server's `adapter.kv_extents` keeps them.

A run may be there in part: what it has is a list of *pieces*, each of one record. A record may have pieces of several
runs, all on one path, and goes with the uppermost of them, in which it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from eval.simulate.budgets import Space

if TYPE_CHECKING:
    from eval.simulate.radix import Run


class Extent:
    """A record. `runs`: those that have pages in it, the uppermost first."""

    __slots__ = ("runs", "size_bytes")

    def __init__(self, size_bytes: int, runs: list[Run]) -> None:
        self.size_bytes = size_bytes
        self.runs = runs


class Piece(NamedTuple):
    """`pages` pages of a run, from its page `at` on, that lie in a record."""

    at: int
    pages: int
    extent: Extent


class Part(NamedTuple):
    """`pages` pages of `run` from its page `at` on."""

    run: Run
    at: int
    pages: int


class Extents:
    """Records in `space`. One takes `record_bytes` however full it is; with 0, records are of one run and take what
    their pages have."""

    def __init__(self, space: Space, page_bytes: int, record_bytes: int = 0) -> None:
        self._space = space
        self._page_bytes = page_bytes
        self._record_bytes = record_bytes

    def size_bytes(self, pages: int) -> int:
        """Bytes that a record with so many pages takes."""
        return self._record_bytes or pages * self._page_bytes

    @staticmethod
    def missing(run: Run) -> list[Part]:
        """Return what is there of a run in no record, from its start to its end."""
        found, at = [], 0
        for piece in run.extents:
            if piece.at > at:
                found.append(Part(run, at, piece.at - at))
            at = piece.at + piece.pages
        if at < len(run.pages):
            found.append(Part(run, at, len(run.pages) - at))
        return found

    @staticmethod
    def covered(run: Run) -> bool:
        """Return whether all of a run is in records."""
        return sum(piece.pages for piece in run.extents) == len(run.pages)

    def add(self, parts: Sequence[Part]) -> None:
        """Have pages of one path, the uppermost first, in a new record; room for it is the caller's to make."""
        self._space.take(self.size_bytes(sum(part.pages for part in parts)))
        if self._record_bytes:
            whole = Extent(self._record_bytes, [part.run for part in parts])
        for part in parts:
            extent = whole if self._record_bytes else Extent(self.size_bytes(part.pages), [part.run])
            part.run.extents.append(Piece(part.at, part.pages, extent))
            part.run.extents.sort(key=lambda piece: piece.at)

    def drop(self, run: Run) -> None:
        """A run leaves the SSD, the deepest of its path there: records that begin in it go, with all that they have.

        One that began before keeps its pages of the run, unless that is all there was of it: then they are forgotten.
        """
        for piece in [piece for piece in run.extents if piece.extent.runs[0] is run]:
            self._space.take(-piece.extent.size_bytes)
            for holder in piece.extent.runs:
                holder.extents = [one for one in holder.extents if one.extent is not piece.extent]
        if self.covered(run):
            self._let_go(run)

    def forget(self, run: Run) -> None:
        """A run is gone for good."""
        self.drop(run)
        self._let_go(run)

    def split(self, run: Run, upper: Run) -> None:
        """`upper` was made of the first pages of `run`: each gets its pieces. A record of what is both's is shared; one
        that takes what its pages have is cut."""
        cut = len(upper.pages)
        held, run.extents = run.extents, []
        for at, pages, extent in held:
            above = min(max(cut - at, 0), pages)
            below = pages - above
            lower, where = extent, extent.runs.index(run)
            if above and below and not self._record_bytes:
                extent, lower = Extent(self.size_bytes(above), [upper]), Extent(self.size_bytes(below), [run])
            elif above:
                extent.runs[where : where + 1] = [upper, run] if below else [upper]
            if above:
                upper.extents.append(Piece(at, above, extent))
            if below:
                run.extents.append(Piece(max(at - cut, 0), below, lower))

    @staticmethod
    def _let_go(run: Run) -> None:
        for piece in run.extents:
            piece.extent.runs.remove(run)
        run.extents = []
