"""Free list of the slabs of one file.

Owns which slab numbers are free; does not decide who must give one up (`index.py`) and never opens a file.
Last in, first out: on a preallocated file a slab that was written before takes new data faster than an
untouched one.
"""

from __future__ import annotations

from collections.abc import Collection


class SlabPool:
    """Slab numbers 0 to `count` - 1. All methods run on the scheduler thread."""

    def __init__(self, count: int) -> None:
        self.total = count
        self._free = list(range(count - 1, -1, -1))
        self._is_free = [True] * count
        self.peak = 0
        """The most slabs that were in use at once."""

    @property
    def free(self) -> int:
        return len(self._free)

    def free_ids(self) -> tuple[int, ...]:
        """Return the free slabs, next one last."""
        return tuple(self._free)

    def occupy(self, slabs: Collection[int]) -> None:
        """Take these slabs, which are free. Their order does not matter."""
        for slab in slabs:
            assert self._is_free[slab], f"slab {slab} is taken"
            self._is_free[slab] = False
        self._free = [slab for slab in self._free if self._is_free[slab]]
        self.peak = max(self.peak, self.total - len(self._free))

    def acquire(self) -> int | None:
        if not self._free:
            return None
        slab = self._free.pop()
        self._is_free[slab] = False
        self.peak = max(self.peak, self.total - len(self._free))
        return slab

    def release(self, slab: int) -> None:
        assert not self._is_free[slab], f"slab {slab} released twice"
        self._is_free[slab] = True
        self._free.append(slab)
