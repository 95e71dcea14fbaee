"""Record buffers: a fixed number of page-aligned pieces of memory, each as large as one slab, for either kind.

Owns the memory and who holds it. Does not touch the disk and does not know keys.
A record is free -> acquired (1 reference) -> shared (more references) -> free when the last one goes.
All methods run on the scheduler thread, so the sequence of buffers is the same on every rank.
Threads may read and write the *bytes* of a record that somebody holds, never its references.

One anonymous private mapping holds all buffers, so a caller with a GPU can register it in one call
(`RecordPool.memory`). Memory from the CUDA driver itself can fail O_DIRECT with EFAULT; registered memory
does not.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .layout import RecordLayout

if TYPE_CHECKING:
    from .admission import Claim

Bytes = npt.NDArray[np.uint8]


class Record:
    """One buffer: `memory` is the whole slab image, the others are views of its parts.

    `payload` is where a checkpoint lies, a writable uint8 array of exactly `payload_bytes`;
    `torch.frombuffer(record.payload, ...)` shares it. `kv_pages` are the same bytes as an extent:
    ``[pages_per_extent, kv_page_bytes]``, of which a record of n pages uses the first n. Once the record was
    put, its bytes are read-only by contract: reads may be served from it. Who filled it and knows that it must never be
    stored makes it not `sound` before that; `value` is what it is worth if it was not claimed, see `claim_record`.
    """

    __slots__ = (
        "buffer_id", "claim", "header", "image", "kv_pages", "memory", "payload", "refs", "sound", "value",
    )  # fmt: skip

    def __init__(self, buffer_id: int, memory: Bytes, layout: RecordLayout) -> None:
        self.buffer_id = buffer_id
        self.memory = memory
        self.image = memoryview(memory)  # type: ignore[arg-type]  # what the disk reads and writes
        self.header = memory[: layout.header_bytes]
        self.payload = memory[layout.header_bytes : layout.header_bytes + layout.payload_bytes]
        extent = memory[layout.header_bytes :][: layout.pages_per_extent * layout.kv_page_bytes]
        self.kv_pages = extent.reshape(layout.pages_per_extent, layout.kv_page_bytes)
        self.refs = 0
        self.sound = True
        self.value: float | None = None  # tokens of recomputation per byte, None: any price
        self.claim: Claim | None = None  # the store's: bytes that it may cost to write this record


class RecordPool:
    """`count` record buffers for `layout`. Never blocks: an empty pool answers None.

    Raises:
        ValueError: `count` is not positive.
        MemoryError, OSError: the mapping does not fit.
    """

    def __init__(self, layout: RecordLayout, count: int) -> None:
        if count < 1:
            raise ValueError(f"the store needs at least one record buffer, not {count}")
        arena = mmap.mmap(-1, count * layout.slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork during a direct read would leave the two processes with different copies of the page being
        # filled.
        arena.madvise(mmap.MADV_DONTFORK)
        # A direct transfer names every page: with pages of 4 KiB it takes ten times the CPU time, and on some disks
        # twice as long. A kernel without huge pages refuses.
        with suppress(OSError):
            arena.madvise(mmap.MADV_HUGEPAGE)
        self.memory: Bytes = np.frombuffer(arena, dtype=np.uint8)
        slabs = self.memory.reshape(count, layout.slab_bytes)
        self.records = tuple(Record(i, slabs[i], layout) for i in range(count))
        self._free = list(reversed(self.records))

    @property
    def total(self) -> int:
        return len(self.records)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def free_for_writes(self) -> int:
        """Free buffers that a writer may take: an eighth of all, at least one of several, is left to reads."""
        return max(0, self.free - max(min(1, self.total - 1), self.total // 8))

    def free_ids(self) -> tuple[int, ...]:
        """Return the free buffers, next one last."""
        return tuple(record.buffer_id for record in self._free)

    def acquire(self) -> Record | None:
        if not self._free:
            return None
        record = self._free.pop()
        assert record.refs == 0
        record.refs = 1
        record.sound = True
        record.value = None
        return record

    def share(self, record: Record) -> Record:
        """Add one reference to a record that is in use."""
        assert record.refs > 0, "a free record cannot be shared"
        record.refs += 1
        return record

    def release(self, record: Record) -> None:
        """Give back one reference."""
        assert record.refs > 0, "released more often than acquired"
        record.refs -= 1
        if record.refs == 0:
            self._free.append(record)
