"""Takes records off the disk for good: their headers become zero. Of all namespaces, or of one.

Who calls it is the only writer of the file: the writer thread of an open store, or a tool that holds the lock. Payloads
stay in their slabs until a later record comes there, or `overwrite`: nothing finds them without a header, but who can
read the file can read them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

from .blocks import SlabHeader, version_of
from .disk import Disk
from .kinds import Key
from .layout import FORMAT_VERSION, RecordLayout

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Erased:
    """`records`: headers that are zero now. `kept`: names of the records that are still there."""

    records: int
    kept: frozenset[Key]


def erase(
    disk: Disk,
    layout: RecordLayout,
    slab_count: int,
    namespace: bytes | None,
    *,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Erased:
    """Erase what is of `namespace` (None: everything), and every header that is torn or cannot be read: it may have been.

    Records that an older run left and that count for nothing any more are erased too. `overwrite` writes zeros over
    whole slabs. It is on the disk when this returns. `progress(1)` hears of each slab.

    Raises:
        OSError: some slabs could not be written; all others are done.
    """
    records, failed, kept = 0, 0, set()
    size = layout.slab_bytes if overwrite else layout.header_bytes
    image = memoryview(
        mmap.mmap(-1, max(size, layout.header_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    )
    header = image[: layout.header_bytes]
    for slab in range(slab_count):
        offset = layout.slab_offset(slab)
        found, goes = _judge(_read(disk, header, offset), namespace)
        if found is not None and not goes:
            kept.add(Key(found.key, found.kind))
        if goes:
            header[:] = bytes(len(header))
            if _write(disk, image[:size], offset):
                records += 1
            else:
                failed += 1
        progress(1)
    disk.sync()
    if failed:
        raise OSError(f"{failed} of {failed + records} records could not be erased")
    return Erased(records, frozenset(kept))


def _read(disk: Disk, header: memoryview, offset: int) -> bytes | None:
    try:
        return bytes(header) if disk.read_at([header], offset) == len(header) else None
    except OSError:
        return None


def _judge(block: bytes | None, namespace: bytes | None) -> tuple[SlabHeader | None, bool]:
    """Return the header in `block`, if it is one, and whether it goes."""
    if block is None:
        return None, True
    if version_of(block) != FORMAT_VERSION:
        return None, False
    found = SlabHeader.parse(block)
    return found, namespace is None or found is None or found.namespace == namespace


def _write(disk: Disk, zeros: memoryview, offset: int) -> bool:
    try:
        for start in range(0, len(zeros), _PIECE_BYTES):
            piece = zeros[start : start + _PIECE_BYTES]
            if disk.write_at([piece], offset + start) != len(piece):
                return False
    except OSError:
        return False
    return True
