"""Free lists of the slabs, one for each root.

Owns which slab numbers are free; does not decide who must give one up (`index.py`) nor which roots may be
written (`roots.py`), and never opens a file. Last in, first out: on a preallocated file a slab that was written
before takes new data faster than an untouched one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class SlabPool:
    """Slab numbers 0 to `count` - 1; slab i is on root i % `n_roots`. All methods run on the scheduler thread."""

    def __init__(self, count: int, n_roots: int = 1) -> None:
        self.total = count
        self._free = [list(reversed(range(root, count, n_roots))) for root in range(n_roots)]
        self._is_free = [True] * count
        self.peak = 0
        """The most slabs that were in use at once."""

    @property
    def free(self) -> int:
        return sum(map(len, self._free))

    @property
    def fill(self) -> float:
        """The share of the slabs that is in use, 0 to 1 (1 if there are none); the same on every rank."""
        return 1 - self.free / self.total if self.total else 1.0

    def free_in(self, root: int) -> int:
        return len(self._free[root])

    def free_ids(self) -> tuple[int, ...]:
        """Return the free slabs of one root after the other, next one last."""
        return tuple(slab for free in self._free for slab in free)

    def occupy(self, slabs: Collection[int]) -> None:
        """Take these slabs, which are free. Their order does not matter."""
        for slab in slabs:
            assert self._is_free[slab], f"slab {slab} is taken"
            self._is_free[slab] = False
        self._free = [[slab for slab in free if self._is_free[slab]] for free in self._free]
        self._note_peak()

    def acquire(self, roots: Iterable[int] = (0,)) -> int | None:
        """Take a slab of the root that has most of them, so that all get as much to do; the first of equal ones."""
        free = max((self._free[root] for root in roots), key=len, default=[])
        if not free:
            return None
        slab = free.pop()
        self._is_free[slab] = False
        self._note_peak()
        return slab

    def release(self, slab: int) -> None:
        assert not self._is_free[slab], f"slab {slab} released twice"
        self._is_free[slab] = True
        self._free[slab % len(self._free)].append(slab)

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self.total - self.free)
