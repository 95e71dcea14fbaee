"""The host arena: one flat buffer cut into pages, and who holds which page.

A page is as large as one page of KV over all full-attention layers. KV takes one page per page of tokens; a
checkpoint takes as many pages as its bytes need, wherever they are. No holder needs neighbours, so every free page
is as good as any other: nothing fragments, and nothing is ever moved. The boundary between KV and checkpoints is
wherever demand has put it.

Pages are handed out in an order that depends only on the calls so far, so it is the same on every rank.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from enum import Enum

import numpy as np
import numpy.typing as npt


class Kind(Enum):
    """What a page is used for."""

    KV = "kv"
    STATE = "states"


class PageError(RuntimeError):
    """A page was given back by who does not hold it: the tree's view and the arena's have parted."""


_FREE = 0
_CODES = {Kind.KV: 1, Kind.STATE: 2}


class HostArena:
    """`total_pages` pages of `page_bytes` each. Not thread-safe; bytes of a held page may be touched by any thread.

    `memory` is the whole buffer, uint8, page p at ``[p * page_bytes, (p + 1) * page_bytes)``. It is anonymous private
    memory, so a caller with a GPU can register it.

    Raises:
        ValueError: a size is not positive.
        MemoryError, OSError: the mapping does not fit.
    """

    def __init__(self, total_pages: int, page_bytes: int) -> None:
        if total_pages < 1 or page_bytes < 1:
            raise ValueError(f"an arena of {total_pages} pages of {page_bytes} bytes")
        self.total_pages = total_pages
        self.page_bytes = page_bytes
        mapping = mmap.mmap(-1, total_pages * page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A child process must not copy the page tables of a large arena, nor share pages that a device copies into.
        mapping.madvise(mmap.MADV_DONTFORK)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self._holder = bytearray(total_pages)  # code of the kind, by page
        self._free = list(range(total_pages - 1, -1, -1))  # the next one last
        self._used = dict.fromkeys(Kind, 0)
        self.taken_pages = 0
        """Pages given out since the start, whether or not they came back."""
        self.peak_pages = 0
        """The most pages that were held at once."""

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def total_bytes(self) -> int:
        return self.total_pages * self.page_bytes

    @property
    def free_bytes(self) -> int:
        return self.free_pages * self.page_bytes

    def used_pages(self, kind: Kind) -> int:
        return self._used[kind]

    def used_bytes(self, kind: Kind) -> int:
        """Bytes of the pages that `kind` holds, the unused end of a checkpoint's last page included."""
        return self._used[kind] * self.page_bytes

    def pages_for(self, size_bytes: int) -> int:
        """Return how many pages an object of `size_bytes` takes."""
        return -(-size_bytes // self.page_bytes)

    def allocate(self, count: int, kind: Kind) -> list[int] | None:
        """Return `count` pages for `kind`, or None if not all of them can be had; then nothing has changed."""
        if count < 0:
            raise ValueError(f"{count} pages asked for")
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        code = _CODES[kind]
        for page in pages:
            self._holder[page] = code
        self._used[kind] += count
        self.taken_pages += count
        self.peak_pages = max(self.peak_pages, self.total_pages - len(self._free))
        return pages

    def free(self, pages: Iterable[int], kind: Kind) -> None:
        """Give `pages` of `kind` back; all of them or, with an error, none.

        Raises:
            PageError: a page is not in the arena, is free, is held by the other kind, or is named twice.
        """
        given = list(pages)
        code = _CODES[kind]
        for page in given:
            if not 0 <= page < self.total_pages:
                raise PageError(f"page {page} is not one of the {self.total_pages} pages of the arena")
            if self._holder[page] != code:
                holder = next((k.value for k, c in _CODES.items() if c == self._holder[page]), "nobody")
                raise PageError(f"page {page} was given back for {kind.value} but is held by {holder}")
        if len(set(given)) != len(given):
            raise PageError(f"a page is given back twice in one call: {sorted(given)}")
        for page in given:
            self._holder[page] = _FREE
        self._used[kind] -= len(given)
        # Backwards, so that the page that was handed out first is handed out first again.
        self._free.extend(reversed(given))

    def clear(self, kind: Kind) -> None:
        """Take all pages of `kind` back, whoever holds them."""
        code = _CODES[kind]
        self.free([page for page in range(self.total_pages) if self._holder[page] == code], kind)
