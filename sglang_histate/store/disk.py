"""The file as the store sees it: `Disk`, and `PosixDisk`, the real one.

Owns one file descriptor, its lock and how it is opened. Knows nothing of slabs. Life of a disk:

    disk = PosixDisk.open(path)        # created 0600, locked for this process
    disk.preallocate(size_bytes)
    disk.enable_direct(page, buffers)  # O_DIRECT if it really works here; else buffered
    disk.read_at / disk.write_at       # from any thread
    disk.revive()                      # after errors: is it back?
    disk.close()                       # unlocks

What happens to the file behind the store's back:

    deleted, moved or replaced   all goes on in the file that is open until the process ends; a restart will not
                                 find it, and `file_place` says so. It is not created again: that would lose now
                                 what the restart loses later.
    cut short                    what was behind the cut is a miss; `revive` makes it whole again
    its disk goes and comes back `revive` opens the path again if the same file is there
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from sglang_histate.sizes import format_size

from .file_lock import check_file, lock
from .page_cache import drop_read, drop_written
from .reasons import StoreError

LOOK_AGAIN_S = 1.0


class FilePlace(StrEnum):
    """What the path of an open file leads to."""

    PRESENT = "present"
    DELETED = "deleted"  # nothing, the file has no name any more: it ends with this process
    MISSING = "missing"  # nothing, the file has another name or its file system is not mounted there any more
    REPLACED = "replaced"  # another file


class Disk(Protocol):
    """What reader and writer need. Offsets and lengths are multiples of 4096, buffers are page-aligned.

    Calls come from several threads at once. They raise OSError; a count below the length asked for is a short
    transfer, which callers treat as a failure. `file_place` and `direct` never wait; they tell what the latest
    transfers have seen.
    """

    @property
    def direct(self) -> bool: ...
    @property
    def file_place(self) -> FilePlace: ...
    def preallocate(self, size_bytes: int) -> None: ...
    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int: ...
    def write_at(self, buffers: Sequence[memoryview], offset: int) -> int: ...
    def revive(self) -> None:
        """Undo what can be undone after failures, before the next try. May raise OSError."""

    def sync(self) -> None: ...
    def close(self) -> None: ...


class PosixDisk:
    """One preallocated regular file, positional reads and writes; both release the GIL."""

    def __init__(self, fd: int, path: Path) -> None:
        self.path = path
        self._fd = fd
        self._inode = os.fstat(fd).st_ino
        self._size_bytes = 0
        self._direct = False
        self._file_place = FilePlace.PRESENT
        self._looked_s = time.monotonic()
        self._reviving = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> PosixDisk:
        """Open or create `path` and lock it until `close`.

        Raises:
            StoreError: a symbolic link, not a regular file, another owner, locked, or not writable.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(_cannot_open(path, error)) from error
        try:
            check_file(fd, path)
            lock(fd, path)
            os.fchmod(fd, 0o600)  # an older file or an unusual umask
            return cls(fd, path)
        except BaseException:
            os.close(fd)
            raise

    @property
    def direct(self) -> bool:
        return self._direct

    @property
    def file_place(self) -> FilePlace:
        return self._file_place

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
                f"--histate-ssd-dir: {self.path} could not be made {format_size(size_bytes)} large "
                f"({error.strerror}; {format_size(free.f_bavail * free.f_frsize)} are free): "
                "free some space or lower --histate-ssd-size"
            ) from error
        self._size_bytes = size_bytes

    def enable_direct(self, page: bytes, buffers: Sequence[memoryview]) -> bool:
        """Switch to O_DIRECT if block 0 can be written and read back with the first page of every buffer.

        Returns whether O_DIRECT is on. `page` (4096 bytes) stays in block 0.
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
        try:
            count = os.preadv(self._fd, buffers, offset)
        except OSError as error:
            if not self._became_buffered(error):
                raise
            count = os.preadv(self._fd, buffers, offset)
        if not self._direct:
            drop_read(self._fd, offset, count)
        self._look()
        return count

    def write_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            count = os.pwritev(self._fd, buffers, offset)
        except OSError as error:
            if not self._became_buffered(error):
                raise
            count = os.pwritev(self._fd, buffers, offset)
        if not self._direct:
            drop_written(self._fd, offset, count)
        self._look()
        return count

    def revive(self) -> None:
        """Open the path again if the same file is there on another device, and make it whole if it was cut.

        The bytes of a file that was away are as good as any: every read is verified.

        Raises:
            OSError: somebody else has locked the file, or there is no room to make it whole.
        """
        with self._reviving:
            with contextlib.suppress(FileNotFoundError):  # the transfers will tell whether it is alive
                self._reopen()
            if os.fstat(self._fd).st_size < self._size_bytes:
                os.posix_fallocate(self._fd, 0, self._size_bytes)

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

    def _became_buffered(self, error: OSError) -> bool:
        """Give up O_DIRECT if it is refused although it worked before: on other storage it may never work again."""
        if error.errno != errno.EINVAL or not self._direct:
            return False
        self._direct = False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return True

    def _look(self) -> None:
        """See now and then whether the path still leads to this file."""
        now = time.monotonic()
        if now - self._looked_s < LOOK_AGAIN_S:
            return
        self._looked_s = now
        try:
            mine = os.fstat(self._fd)
            there = os.lstat(self.path)
        except FileNotFoundError:
            self._file_place = FilePlace.MISSING if mine.st_nlink else FilePlace.DELETED
        except OSError:
            return  # the transfers will tell
        else:
            same = (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
            self._file_place = FilePlace.PRESENT if same else FilePlace.REPLACED

    def _reopen(self) -> None:
        fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            there = os.fstat(fd)
            if there.st_ino != self._inode or self._is_open(there):
                return
            check_file(fd, self.path)
            lock(fd, self.path)
            if self._direct:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            # Threads that hang in a call keep the old file; all later calls have the new one.
            os.dup2(fd, self._fd, inheritable=False)
        except StoreError as error:
            raise OSError(errno.EBUSY, str(error)) from error
        finally:
            os.close(fd)

    def _is_open(self, there: os.stat_result) -> bool:
        try:
            mine = os.fstat(self._fd)
        except OSError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _cannot_open(path: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return (
            f"--histate-ssd-dir: {path} is a symbolic link: remove it, the store only opens files of its own"
        )
    return (
        f"--histate-ssd-dir: {path} cannot be opened for writing ({error.strerror}): "
        "check permissions and mount options or use another directory"
    )
