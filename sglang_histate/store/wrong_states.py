"""A disk that keeps checkpoints which were wrong before they were written. For tests only, see `faults.py`."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from .blocks import SlabHeader
from .disk import Disk, FilePlace
from .kinds import RecordKind
from .layout import RecordLayout


class WrongStatesDisk:
    """Passes everything on to `inner`, but changes the first layer of each checkpoint that is written while `switch` exists.

    Its numbers keep their size and lose their signs, and the header's sum is that of the changed bytes: what a defect
    before the sum was taken would leave. Only for records that go out in one piece.
    """

    def __init__(self, inner: Disk, layout: RecordLayout, switch: Path) -> None:
        self._inner = inner
        self._layout = layout
        self._switch = switch

    @property
    def direct(self) -> bool:
        return self._inner.direct

    @property
    def file_place(self) -> FilePlace:
        return self._inner.file_place

    def preallocate(self, size_bytes: int) -> None:
        self._inner.preallocate(size_bytes)

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._inner.read_at(buffers, offset)

    def write_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        layout = self._layout
        header = SlabHeader.parse(bytes(buffer[: layout.header_bytes]))
        if header is None or header.kind is not RecordKind.CHECKPOINT or not self._switch.exists():
            return self._inner.write_at(buffers, offset)
        copy = memoryview(mmap.mmap(-1, len(buffer), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        copy[:] = buffer
        first = copy[layout.header_bytes :][: layout.part_bytes(RecordKind.CHECKPOINT, 0)[0]]
        np.frombuffer(first, dtype=np.uint8)[3::4] ^= 0x80
        part_sums = (xxhash.xxh3_64_intdigest(first), *header.part_sums[1:])
        copy[: layout.header_bytes] = replace(header, part_sums=part_sums).pack(layout.header_bytes)
        return self._inner.write_at([copy], offset)

    def revive(self) -> None:
        self._inner.revive()

    def sync(self) -> None:
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()
