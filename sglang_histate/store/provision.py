"""Makes a slab file as large as it will be, and writes its unwritten space once. Only while no server has it open.

The first write to blocks that were only reserved costs the file system more than a later one (measured 1.65 times as
long), so a drive can be prepared before its server is needed. That is one full write of the drive.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from .disk import PosixDisk, lock
from .layout import PAGE_BYTES
from .probe import check_roots, make_private
from .reasons import StoreError
from .striping import Striping
from .survey import SlabFile

_PIECE_BYTES = 8 << 20


def wanted_bytes(file: SlabFile, size_bytes: int | None, root: int = 0, n_roots: int = 1) -> int:
    """Return how large a server with ``--histate-ssd-size`` `size_bytes` makes the file; None: as it is.

    The file is in directory number `root`, counted from 0, of the `n_roots` that share this size.

    Raises:
        StoreError: the model is not known, or the file would have to shrink.
    """
    if file.layout is None:
        raise StoreError(
            f"{file.path} does not say which model it is for ({file.state.value}): start the server on it once"
        )
    if size_bytes is None:
        return file.file_bytes
    wanted = Striping.of(file.layout, size_bytes, n_roots).file_bytes(root)
    if wanted < file.file_bytes:
        raise StoreError(
            f"{file.path} is larger than that already: start the server with the smaller --histate-ssd-size"
        )
    return wanted


def reserve(file: SlabFile, size_bytes: int) -> None:
    """Take the lock, for as long as `file` is open (for writing), and reserve blocks for `size_bytes`.

    Raises:
        StoreError: a server has it, or there is no room.
    """
    lock(file.fd, file.path)
    try:
        os.posix_fallocate(file.fd, 0, size_bytes)
    except OSError as error:
        raise StoreError(f"{file.path} cannot be made larger ({error.strerror}): free some space") from None


def unwritten(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of what was reserved and never written, as far as the file system tells. Whole pages."""
    at = 0
    while at < size_bytes:
        try:
            start = os.lseek(fd, at, os.SEEK_HOLE)
            if start >= size_bytes:
                return
            try:
                at = min(os.lseek(fd, start, os.SEEK_DATA), size_bytes)
            except OSError as error:
                if error.errno != errno.ENXIO:  # no data behind it
                    raise
                at = size_bytes
        except OSError:
            return  # it does not tell: nothing is to be written then
        first, end = -(-start // PAGE_BYTES) * PAGE_BYTES, at // PAGE_BYTES * PAGE_BYTES
        if first < end:
            yield first, end - first


def write_zeros(fd: int, offset: int, size_bytes: int, progress: Callable[[int], None]) -> None:
    """Write zeros; `progress(n)` hears of n more bytes.

    Raises:
        OSError: the disk refuses.
    """
    zeros = memoryview(mmap.mmap(-1, _PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    end = offset + size_bytes
    while offset < end:
        count = os.pwrite(fd, zeros[: min(_PIECE_BYTES, end - offset)], offset)
        # Written out as it goes: otherwise all of it waits in memory that others need.
        os.fdatasync(fd)
        os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)
        offset += count
        progress(count)


def plant(root: Path, like: SlabFile, size_bytes: int) -> None:
    """Make an empty store below `root` for the model and rank of `like`, if there is none yet.

    Raises:
        StoreError: the directory or the size cannot be used.
    """
    assert like.superblock is not None and like.layout is not None
    path = root / like.path.relative_to(like.root)
    if path.exists():
        return
    count = like.layout.slab_count(size_bytes)
    check_roots(
        [root],
        size_bytes,
        slab_bytes=like.layout.slab_bytes,
        store_files=[path],
        allow_any_filesystem=True,  # it was allowed when the store was made
    )
    make_private(path.parent.parent)
    make_private(path.parent)
    disk = PosixDisk.open(path)
    try:
        disk.preallocate(like.layout.file_bytes(count))
        block = replace(like.superblock, slab_count=count, epoch=0, oldest_valid=0, clean=True).pack()
        disk.write_at([memoryview(block)], 0)
        disk.sync()
    finally:
        disk.close()
