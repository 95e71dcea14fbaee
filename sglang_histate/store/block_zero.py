"""Block 0 of each file of an open store: its epoch, which generations still count, and whether it was closed in order.

Owns when the superblock is written; its bytes are in `blocks.py`. Everything before `oldest_valid` counts for
nothing at the next open. That is how a store is emptied without a write to every slab:

    expire(generation)     scheduler thread: what is older was cleared; only a number changes
    settle()               writer thread, before it writes any record: make that number last

So a record that was put after a clear is never on the disk before the clear is. A process that dies in
between leaves the store as it was before the clear, with nothing newer in it. At the end of `settle` the
clear survives loss of power too.
"""

from __future__ import annotations

import mmap

from .blocks import Superblock
from .disk import Disk
from .layout import SUPERBLOCK_BYTES, Fingerprint
from .striping import Striping

EVERYTHING = 2**64 - 1
"""As `oldest_valid`: no record counts."""


class BlockZero:
    """One thread at a time writes: the one that opens, then the writer thread, then the one that closes."""

    def __init__(self, disk: Disk, striping: Striping, root: int, fingerprint: Fingerprint) -> None:
        self._disk = disk
        self._layout = striping.layout
        self._slab_count = striping.slabs_in(root)
        self._root = root
        self._n_roots = striping.n_roots
        self._fingerprint = fingerprint
        self._page = memoryview(mmap.mmap(-1, SUPERBLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._epoch = 0
        self._written = EVERYTHING
        self._wanted = EVERYTHING

    def read(self) -> Superblock | None:
        """Return the superblock of this store, or None if there is none or one of something else.

        Raises:
            OSError: block 0 cannot be read.
        """
        self._page[:] = bytes(SUPERBLOCK_BYTES)
        self._disk.read_at([self._page], 0)
        found = Superblock.parse(bytes(self._page))
        return found if found is not None and found.is_of(self._layout, self._fingerprint) else None

    def begin(self, epoch: int, oldest_valid: int) -> None:
        """Write the superblock of an open store.

        Raises:
            OSError: it could not be written, or only in part.
        """
        self._epoch = epoch
        self._wanted = oldest_valid
        self._write(clean=False)

    def expire(self, oldest_valid: int) -> None:
        self._wanted = oldest_valid

    def settle(self) -> None:
        """Write what `expire` asked for, if that has not been done.

        Raises:
            OSError: it could not be written; the next call tries again.
        """
        if self._wanted != self._written:
            self._write(clean=False)
            self._disk.sync()

    def end(self, *, clean: bool) -> None:
        """Write the superblock of a closed store.

        Raises:
            OSError: see `begin`.
        """
        self._write(clean=clean)

    def page(self) -> bytes:
        """Return a superblock of this store by whose rule nothing is valid."""
        return self._pack(EVERYTHING, clean=False)

    def _write(self, *, clean: bool) -> None:
        oldest_valid = self._wanted
        self._page[:] = self._pack(oldest_valid, clean)
        if self._disk.write_at([self._page], 0) != SUPERBLOCK_BYTES:
            raise OSError("the superblock was only written in part")
        self._written = oldest_valid

    def _pack(self, oldest_valid: int, clean: bool) -> bytes:
        return Superblock.of(
            self._layout,
            self._slab_count,
            self._fingerprint,
            self._epoch,
            oldest_valid=oldest_valid,
            clean=clean,
            root=self._root,
            n_roots=self._n_roots,
        ).pack()
