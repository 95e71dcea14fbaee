"""Facts about a directory, and the reasons to refuse it before anything is written.

`probe_directory` only looks (for `histate doctor`); `check_roots` decides (at start-up) and creates a directory if
only the last part of its path is missing. The store never falls back to another place or a smaller size by
itself.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import stat
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_histate.sizes import format_size

from .file_lock import lock
from .layout import PAGE_BYTES, SUPERBLOCK_BYTES
from .reasons import StoreError

SLAB_FILE = "slabs.dat"
_log = logging.getLogger("sglang_histate.store")

_MEMORY = "which is memory and no disk"
_REMOTE = "which is no local disk: its locks and its cache follow other rules, and it may hang"
_LAYERS = "which copies files between layers"
# Local disks are meant. Names as in /proc/self/mountinfo.
UNSUITABLE_FILESYSTEMS: dict[str, str] = {
    **dict.fromkeys(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"), _MEMORY),
    **dict.fromkeys(("overlay", "aufs", "fuse.fuse-overlayfs", "squashfs"), _LAYERS),
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "virtiofs", "vboxsf"), _REMOTE),
    **dict.fromkeys(("ceph", "fuse.ceph", "fuse.glusterfs", "lustre", "beegfs", "gpfs"), _REMOTE),
    **dict.fromkeys(("fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.grpcfuse"), _REMOTE),
}


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
    error, direct_io = _try_writing(path)
    return DirectoryFacts(
        path=path,
        filesystem=_filesystem(facts.st_dev, path),
        direct_io=direct_io,
        writable=error is None,
        free_bytes=_free_bytes(path),
        owner_uid=facts.st_uid,
        mode=stat.S_IMODE(facts.st_mode),
        stores=tuple(
            (str(file.relative_to(path)), _allocated_bytes(file))
            for file in sorted(path.glob(f"*/*/{SLAB_FILE}"))
        ),
    )


def check_roots(
    roots: Sequence[Path],
    size_bytes: int,
    *,
    slab_bytes: int | None = None,
    store_files: Sequence[Path] | None = None,
    allow_any_filesystem: bool = False,
) -> None:
    """Refuse directories that cannot hold a store of `size_bytes` in equal shares; create those that are missing.

    `slab_bytes` adds the check that at least two slabs fit, and one in each root. `store_files` names the slab
    file in each root that will be used: its blocks count as free, and a process that holds it is reported.
    Without it the blocks of all slab files count as free.

    Raises:
        StoreError: with one sentence that names the flag, the value and the way out.
    """
    assert roots, "at least one root"
    if slab_bytes is not None:
        _check_size(size_bytes, slab_bytes, len(roots))
    devices: dict[int, list[Path]] = {}
    places: dict[tuple[int, int], int] = {}
    for number, root in enumerate(roots):
        _check_directory(root, allow_any_filesystem)
        facts = root.stat()
        first = places.setdefault((facts.st_dev, facts.st_ino), number)
        if first != number:
            before = roots[first]
            names = (
                f"{before} twice" if before == root else f"{before} and {root}, which are the same directory"
            )
            raise StoreError(f"--histate-ssd-dir names {names}: give each directory once")
        devices.setdefault(facts.st_dev, []).append(root)
    for together in devices.values():
        if len(together) > 1:
            _log.warning(
                "--histate-ssd-dir: %s are on one file system: more directories make no disk faster or larger",
                " and ".join(map(str, together)),
            )
        # Before the model is known any slab file here may be the one that is used again.
        own_files: Iterable[Path] = store_files or [
            file for root in together for file in root.glob(f"*/*/{SLAB_FILE}")
        ]
        _check_room(together, len(roots), size_bytes, own_files)
    for file in store_files or ():
        _refuse_locked(file)


def _check_size(size_bytes: int, slab_bytes: int, n_roots: int) -> None:
    slabs = max(2, n_roots)
    least = n_roots * SUPERBLOCK_BYTES + slabs * slab_bytes
    if size_bytes < least:
        what = "two checkpoints" if n_roots <= 2 else f"a checkpoint in each of {n_roots} directories"
        raise StoreError(
            f"--histate-ssd-size {format_size(size_bytes)} is too small for {what} of this model: "
            f"give at least {format_size(least)} ({least} bytes)"
        )


def _check_directory(path: Path, allow_any_filesystem: bool) -> None:
    where = f"--histate-ssd-dir {path}"
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
    filesystem = _filesystem(facts.st_dev, path)
    why_not = UNSUITABLE_FILESYSTEMS.get(filesystem)
    if why_not is not None and not allow_any_filesystem:
        raise StoreError(
            f"{where} is on {filesystem}, {why_not}; "
            "use a directory on a local disk, or add --histate-allow-any-filesystem"
        )
    if why_not is not None:
        _log.warning("%s is on %s, %s", where, filesystem, why_not)
    error, _ = _try_writing(path)
    if error is not None and error.errno == errno.EROFS:
        raise StoreError(f"{where} is mounted read-only: mount it for writing or use another directory")
    if error is not None:
        raise StoreError(
            f"{where} is not writable ({error.strerror}): check its permissions or use another directory"
        )


def _check_room(roots: Sequence[Path], n_roots: int, size_bytes: int, own_files: Iterable[Path]) -> None:
    """`roots`: those of `n_roots` that share one file system."""
    mine = [file for file in own_files if any(root in file.parents for root in roots)]
    free_bytes = _free_bytes(roots[0]) + sum(map(_allocated_bytes, mine))
    needed_bytes = size_bytes * len(roots) // n_roots
    if free_bytes >= needed_bytes:
        return
    wanted = f"--histate-ssd-size {format_size(size_bytes)}"
    if len(roots) < n_roots:
        wanted = f"its share {format_size(needed_bytes)} of {wanted}"
    raise StoreError(
        f"--histate-ssd-dir {','.join(map(str, roots))} has {format_size(free_bytes)} free, {wanted} does "
        "not fit: free some space (stores of other models may lie there) or lower the size"
    )


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
        if path.is_symlink():
            raise StoreError(
                f"{where} is a symbolic link, which could lead elsewhere next time: give {path.resolve()} itself"
            )
        if path.is_dir():
            return
        if path.exists():
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


def _try_writing(path: Path) -> tuple[OSError | None, bool]:
    """Return (why no file can be written there or None, O_DIRECT works there)."""
    try:
        fd, name = tempfile.mkstemp(prefix=".histate-probe-", dir=path)
    except OSError as error:
        return error, False
    try:
        page = mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            if os.pwritev(fd, [page], 0) != PAGE_BYTES:
                return OSError(errno.EIO, "a write stopped half-way"), False
        except OSError as error:
            # A full disk is writable; its size is checked apart.
            return (None if error.errno == errno.ENOSPC else error), False
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            whole = os.pwritev(fd, [page], 0) == PAGE_BYTES == os.preadv(fd, [page], 0)
        except OSError:
            whole = False
        return None, whole
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
