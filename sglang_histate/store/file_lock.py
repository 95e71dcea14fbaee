"""Whose a slab file is: its owner, its lock, and who holds the lock if it is not us."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path

from .reasons import StoreError

_LOCK_TRIES, _LOCK_PAUSE_S = 4, 0.02


def check_file(fd: int, path: Path) -> None:
    """Refuse an open file that is not a regular one of this user.

    Raises:
        StoreError: see above.
    """
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


def lock(fd: int, path: Path) -> None:
    """Take the lock on an open slab file.

    Raises:
        StoreError: another process holds it.
    """
    try:
        _flock(fd)
    except BlockingIOError as error:
        pids = ", ".join(map(str, holders(fd, path)))
        raise StoreError(
            f"--histate-ssd-dir: {path} is in use by another process{pids and f' (pid {pids})'}: "
            "stop that process or give each server its own directory"
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


def holders(fd: int, path: Path) -> list[int]:
    """Return the ids of the processes that have this open file open too, as far as this user may see them.

    This process is among them if it has the file open more than once.
    """
    wanted, own_link = os.fstat(fd), f"/proc/{os.getpid()}/fd/{fd}"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = list((process / "fd").iterdir())
        except OSError:
            continue  # it has ended, or belongs to somebody else
        if any(_leads_to(link, path, wanted) for link in links if str(link) != own_link):
            found.append(int(process.name))
    return sorted(found)


def _leads_to(link: Path, path: Path, wanted: os.stat_result) -> bool:
    try:
        # The name first: a file of something else may lie on a dead server, where looking at it would hang.
        if path.name not in os.readlink(link):
            return False
        facts = link.stat()
    except OSError:
        return False
    return (facts.st_dev, facts.st_ino) == (wanted.st_dev, wanted.st_ino)
