"""A copy as data: which bytes go where.

Source and target are two flat spaces of bytes, such as the arena and one layer's buffer on the device. A plan lists
pieces (offset in the source, offset in the target, bytes). Whoever runs it need not know what lies there, so the same
plan serves torch, a batch copy or a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]


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

    def merged(self) -> CopyPlan:
        """Join neighbours in the list that are neighbours in both spaces."""
        if len(self) < 2:
            return self
        ends_s, ends_t = self.sources + self.sizes, self.targets + self.sizes
        starts = np.flatnonzero(
            np.r_[True, (self.sources[1:] != ends_s[:-1]) | (self.targets[1:] != ends_t[:-1])]
        )
        return CopyPlan(self.sources[starts], self.targets[starts], np.add.reduceat(self.sizes, starts))

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
            ValueError: the range is not inside the pages.
        """
        if start < 0 or size_bytes < 0 or start + size_bytes > len(pages) * page_bytes:
            raise ValueError(f"bytes {start} + {size_bytes} of {len(pages)} pages of {page_bytes}")
        cuts = [start]
        while cuts[-1] < start + size_bytes:
            cuts.append(min((cuts[-1] // page_bytes + 1) * page_bytes, start + size_bytes))
        begins = np.array(cuts[:-1], dtype=np.int64)
        held = np.array([pages[begin // page_bytes] for begin in cuts[:-1]], dtype=np.int64)
        return CopyPlan(
            held * page_bytes + begins % page_bytes,
            begins - start + target,
            np.diff(np.array(cuts, dtype=np.int64)),
        )
