"""Keeps buffered transfers out of the page cache.

Where O_DIRECT does not work, each record would push its own size of other people's pages out of memory and be
read once at most. `POSIX_FADV_DONTNEED` drops clean pages only: what was just written is dirty and stays. So
writes are first brought to the device, range by range, on the thread that wrote them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

# linux/fs.h: wait for what is being written in the range, write what is dirty, wait for that.
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
# The kernel reads ahead behind a range; this covers the largest window in use (`read_ahead_kb` of RAID arrays).
READ_AHEAD_BYTES = 4 << 20


def _load() -> Callable[[int, int, int], None] | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

    def write_out(fd: int, offset: int, count: int) -> None:
        if call(fd, offset, count, _WAIT_BEFORE | _WRITE | _WAIT_AFTER) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    return write_out


_sync_file_range = _load()


def drop_read(fd: int, offset: int, count: int) -> None:
    """Drop a range that was read, and what the kernel read ahead of it."""
    os.posix_fadvise(fd, offset, count + READ_AHEAD_BYTES, os.POSIX_FADV_DONTNEED)


def drop_written(fd: int, offset: int, count: int) -> None:
    """Bring a range that was written to the device, then drop it. Waits; not for the scheduler thread.

    Raises:
        OSError: the device took less than the page cache had promised.
    """
    if _sync_file_range is None:
        os.fdatasync(fd)
    else:
        _sync_file_range(fd, offset, count)
    os.posix_fadvise(fd, offset, count, os.POSIX_FADV_DONTNEED)
