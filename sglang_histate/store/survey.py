"""A store as its files show it: for tools, read-only, beside a running server or without one.

    survey(root)               everything below a root: slab files, and what is none of ours
    with SlabFile.open(...)    one of them
        .headers()             every slab with what its header says

Nothing here takes the lock for longer than a moment, and nothing writes. Files of other format versions are named
and left alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from .blocks import SlabHeader, Superblock, superblock_version, version_of
from .holder import lock_holder
from .layout import FORMAT_VERSION, SUPERBLOCK_BYTES, Fingerprint, RecordLayout
from .private_files import open_below
from .probe import SLAB_FILE
from .quarantine import QUARANTINE_FILE
from .reasons import StoreError
from .snapshot import SNAPSHOT_FILE

_FINGERPRINT_NAME = re.compile(r"[0-9a-f]{16}")
_OWN_FILES = frozenset({SLAB_FILE, SNAPSHOT_FILE, SNAPSHOT_FILE + ".tmp", QUARANTINE_FILE})
_THREADS = 16
_BATCH = 1024


class FileState(StrEnum):
    STORE = "store"
    EMPTY = "empty"  # preallocated and never opened by a server
    OTHER_VERSION = "other_version"  # of the format: never touched
    DAMAGED = "damaged"  # no sound superblock: the next start begins with an empty store


class SlabState(StrEnum):
    EMPTY = "empty"  # never written, or purged
    RECORD = "record"
    EXPIRED = "expired"  # the store was cleared after it was written
    OTHER_VERSION = "other_version"
    OTHER_FINGERPRINT = "other_fingerprint"
    UNSOUND = "unsound"  # torn or damaged header
    UNREADABLE = "unreadable"


class Slab(NamedTuple):
    number: int
    state: SlabState
    header: SlabHeader | None


@dataclass(frozen=True)
class Found:
    """What lies below a root: slab files by path, and paths that no store has made, relative to the root."""

    files: tuple[Path, ...]
    strangers: tuple[str, ...]


def survey(root: Path) -> Found:
    """Return what is below `root`. Nothing is opened.

    Raises:
        StoreError: `root` is no directory or cannot be read.
    """
    files: list[Path] = []
    strangers: list[str] = []
    try:
        for folder in sorted(root.iterdir()):
            if not _FINGERPRINT_NAME.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
                strangers.append(folder.name)
                continue
            for rank in sorted(folder.iterdir()):
                if rank.is_symlink() or not rank.is_dir():
                    strangers.append(str(rank.relative_to(root)))
                    continue
                names = {file.name for file in rank.iterdir()}
                strangers += [str((rank / name).relative_to(root)) for name in sorted(names - _OWN_FILES)]
                if SLAB_FILE in names:
                    files.append(rank / SLAB_FILE)
    except OSError as error:
        raise StoreError(
            f"--ssd-dir {root} cannot be read ({error.strerror}): name the directory of --histate-ssd-dir"
        ) from None
    return Found(tuple(files), tuple(strangers))


class SlabFile:
    """One slab file, open for reading. Close it, or use it in a `with`."""

    def __init__(self, root: Path, path: Path, fd: int) -> None:
        self.root = root
        self.path = path
        self.fd = fd
        self.file_bytes = os.fstat(fd).st_size
        self.holder = lock_holder(fd)
        block = os.pread(fd, SUPERBLOCK_BYTES, 0)
        self.superblock = Superblock.parse(block)
        self.version = superblock_version(block)
        self.layout = None if self.superblock is None else layout_of(self.superblock)

    @classmethod
    def open(cls, root: Path, path: Path, flags: int = os.O_RDONLY) -> SlabFile:
        """Open it.

        Raises:
            StoreError, FileNotFoundError: see `open_below`.
        """
        fd = open_below(root, path, flags)
        try:
            return cls(root, path, fd)
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> SlabFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    @property
    def name(self) -> str:
        """Fingerprint and rank: ``<fingerprint16>/<rank>``."""
        return str(self.path.parent.relative_to(self.root))

    @property
    def live(self) -> bool:
        return self.holder is not None

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    @property
    def state(self) -> FileState:
        if self.layout is not None:
            return FileState.STORE
        if self.version is not None and self.version != FORMAT_VERSION:
            return FileState.OTHER_VERSION
        return FileState.DAMAGED if any(os.pread(self.fd, SUPERBLOCK_BYTES, 0)) else FileState.EMPTY

    @property
    def slab_count(self) -> int:
        """Slabs that are wholly in the file."""
        if self.superblock is None or self.layout is None:
            return 0
        return min(self.superblock.slab_count, self.layout.slab_count(self.file_bytes))

    @property
    def identity(self) -> dict[str, Any] | None:
        """What the store was made for, as the server wrote it; None if there was no room for all of it."""
        facts = None if self.superblock is None else _facts(self.superblock)
        return None if facts is None else facts["identity"]

    def headers(self) -> Iterator[Slab]:
        """Yield every slab, by number."""
        if self.superblock is None or self.layout is None:
            return
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into payloads
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="histate-survey") as pool:
            for first in range(0, self.slab_count, _BATCH):
                numbers = range(first, min(first + _BATCH, self.slab_count))
                yield from map(self.judge, numbers, pool.map(self._header, numbers))

    def judge(self, number: int, header: bytes | None) -> Slab:
        """Return what the header block of a slab says; None is one that could not be read."""
        assert self.superblock is not None
        if header is None:
            return Slab(number, SlabState.UNREADABLE, None)
        version = version_of(header)
        if version is None:
            return Slab(number, SlabState.EMPTY, None)
        if version != FORMAT_VERSION:
            return Slab(number, SlabState.OTHER_VERSION, None)
        found = SlabHeader.parse(header)
        if found is None:
            return Slab(number, SlabState.UNSOUND, None)
        if found.fingerprint_half != self.superblock.fingerprint_sha256[:16]:
            return Slab(number, SlabState.OTHER_FINGERPRINT, found)
        expired = found.generation < self.superblock.oldest_valid
        return Slab(number, SlabState.EXPIRED if expired else SlabState.RECORD, found)

    def _header(self, number: int) -> bytes | None:
        assert self.layout is not None
        size, offset = self.layout.header_bytes, self.layout.slab_offset(number)
        try:
            block = os.pread(self.fd, size, offset)
            os.posix_fadvise(self.fd, offset, size, os.POSIX_FADV_DONTNEED)
        except OSError:
            return None
        return block if len(block) == size else None


def layout_of(superblock: Superblock) -> RecordLayout | None:
    """Return the layout of a store, or None if the superblock contradicts itself.

    Where the identity is longer than the superblock, segments of equal size are assumed: one a layer, as the server
    writes them.
    """
    facts = _facts(superblock)
    if facts is not None:
        segments = tuple(int(size) for size in facts["segment_bytes"])
    else:
        segments = (superblock.payload_bytes // max(1, superblock.segment_count),) * superblock.segment_count
    try:
        layout = RecordLayout(segments, superblock.kv_page_bytes)
    except ValueError:
        return None
    found = (len(segments), layout.payload_bytes, layout.header_bytes, layout.slab_bytes)
    said = (
        superblock.segment_count, superblock.payload_bytes, superblock.header_bytes, superblock.slab_bytes,
    )  # fmt: skip
    return layout if found == said else None


def _facts(superblock: Superblock) -> dict[str, Any] | None:
    """Return the text of the fingerprint, if the superblock has all of it."""
    text = superblock.fingerprint_json
    if Fingerprint(text).digest != superblock.fingerprint_sha256:
        return None
    facts = json.loads(text)
    return facts if isinstance(facts, dict) and {"identity", "segment_bytes"} <= facts.keys() else None
