"""A copy as data: which bytes go where.

Source and target are two flat spaces of bytes, such as the arena and the device's pool. A plan lists pieces (offset in
the source, offset in the target, bytes). It knows neither addresses nor devices: `transfer.py` puts a plan and its two
spaces together and checks them, `engine.py` runs the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]


class PlanError(ValueError):
    """A plan that would move bytes it must not. Nothing has been copied."""


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """Pieces as three equally long int64 arrays. Pieces of one plan do not overlap in the target."""

    sources: Offsets
    targets: Offsets
    sizes: Offsets

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())

    @property
    def piece_bytes(self) -> int | None:
        """The size that all pieces have; None if sizes differ or there are no pieces."""
        if len(self) == 0 or (self.sizes != self.sizes[0]).any():
            return None
        return int(self.sizes[0])

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Yield (source, target, bytes)."""
        return zip(self.sources.tolist(), self.targets.tolist(), self.sizes.tolist(), strict=True)

    def reversed(self) -> CopyPlan:
        """Return the way back."""
        return CopyPlan(self.targets, self.sources, self.sizes)

    def merged(self, source_chunk: int | None = None, target_chunk: int | None = None) -> CopyPlan:
        """Join neighbours in the list that are neighbours in both spaces, but not over a multiple of a chunk."""
        if len(self) < 2:
            return self
        begins_s, begins_t = self.sources[1:], self.targets[1:]
        apart = (begins_s != (self.sources + self.sizes)[:-1]) | (
            begins_t != (self.targets + self.sizes)[:-1]
        )
        if source_chunk is not None:
            apart |= begins_s % source_chunk == 0
        if target_chunk is not None:
            apart |= begins_t % target_chunk == 0
        starts = np.flatnonzero(np.r_[True, apart])
        return CopyPlan(self.sources[starts], self.targets[starts], np.add.reduceat(self.sizes, starts))

    def without_empty(self) -> CopyPlan:
        """Leave out pieces of no bytes, which a batch call does not take."""
        if (self.sizes > 0).all():
            return self
        kept = self.sizes != 0
        return CopyPlan(self.sources[kept], self.targets[kept], self.sizes[kept])

    @staticmethod
    def blocks(sources: Offsets, targets: Offsets, block_bytes: int) -> CopyPlan:
        """Equal pieces: ``source[i] -> target[i]``."""
        assert sources.shape == targets.shape
        return CopyPlan(
            sources.astype(np.int64, copy=False),
            targets.astype(np.int64, copy=False),
            np.full(sources.shape, block_bytes, dtype=np.int64),
        )

    @staticmethod
    def from_pages(
        pages: Sequence[int], page_bytes: int, start: int, size_bytes: int, target: int
    ) -> CopyPlan:
        """Bytes ``[start, start + size_bytes)`` of an object that lies in scattered `pages`, to `target` in one run.

        The object's byte b is byte ``b % page_bytes`` of page ``pages[b // page_bytes]``.

        Raises:
            PlanError: the range is not inside the pages.
        """
        if start < 0 or size_bytes < 0 or start + size_bytes > len(pages) * page_bytes:
            raise PlanError(f"bytes {start} + {size_bytes} of {len(pages)} pages of {page_bytes}")
        if size_bytes == 0:
            nothing = np.empty(0, dtype=np.int64)
            return CopyPlan(nothing, nothing, nothing)
        first, last = start // page_bytes, (start + size_bytes - 1) // page_bytes
        cuts = np.arange(first, last + 2, dtype=np.int64) * page_bytes
        cuts[0], cuts[-1] = start, start + size_bytes
        begins = cuts[:-1]
        held = np.asarray(pages[first : last + 1], dtype=np.int64)
        return CopyPlan(held * page_bytes + begins % page_bytes, begins - start + target, np.diff(cuts))
