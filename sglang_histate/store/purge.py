"""Purges a store that no server has open: everything, files included, or the records of one namespace.

An open store is purged by its server, see `CheckpointStore.purge`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from .blocks import Superblock
from .disk import PosixDisk, lock
from .erase import Erased, erase
from .layout import FORMAT_VERSION, SUPERBLOCK_BYTES, Fingerprint
from .private_files import open_below
from .quarantine import QUARANTINE_FILE
from .reasons import StoreError
from .snapshot import SNAPSHOT_FILE, Snapshot, SnapshotFile
from .survey import FileState, SlabFile

Progress = Callable[[int], None]


def purge_namespace(file: SlabFile, namespace: bytes, *, overwrite: bool, progress: Progress) -> int:
    """Erase the records of one namespace; return how many. `file` is open for writing and has a layout.

    Raises:
        StoreError: a server has it open, or the disk refuses.
    """
    erased = _erase(file, namespace, overwrite, progress)
    assert file.superblock is not None
    _forget_names(file, file.superblock, erased)
    return erased.records


def purge_all(file: SlabFile, *, overwrite: bool, progress: Progress) -> int:
    """Erase every record, then remove the file and what lies beside it; return how many. `file` is open for writing.

    Raises:
        StoreError: a server has it open, it is none of this format, or the disk refuses.
    """
    if file.state is FileState.OTHER_VERSION or (file.state is FileState.DAMAGED and file.version is None):
        raise StoreError(f"{file.path} is no store of format {FORMAT_VERSION} and stays: remove it by hand")
    records = _erase(file, None, overwrite, progress).records
    try:
        os.pwrite(file.fd, bytes(SUPERBLOCK_BYTES), 0)
        os.fdatasync(file.fd)
        # The lock is held to the end: a server that starts now gets a new file, or the sentence that this one is in use.
        for name in (SNAPSHOT_FILE, SNAPSHOT_FILE + ".tmp", QUARANTINE_FILE):
            file.path.with_name(name).unlink(missing_ok=True)
        file.path.unlink()
    except OSError as error:
        raise StoreError(f"{file.path} could not be removed ({error.strerror}): check the disk") from None
    for folder in (file.path.parent, file.path.parent.parent):
        with contextlib.suppress(OSError):  # something else lies there: it stays
            folder.rmdir()
    return records


def _erase(file: SlabFile, namespace: bytes | None, overwrite: bool, progress: Progress) -> Erased:
    lock(file.fd, file.path)
    if file.layout is None:
        return Erased(0, frozenset())
    disk = PosixDisk(file.fd, file.path)
    try:
        return erase(disk, file.layout, file.slab_count, namespace, overwrite=overwrite, progress=progress)
    except OSError as error:
        raise StoreError(
            f"{file.path} was purged only in part ({error}): check the disk, then try again"
        ) from None


def _forget_names(file: SlabFile, superblock: Superblock, erased: Erased) -> None:
    """Take the purged names out of the snapshot; one that cannot be read goes: it only costs the order of use."""
    path = file.path.with_name(SNAPSHOT_FILE)
    content = _content(file.root, path)
    if content is None:
        return
    fingerprint = Fingerprint(superblock.fingerprint_json)
    found = Snapshot.parse(content, fingerprint)
    try:
        if not isinstance(found, Snapshot):
            path.unlink()
            return
        names = tuple(name for name in found.names if name in erased.kept)
        SnapshotFile(path).replace(
            Snapshot(found.epoch, found.newest, names, found.written).pack(fingerprint)
        )
    except OSError as error:
        raise StoreError(f"{path} could not be replaced ({error.strerror}): check the disk") from None


def _content(root: Path, path: Path) -> bytes | None:
    try:
        fd = open_below(root, path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read()
