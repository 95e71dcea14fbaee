"""How a store gets hold of its file: check, create, lock, preallocate, superblock, O_DIRECT.

Runs once, before any thread exists. Whatever fails here ends in a `StoreError`; the store never opens half.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np

from .blocks import Superblock
from .disk import Disk, PosixDisk
from .faults import from_environment
from .layout import SUPERBLOCK_BYTES, Fingerprint, RecordLayout
from .probe import SLAB_FILE, check_directory, make_private, probe_directory
from .reasons import StoreError
from .records import RecordPool

_log = logging.getLogger("sglang_histate.store")
_RANK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def slab_file(root: Path, fingerprint: Fingerprint, rank_name: str) -> Path:
    """Return where the slab file of one rank lies.

    Raises:
        ValueError: `rank_name` is not a plain file name.
    """
    if not _RANK_NAME.fullmatch(rank_name):
        raise ValueError(f"rank name {rank_name!r} must be a plain file name such as tp0of1-pp0of1")
    return root / fingerprint.directory_name / rank_name / SLAB_FILE


def open_disk(
    root: Path,
    rank_name: str,
    size_bytes: int,
    layout: RecordLayout,
    fingerprint: Fingerprint,
    records: RecordPool,
) -> tuple[Disk, int]:
    """Return the locked, preallocated file of this rank and its new epoch.

    Raises:
        StoreError: see `check_directory` and `PosixDisk.open`.
    """
    file = slab_file(root, fingerprint, rank_name)
    check_directory(root, size_bytes, slab_bytes=layout.slab_bytes, store_file=file)
    make_private(file.parent.parent)
    make_private(file.parent)
    slab_count = layout.slab_count(size_bytes)
    disk = PosixDisk.open(file)
    try:
        disk.preallocate(layout.file_bytes(slab_count))
        epoch = start_epoch(disk, layout, slab_count, fingerprint, records)
        page = Superblock.of(layout, slab_count, fingerprint, epoch).pack()
        direct = disk.enable_direct(page, [record.image for record in records.records])
        disk.sync()
    except BaseException:
        disk.close()
        raise
    filesystem = probe_directory(root)
    _log.info(
        "%s: %d slabs of %d bytes, O_DIRECT %s",
        file,
        slab_count,
        layout.slab_bytes,
        "on" if direct else "off",
    )
    if not filesystem.suitable:
        _log.warning("--histate-ssd-dir %s is on %s, not on a local disk", root, filesystem.filesystem)
    if not direct:
        _log.warning(
            "--histate-ssd-dir %s: O_DIRECT does not work there, reads go through the page cache", root
        )
    return from_environment(disk, rank_name), epoch


def start_epoch(
    disk: Disk, layout: RecordLayout, slab_count: int, fingerprint: Fingerprint, records: RecordPool
) -> int:
    """Write a superblock whose epoch is one above the one found, or 1, and return that epoch.

    Raises:
        StoreError: block 0 cannot be read or written.
    """
    memory = records.records[0].memory[:SUPERBLOCK_BYTES]
    block = records.records[0].image[:SUPERBLOCK_BYTES]
    try:
        memory[:] = 0
        disk.read_at([block], 0)
        found = Superblock.parse(memory.tobytes())
        epoch = 1 if found is None else found.epoch + 1
        page = Superblock.of(layout, slab_count, fingerprint, epoch).pack()
        memory[:] = np.frombuffer(page, dtype=np.uint8)
        whole = disk.write_at([block], 0) == SUPERBLOCK_BYTES
    except OSError as error:
        raise StoreError(
            f"--histate-ssd-dir: the slab file cannot be used ({error}): check the disk"
        ) from error
    if not whole:
        raise StoreError("--histate-ssd-dir: the slab file could only be written in part: check the disk")
    return epoch
