"""The file as the store sees it: `Disk`, and `PosixDisk`, the real one.

Owns one file descriptor, its lock and how it is opened. Knows nothing of slabs. Life of a disk:

    disk = PosixDisk.open(path)        # created 0600, locked for this process
    disk.preallocate(size_bytes)
    disk.enable_direct(page, buffers)  # O_DIRECT if it really works here; else buffered
    disk.read_at / disk.write_at       # from any thread
    disk.close()                       # unlocks
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sglang_histate.sizes import format_size

from .reasons import StoreError

_LOCK_TRIES, _LOCK_PAUSE_S = 4, 0.02


class Disk(Protocol):
    """What reader and writer need. Offsets and lengths are multiples of 4096, buffers are page-aligned.

    Calls come from several threads at once. They raise OSError; a count below the length asked for is a short
    transfer, which callers treat as a failure.
    """

    @property
    def direct(self) -> bool: ...
    def preallocate(self, size_bytes: int) -> None: ...
    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int: ...
    def write_at(self, buffers: Sequence[memoryview], offset: int) -> int: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class PosixDisk:
    """One preallocated regular file, positional reads and writes; both release the GIL."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._direct = False

    @classmethod
    def open(cls, path: Path) -> PosixDisk:
        """Open or create `path` and lock it until `close`.

        Raises:
            StoreError: a symbolic link, not a regular file, another owner, locked, or not writable.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise StoreError(_cannot_open(path, error)) from error
        try:
            _check_file(fd, path)
            lock(fd, path)
            os.fchmod(fd, 0o600)  # an older file or an unusual umask
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, path)

    @property
    def direct(self) -> bool:
        return self._direct

    def preallocate(self, size_bytes: int) -> None:
        """Make the file exactly `size_bytes` long with all its blocks reserved.

        Raises:
            StoreError: the file system has no room, or cannot hold such a file.
        """
        try:
            if os.fstat(self._fd).st_size > size_bytes:
                os.ftruncate(self._fd, size_bytes)
            os.posix_fallocate(self._fd, 0, size_bytes)
        except OSError as error:
            free = os.fstatvfs(self._fd)
            raise StoreError(
                f"--histate-ssd-dir: {self._path} could not be made {format_size(size_bytes)} large "
                f"({error.strerror}; {format_size(free.f_bavail * free.f_frsize)} are free): "
                "free some space or lower --histate-ssd-size"
            ) from error

    def enable_direct(self, page: bytes, buffers: Sequence[memoryview]) -> bool:
        """Switch to O_DIRECT if writing `page` to offset 0 and reading it back works with every buffer.

        Tried on the real buffers and the real file: file systems, loop devices and driver memory all have
        their own reasons to refuse with EINVAL or EFAULT. Contents of `buffers` are overwritten.
        """
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            self._direct = all(self._echoes(page, buffer[: len(page)]) for buffer in buffers)
        except OSError:
            self._direct = False
        if not self._direct:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
        return self._direct

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        count = os.preadv(self._fd, buffers, offset)
        if not self._direct:
            # Records are read once: keep them from pushing more useful pages out of the page cache.
            os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def write_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        count = os.pwritev(self._fd, buffers, offset)
        if not self._direct:
            # Starts write-back of these pages; they are dropped by the next call that covers them.
            os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _echoes(self, page: bytes, buffer: memoryview) -> bool:
        buffer[:] = page
        if os.pwritev(self._fd, [buffer], 0) != len(page):
            return False
        buffer[:] = bytes(len(page))
        return os.preadv(self._fd, [buffer], 0) == len(page) and bytes(buffer) == page


def lock(fd: int, path: Path) -> None:
    """Take the lock on an open slab file.

    Raises:
        StoreError: another process holds it.
    """
    try:
        _flock(fd)
    except BlockingIOError as error:
        raise StoreError(
            f"--histate-ssd-dir: {path} is in use by another process: stop that process "
            "or give each server its own directory"
        ) from error
    except OSError as error:
        raise StoreError(
            f"--histate-ssd-dir: {path} cannot be locked ({error.strerror}): use a local file system"
        ) from error


def _flock(fd: int) -> None:
    """Take the lock. Who only looks whether somebody has it (`holder.py`) has it for a moment: that is waited for."""
    for _ in range(_LOCK_TRIES - 1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _check_file(fd: int, path: Path) -> None:
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise StoreError(
            f"--histate-ssd-dir: {path} is not a regular file: remove it or use another directory"
        )
    if facts.st_uid != os.geteuid():
        raise StoreError(
            f"--histate-ssd-dir: {path} belongs to user {facts.st_uid}, this process runs as {os.geteuid()}: "
            "use a directory of your own"
        )


def _cannot_open(path: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return (
            f"--histate-ssd-dir: {path} is a symbolic link: remove it, the store only opens files of its own"
        )
    return (
        f"--histate-ssd-dir: {path} cannot be opened for writing ({error.strerror}): "
        "check permissions and mount options or use another directory"
    )
