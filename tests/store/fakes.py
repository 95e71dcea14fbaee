"""A disk in memory that fails the way real ones do, on request and in a known order."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Sequence

from sglang_histate.store.disk import FilePlace

SECTOR_BYTES = 512


class FakeDisk:
    """Takes one fault per call from `read_faults` or `write_faults`; an empty queue means no fault.

    Read faults: "eio", "einval", ("short", n), ("flip", position).
    Write faults: "eio", "enospc", ("short", sectors), ("flip", position), and ("tear", sectors), which says
    that all is well but keeps only the first sectors.
    """

    direct = False
    file_place = FilePlace.PRESENT

    def __init__(self) -> None:
        self.content = bytearray()
        self.read_faults: deque[object] = deque()
        self.write_faults: deque[object] = deque()
        self.writes_allowed = threading.Event()
        self.reads_allowed = threading.Event()
        self.write_entered = threading.Event()
        self.writes_allowed.set()
        self.reads_allowed.set()
        self.closed = False
        self.size = 0
        self.revived = 0
        self.largest_offset = 0

    def preallocate(self, size_bytes: int) -> None:
        self.size = size_bytes
        del self.content[size_bytes:]
        self.content.extend(bytes(size_bytes - len(self.content)))

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads_allowed.wait(10)
        (buffer,) = buffers
        fault = self.read_faults.popleft() if self.read_faults else None
        if fault == "eio":
            raise OSError(errno.EIO, "input/output error")
        if fault == "einval":
            raise OSError(errno.EINVAL, "invalid argument")
        data = self.content[offset : offset + len(buffer)]
        if isinstance(fault, tuple) and fault[0] == "short":
            data = data[: fault[1] % len(buffer)]
        if isinstance(fault, tuple) and fault[0] == "flip":
            data[fault[1] % len(data)] ^= 0x10
        buffer[: len(data)] = data
        return len(data)

    def write_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        self.write_entered.set()
        self.writes_allowed.wait(10)
        (buffer,) = buffers
        fault = self.write_faults.popleft() if self.write_faults else None
        if fault == "eio":
            raise OSError(errno.EIO, "input/output error")
        if fault == "enospc":
            raise OSError(errno.ENOSPC, "no space left on device")
        assert offset % 4096 == 0 and len(buffer) % 4096 == 0, "a direct write would be refused"
        data = bytearray(buffer)
        result = len(data)
        if isinstance(fault, tuple) and fault[0] in ("short", "tear"):
            data = data[: fault[1] * SECTOR_BYTES % len(data)]
            result = len(data) if fault[0] == "short" else result
        if isinstance(fault, tuple) and fault[0] == "flip":
            data[fault[1] % len(data)] ^= 0x10
        self.content.extend(bytes(max(0, offset - len(self.content))))  # a hole, after the file was cut
        self.content[offset : offset + len(data)] = data
        self.largest_offset = max(self.largest_offset, offset + result)
        return result

    def revive(self) -> None:
        self.revived += 1
        missing = self.size - len(self.content)
        self.content.extend(bytes(max(0, missing)))

    def sync(self) -> None: ...

    def close(self) -> None:
        self.closed = True
