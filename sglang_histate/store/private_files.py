"""Opening what lies below a store's root without ever following a link or touching somebody else's file.

`open_below` is for tools that look at a store from outside; the slab file of a running store is opened in `disk.py`, by
the same rules. The root itself may be a link: its name comes from the operator.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from .reasons import StoreError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK the opening of a pipe in the place of a file would hang.
_ALWAYS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def open_below(root: Path, file: Path, flags: int) -> int:
    """Open the regular file `file`, somewhere below `root`, with `flags`; return the descriptor.

    Each directory on the way is opened from the one above it, so that none can be replaced meanwhile.

    Raises:
        FileNotFoundError: there is no such file.
        StoreError: a link, not a regular file, or not this user's, anywhere on the way; or no permission.
    """
    at = root
    here = _open(root, _DIRECTORY)
    try:
        for part in file.relative_to(root).parts[:-1]:
            at = at / part
            below = _open(at, _DIRECTORY | os.O_NOFOLLOW, part, here)
            os.close(here)
            here = below
            _check(here, at)
        fd = _open(file, flags | _ALWAYS, file.name, here)
    finally:
        os.close(here)
    try:
        _check(fd, file)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StoreError(f"{file} is not a regular file: remove it")
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_own(path: Path) -> bytes:
    """Return what is in a small file of this user, which may not be a link.

    Raises:
        OSError: it is not there, cannot be read, or is something else.
    """
    fd = os.open(path, os.O_RDONLY | _ALWAYS)
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "not a file of this user", str(path))
        return file.read()


def _open(path: Path, flags: int, name: str | None = None, directory: int | None = None) -> int:
    try:
        return os.open(path if name is None else name, flags, 0o600, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        # A link where a directory should be is ENOTDIR, elsewhere ELOOP.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise StoreError(
                f"{path} is a symbolic link: remove it, a store only has files of its own"
            ) from None
        raise StoreError(f"{path} cannot be opened ({error.strerror}): check permissions") from None


def _check(fd: int, path: Path) -> None:
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid():
        raise StoreError(
            f"{path} belongs to user {owner}, this process runs as {os.geteuid()}: run as that user"
        )
