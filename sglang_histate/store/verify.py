"""Reads every record of a slab file and checks every sum, also beside the server that writes to it.

A record that is being written looks torn. So what does not fit is looked at again, until it fits or until nothing in
it has changed for two seconds; only then it is called bad.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from .blocks import SlabHeader
from .kinds import RecordKind
from .layout import sums
from .private_files import open_below
from .recovery import fits
from .survey import Slab, SlabFile, SlabState

LOOKS_S = 0.5
_UNCHANGED_LOOKS = 4
_MOST_LOOKS = 120
_NAMED = 20


class Bad(StrEnum):
    """What can be wrong with a slab."""

    UNREADABLE = "unreadable"  # the disk gave an error, or the file ends before it
    UNSOUND = "unsound_header"  # torn or damaged
    OTHER_FINGERPRINT = "other_fingerprint"
    OTHER_LAYOUT = "other_layout"  # parts or lengths that this store cannot have
    CORRUPT_SEGMENT = "corrupt_segment"  # of a checkpoint
    CORRUPT_PAGE = "corrupt_page"  # of a KV extent


@dataclass
class Verified:
    """What one pass found. Expired records and empty slabs are not read."""

    sound: Counter[RecordKind] = field(default_factory=Counter)
    bad: Counter[Bad] = field(default_factory=Counter)
    named: list[tuple[int, Bad]] = field(default_factory=list)  # slab and reason of the first ones
    expired: int = 0
    other_version: int = 0  # slabs of another format version: left alone
    unsettled: int = 0  # written to all the time: not judged
    read_bytes: int = 0


class Verification:
    """One pass over one file. `rate`: most bytes per second, None for no limit."""

    def __init__(
        self, file: SlabFile, rate: int | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        assert file.layout is not None
        self._file = file
        self._layout = file.layout
        self._rate = rate
        self._sleep = sleep
        self._started_s = time.monotonic()
        self._image = memoryview(
            mmap.mmap(-1, self._layout.slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )
        self._direct = _direct(file)
        self.result = Verified()

    def run(self, progress: Callable[[int], None] = lambda _: None) -> Verified:
        """Read everything; `progress(n)` hears that n more slabs are done."""
        try:
            doubtful = []
            for slab in self._file.headers():
                if slab.state is SlabState.EXPIRED:
                    self.result.expired += 1
                elif slab.state is SlabState.OTHER_VERSION:
                    self.result.other_version += 1
                elif slab.state is not SlabState.EMPTY and not self._settled(slab.number):
                    doubtful.append(slab.number)
                    continue
                progress(1)
            for number in doubtful:
                self._look_again(number)
                progress(1)
        finally:
            if self._direct is not None:
                os.close(self._direct)
        return self.result

    def _settled(self, number: int) -> bool:
        """Look at a slab once; return whether there is nothing wrong with it (any more)."""
        slab, bad, _ = self._look(number)
        if bad is None:
            self._count(slab)
        elif not self._file.live:
            self._blame(number, bad)
        return bad is None or not self._file.live

    def _look_again(self, number: int) -> None:
        unchanged, before = 0, None
        for _ in range(_MOST_LOOKS):
            slab, bad, seen = self._look(number)
            if bad is None:
                self._count(slab)
                return
            unchanged = unchanged + 1 if seen == before else 0
            before = seen
            if unchanged >= _UNCHANGED_LOOKS:
                self._blame(number, bad)
                return
            self._sleep(LOOKS_S)
        self.result.unsettled += 1

    def _look(self, number: int) -> tuple[Slab, Bad | None, object]:
        """Return what the slab is now, what is wrong with it, and something that changes when it is written to."""
        layout = self._layout
        block = self._read(number, 0, layout.header_bytes)
        slab = self._file.judge(number, block)
        header = slab.header
        if slab.state is SlabState.UNREADABLE:
            return slab, Bad.UNREADABLE, None
        if slab.state is SlabState.UNSOUND:
            return slab, Bad.UNSOUND, block
        if slab.state is SlabState.OTHER_FINGERPRINT:
            return slab, Bad.OTHER_FINGERPRINT, block
        if slab.state is not SlabState.RECORD or header is None:
            return slab, None, None
        if not fits(header, layout):
            return slab, Bad.OTHER_LAYOUT, block
        return self._look_at_payload(slab, header, block)

    def _look_at_payload(
        self, slab: Slab, header: SlabHeader, block: bytes | None
    ) -> tuple[Slab, Bad | None, object]:
        layout = self._layout
        size = layout.transfer_bytes(header.kind, header.n_pages) - layout.header_bytes
        if self._read(slab.number, layout.header_bytes, size, keep=False) is None:
            return slab, Bad.UNREADABLE, block
        found = sums(self._image, layout.part_bytes(header.kind, header.n_pages))
        if found == header.part_sums:
            return slab, None, None
        bad = Bad.CORRUPT_PAGE if header.kind is RecordKind.KV else Bad.CORRUPT_SEGMENT
        return slab, bad, (block, found)

    def _read(self, number: int, at: int, size: int, *, keep: bool = True) -> bytes | None:
        """Read into the image; return the bytes (none, but not None, unless `keep`), or None if that failed."""
        target = self._image[:size]
        offset = self._layout.slab_offset(number) + at
        try:
            fd = self._file.fd if self._direct is None else self._direct
            whole = os.preadv(fd, [target], offset) == size
            if self._direct is None:
                os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
        except OSError:
            return None
        self.result.read_bytes += size
        if self._rate is not None:
            ahead_s = self.result.read_bytes / self._rate - (time.monotonic() - self._started_s)
            if ahead_s > 0:
                self._sleep(ahead_s)
        if not whole:
            return None
        return bytes(target) if keep else b""

    def _count(self, slab: Slab) -> None:
        if slab.state is SlabState.RECORD and slab.header is not None:
            self.result.sound[slab.header.kind] += 1

    def _blame(self, number: int, bad: Bad) -> None:
        self.result.bad[bad] += 1
        if len(self.result.named) < _NAMED:
            self.result.named.append((number, bad))


def _direct(file: SlabFile) -> int | None:
    """Return a descriptor that reads past the page cache, None where that does not work."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        fd = open_below(file.root, file.path, os.O_RDONLY | os.O_DIRECT)
    except Exception:
        return None
    try:
        os.preadv(fd, [page], 0)
    except OSError:
        os.close(fd)
        return None
    return fd
