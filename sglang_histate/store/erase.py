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
    """Erase what is of `namespace` (None: everything), and every header that is torn: it may have been.

    Records that an older run left and that count for nothing any more are erased too. `overwrite` writes zeros over
    whole slabs. It is on the disk when this returns. `progress(1)` hears of each slab.

    Raises:
        OSError: a slab could not be read or written; others may have been erased.
    """
    records, kept = 0, set()
    size = layout.slab_bytes if overwrite else layout.header_bytes
    image = memoryview(
        mmap.mmap(-1, max(size, layout.header_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    )
    header = image[: layout.header_bytes]
    for slab in range(slab_count):
        offset = layout.slab_offset(slab)
        if disk.read_at([header], offset) != layout.header_bytes:
            raise OSError(f"slab {slab} could only be read in part")
        found, goes = _judge(bytes(header), namespace)
        if found is not None and not goes:
            kept.add(Key(found.key, found.kind))
        if goes:
            header[:] = bytes(len(header))
            _write(disk, image[:size], offset)
            records += 1
        progress(1)
    disk.sync()
    return Erased(records, frozenset(kept))


def _judge(block: bytes, namespace: bytes | None) -> tuple[SlabHeader | None, bool]:
    """Return the header in `block`, if it is one, and whether it goes."""
    if version_of(block) != FORMAT_VERSION:
        return None, False
    found = SlabHeader.parse(block)
    return found, namespace is None or found is None or found.namespace == namespace


def _write(disk: Disk, zeros: memoryview, offset: int) -> None:
    for start in range(0, len(zeros), _PIECE_BYTES):
        piece = zeros[start : start + _PIECE_BYTES]
        if disk.write_at([piece], offset + start) != len(piece):
            raise OSError("a slab could only be erased in part")
