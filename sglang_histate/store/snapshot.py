"""`stats.snap`, beside the slabs: in which order the records were used, and how much was written today.

Losing it costs ranking and lets that day's bytes be written twice, nothing else.

    offset  size  field
         0     8  magic "HISNAP" and two zero bytes
         8     4  version, 2
        12    32  fingerprint, sha256
        44     8  epoch in which it was written
        52     8  newest generation at that time
        60     8  day that the next number is of, since 1970
        68     8  bytes admitted for writing in that day
        76     8  count of records
        84  33*n  kind (1 a checkpoint, 2 a KV extent) and key of each record, least recently used first
    end - 8     8  xxh3-64 of everything before it

All integers are little-endian. The file is replaced whole: a new one is written beside it, synced, renamed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import xxhash

from .kinds import Key, RecordKind
from .layout import KEY_BYTES, Fingerprint
from .private_files import read_own
from .recovery import Recovered

SNAPSHOT_FILE = "stats.snap"
_VERSION = 2
_MAGIC = b"HISNAP\0\0"
_FIXED = struct.Struct("<8sI32sQQQQQ")
_SUM = struct.Struct("<Q")
_CODES = {RecordKind.CHECKPOINT: b"\1", RecordKind.KV: b"\2"}
_KINDS = {1: RecordKind.CHECKPOINT, 2: RecordKind.KV}


class SnapshotState(StrEnum):
    """Whether the order of use is known. If not, the order of writing takes its place."""

    USED = "used"
    MISSING = "missing"
    UNREADABLE = "unreadable"
    TORN = "torn"
    FOREIGN = "foreign"  # of another store or version
    STALE = "stale"  # the last run ended before it wrote one


@dataclass(frozen=True)
class Snapshot:
    epoch: int
    newest: int  # generation
    names: tuple[Key, ...]  # least recently used first
    written: tuple[int, int] = (0, 0)  # day since 1970, and bytes in it

    def pack(self, fingerprint: Fingerprint) -> bytes:
        fixed = _FIXED.pack(
            _MAGIC, _VERSION, fingerprint.digest, self.epoch, self.newest, *self.written, len(self.names)
        )
        body = fixed + b"".join([_CODES[kind] + key for key, kind in self.names])
        return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def parse(cls, content: bytes, fingerprint: Fingerprint) -> Snapshot | SnapshotState:
        """Return what `pack` wrote, or what is wrong with it: TORN or FOREIGN."""
        body, tail = content[: -_SUM.size], content[-_SUM.size :]
        if len(body) < _FIXED.size or tail != _SUM.pack(xxhash.xxh3_64_intdigest(body)):
            return SnapshotState.TORN
        magic, version, digest, epoch, newest, day, written, count = _FIXED.unpack_from(body)
        if (magic, version, digest) != (_MAGIC, _VERSION, fingerprint.digest):
            return SnapshotState.FOREIGN
        step = 1 + KEY_BYTES
        if len(body) != _FIXED.size + step * count:
            return SnapshotState.TORN
        starts = range(_FIXED.size, len(body), step)
        if any(body[at] not in _KINDS for at in starts):
            return SnapshotState.FOREIGN
        names = tuple(Key(body[at + 1 : at + step], _KINDS[body[at]]) for at in starts)
        return cls(epoch, newest, names, (day, written))


class SnapshotFile:
    """The file of one store, which holds the lock on the slabs beside it. Private to its owner (0600)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._aside = path.with_name(path.name + ".tmp")

    def load(self, fingerprint: Fingerprint) -> Snapshot | SnapshotState:
        """Return the snapshot, or why there is none. A half-written one goes."""
        try:
            self._aside.unlink(missing_ok=True)
            content = read_own(self.path)
        except FileNotFoundError:
            return SnapshotState.MISSING
        except OSError:
            return SnapshotState.UNREADABLE
        return Snapshot.parse(content, fingerprint)

    def replace(self, content: bytes) -> None:
        """Write `content` so that a crash leaves this one or the one before.

        Raises:
            OSError: it could not be written; the one before stays.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._aside, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(self._aside, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def load_snapshots(
    files: Sequence[SnapshotFile | None], fingerprint: Fingerprint, epoch: int
) -> tuple[SnapshotState, Snapshot | None]:
    """Return the last snapshot that can be read, and whether its order can be used: the run of `epoch` wrote it.

    It is written beside the first of the slab files; the one that was first may be another one now.
    """
    best, state = None, SnapshotState.MISSING
    for file in files:
        found = SnapshotState.MISSING if file is None else file.load(fingerprint)
        if isinstance(found, Snapshot):
            if best is None or found.epoch > best.epoch:
                best = found
        elif state is SnapshotState.MISSING:
            state = found
    if best is None:
        return state, None
    return SnapshotState.USED if best.epoch == epoch else SnapshotState.STALE, best


def by_last_use(entries: Iterable[Recovered], snapshot: Snapshot | None) -> list[Recovered]:
    """Return `entries` with the least recently used first; without a snapshot, in the order of their writing.

    What was written after the snapshot is newer than all in it. What was written before and is not in it had
    left the index by then and comes back because no other record took its slab: it goes first.
    """
    if snapshot is None:
        return sorted(entries, key=lambda entry: entry.generation)
    places = {name: at for at, name in enumerate(snapshot.names)}

    def place(entry: Recovered) -> tuple[int, int]:
        if entry.generation > snapshot.newest:
            return 2, entry.generation
        at = places.get(entry.name)
        return (0, entry.generation) if at is None else (1, at)

    return sorted(entries, key=place)
