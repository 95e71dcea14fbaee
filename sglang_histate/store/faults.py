"""A slow or broken disk on purpose. For tests only: active when one of these variables is set.

    HISTATE_TEST_DISK_DELAY_MS    each read and write first sleeps up to this many milliseconds, at random
    HISTATE_TEST_DISK_FAULT_RATE  probability that a read fails: half with EIO, half with one wrong byte
    HISTATE_TEST_WRONG_STATES     if set, checkpoints are written with other numbers, and sums that fit them

The random numbers are seeded with the name of the rank, so that ranks differ from each other but not from
run to run.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import xxhash

from .blocks import SlabHeader
from .disk import Disk
from .kinds import RecordKind
from .layout import RecordLayout

DELAY_VARIABLE = "HISTATE_TEST_DISK_DELAY_MS"
FAULT_VARIABLE = "HISTATE_TEST_DISK_FAULT_RATE"
WRONG_VARIABLE = "HISTATE_TEST_WRONG_STATES"


class FaultyDisk:
    """Passes everything on to `inner`, late and sometimes wrong."""

    def __init__(self, inner: Disk, delay_ms: float, fault_rate: float, seed: str) -> None:
        self._inner = inner
        self._delay_s = delay_ms / 1000
        self._fault_rate = fault_rate
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    @property
    def direct(self) -> bool:
        return self._inner.direct

    def preallocate(self, size_bytes: int) -> None:
        self._inner.preallocate(size_bytes)

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        delay, fault, kind, position = self._draw()
        time.sleep(delay * self._delay_s)
        if fault >= self._fault_rate:
            return self._inner.read_at(buffers, offset)
        if kind < 0.5:
            raise OSError(errno.EIO, "made to fail by " + FAULT_VARIABLE)
        count = self._inner.read_at(buffers, offset)
        first = buffers[0]
        first[int(position * len(first))] ^= 0x40
        return count

    def write_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(self._draw()[0] * self._delay_s)
        return self._inner.write_at(buffers, offset)

    def sync(self) -> None:
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()

    def _draw(self) -> tuple[float, float, float, float]:
        with self._lock:
            draw = self._random.random
            return draw(), draw(), draw(), draw()


class WrongStatesDisk:
    """Passes everything on to `inner`, but changes the first layer of each checkpoint that is written.

    Its numbers keep their size and lose their signs, and the header's sum is that of the changed bytes: what a defect
    before the sum was taken would leave. Only for records that go out in one piece.
    """

    def __init__(self, inner: Disk, layout: RecordLayout) -> None:
        self._inner = inner
        self._layout = layout

    @property
    def direct(self) -> bool:
        return self._inner.direct

    def preallocate(self, size_bytes: int) -> None:
        self._inner.preallocate(size_bytes)

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._inner.read_at(buffers, offset)

    def write_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        layout = self._layout
        header = SlabHeader.parse(bytes(buffer[: layout.header_bytes]))
        if header is None or header.kind is not RecordKind.CHECKPOINT:
            return self._inner.write_at(buffers, offset)
        copy = memoryview(mmap.mmap(-1, len(buffer), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        copy[:] = buffer
        first = copy[layout.header_bytes :][: layout.part_bytes(RecordKind.CHECKPOINT, 0)[0]]
        np.frombuffer(first, dtype=np.uint8)[3::4] ^= 0x80
        part_sums = (xxhash.xxh3_64_intdigest(first), *header.part_sums[1:])
        copy[: layout.header_bytes] = replace(header, part_sums=part_sums).pack(layout.header_bytes)
        return self._inner.write_at([copy], offset)

    def sync(self) -> None:
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


def from_environment(
    disk: Disk, rank_name: str, layout: RecordLayout, environment: Mapping[str, str] = os.environ
) -> Disk:
    """Return `disk` itself, or wrapped when a test asks for it."""
    delay_ms = float(environment.get(DELAY_VARIABLE) or 0)
    fault_rate = float(environment.get(FAULT_VARIABLE) or 0)
    if environment.get(WRONG_VARIABLE):
        disk = WrongStatesDisk(disk, layout)
    if delay_ms == 0 and fault_rate == 0:
        return disk
    return FaultyDisk(disk, delay_ms, fault_rate, seed=rank_name)
