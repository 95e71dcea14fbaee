"""Facts about a directory, and the reasons to refuse it before anything is written.

`probe_directory` only looks (for `histate doctor`); `check_directory` decides (at start-up) and creates the
directory if only the last part of its path is missing. The store never falls back to another place or a
smaller size by itself.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sglang_histate.sizes import format_size

from .disk import lock
from .layout import PAGE_BYTES, SUPERBLOCK_BYTES
from .reasons import StoreError

SLAB_FILE = "slabs.dat"
# Local disks are meant. Memory gains nothing, network file systems lock and cache by other rules, overlay
# copies.
UNSUITABLE_FILESYSTEMS = frozenset(
    {"tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "overlay", "9p", "fuse.sshfs"}
)


@dataclass(frozen=True)
class DirectoryFacts:
    path: Path
    filesystem: str  # name as in /proc/self/mountinfo, "unknown" if it is not listed
    direct_io: bool  # O_DIRECT write and read of one page worked
    writable: bool
    free_bytes: int
    owner_uid: int
    mode: int  # permission bits
    stores: tuple[tuple[str, int], ...]  # slab files below it: relative path, bytes on disk

    @property
    def suitable(self) -> bool:
        return self.filesystem not in UNSUITABLE_FILESYSTEMS


def probe_directory(path: Path) -> DirectoryFacts:
    """Return the facts about an existing directory. One temporary file is created and removed.

    Raises:
        OSError: there is no such directory.
    """
    facts = path.stat()
    writable, direct_io = _try_writing(path)
    return DirectoryFacts(
        path=path,
        filesystem=_filesystem(facts.st_dev, path),
        direct_io=direct_io,
        writable=writable,
        free_bytes=_free_bytes(path),
        owner_uid=facts.st_uid,
        mode=stat.S_IMODE(facts.st_mode),
        stores=tuple(
            (str(file.relative_to(path)), _allocated_bytes(file))
            for file in sorted(path.glob(f"*/*/{SLAB_FILE}"))
        ),
    )


def check_directory(
    path: Path, size_bytes: int, *, slab_bytes: int | None = None, store_file: Path | None = None
) -> None:
    """Refuse a directory that cannot hold a store of `size_bytes`; create it (0700) if its parent exists.

    `slab_bytes` adds the check that at least two slabs fit. `store_file` names the slab file that will be
    used: its blocks count as free, and a process that holds it is reported. Without it the blocks of all slab
    files count as free.

    Raises:
        StoreError: with one sentence that names the flag, the value and the way out.
    """
    where = f"--histate-ssd-dir {path}"
    if slab_bytes is not None and size_bytes < SUPERBLOCK_BYTES + 2 * slab_bytes:
        least = SUPERBLOCK_BYTES + 2 * slab_bytes
        raise StoreError(
            f"--histate-ssd-size {format_size(size_bytes)} is too small: two checkpoints of this model need "
            f"{format_size(least)} ({least} bytes); give at least that much"
        )
    _create_or_check_kind(path, where)
    facts = path.stat()
    if facts.st_uid != os.geteuid():
        raise StoreError(
            f"{where} belongs to user {facts.st_uid}, this process runs as {os.geteuid()}: "
            "use a directory of your own"
        )
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(
            f"{where} may be written by other users (mode {stat.S_IMODE(facts.st_mode):04o}): "
            f"run chmod 700 {path}"
        )
    if not _try_writing(path)[0]:
        raise StoreError(
            f"{where} is not writable: check permissions and mount options or use another directory"
        )
    # Before the model is known any slab file here may be the one that is used again; `store_file` decides later.
    own_files = [store_file] if store_file is not None else path.glob(f"*/*/{SLAB_FILE}")
    own_bytes = sum(_allocated_bytes(file) for file in own_files)
    free_bytes = _free_bytes(path) + own_bytes
    if free_bytes < size_bytes:
        raise StoreError(
            f"{where} has {format_size(free_bytes)} free, --histate-ssd-size {format_size(size_bytes)} does "
            "not fit: free some space (stores of other models may lie there) or lower the size"
        )
    if store_file is not None:
        _refuse_locked(store_file)


def make_private(path: Path) -> None:
    """Create a directory below the root, or refuse one that somebody else could write. It is 0700 then.

    Raises:
        StoreError: it is a link, not a directory, foreign, or group- or world-writable.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"--histate-ssd-dir: {path} cannot be created ({error.strerror}): remove it"
        ) from error
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise StoreError(
            f"--histate-ssd-dir: {path} must be a directory of user {os.geteuid()} that no one else can "
            "write: remove it"
        )
    if stat.S_IMODE(facts.st_mode) != 0o700:
        path.chmod(0o700)  # an older directory or an unusual umask


def _create_or_check_kind(path: Path, where: str) -> None:
    try:
        if path.is_dir():
            return
        if path.exists() or path.is_symlink():
            raise StoreError(f"{where} is not a directory: remove it or use another path")
        if not path.parent.is_dir():
            raise StoreError(
                f"{where} does not exist and neither does {path.parent}: "
                "create it or check that the disk is mounted"
            )
        path.mkdir(mode=0o700, exist_ok=True)  # another rank may do the same
        path.chmod(0o700)
    except OSError as error:
        raise StoreError(
            f"{where} cannot be created ({error.strerror}): use a directory of your own"
        ) from error


def _try_writing(path: Path) -> tuple[bool, bool]:
    """Return (a file can be written there, O_DIRECT works there)."""
    try:
        fd, name = tempfile.mkstemp(prefix=".histate-probe-", dir=path)
    except OSError:
        return False, False
    try:
        page = mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            if os.pwritev(fd, [page], 0) != PAGE_BYTES:
                return False, False
        except OSError as error:
            return error.errno == errno.ENOSPC, False  # a full disk is writable; its size is checked apart
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            whole = os.pwritev(fd, [page], 0) == PAGE_BYTES == os.preadv(fd, [page], 0)
        except OSError:
            whole = False
        return True, whole
    finally:
        os.close(fd)
        os.unlink(name)


def _refuse_locked(store_file: Path) -> None:
    try:
        fd = os.open(store_file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # not there yet, or `PosixDisk.open` will say what is wrong with it
    try:
        lock(fd, store_file)
    finally:
        os.close(fd)


def _free_bytes(path: Path) -> int:
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def _allocated_bytes(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512
    except OSError:
        return 0


def _filesystem(device: int, path: Path) -> str:
    """Return the type of the mount that `path` is on: the longest mount point of its device."""
    wanted, real = f"{os.major(device)}:{os.minor(device)}", str(path.resolve())
    best, name = -1, "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return name
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        point = fields[4].replace("\\040", " ")
        inside = point == "/" or real == point or real.startswith(point + "/")
        if inside and (fields[2] == wanted or best < 0) and len(point) > best:
            best, name = len(point), right.split()[0]
    return name
