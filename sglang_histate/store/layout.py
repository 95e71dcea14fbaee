"""Sizes and offsets: how large a slab is, where it starts, and how a record of either kind is cut into parts.

Owns these numbers and the identity of a store. The bytes of superblock and headers are in `blocks.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from .kinds import RecordKind

FORMAT_VERSION = 3
PAGE_BYTES = 4096
SUPERBLOCK_BYTES = PAGE_BYTES
KEY_BYTES = 32
NO_PARENT = bytes(KEY_BYTES)
NAMESPACE_BYTES = 16
NO_NAMESPACE = bytes(NAMESPACE_BYTES)
MAX_SEGMENTS = 256
# Bounds the header of an extent, which names every page of it; only pages of a few hundred bytes come near it.
MAX_PAGES_PER_EXTENT = 4096
FIXED_HEADER_BYTES = 152  # of a slab header, before the sums
SUM_BYTES = 8

_WRITES_PER_EPOCH_BITS = 40


def pages(size_bytes: int) -> int:
    """Return `size_bytes` rounded up to whole pages, in bytes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def generation(epoch: int, write_number: int) -> int:
    """Return the generation of one write; later writes and later epochs are always larger."""
    return (epoch << _WRITES_PER_EPOCH_BITS) + write_number


def epoch_of(number: int) -> int:
    """Return the epoch in which a generation was written."""
    return number >> _WRITES_PER_EPOCH_BITS


def sums(content: memoryview, part_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the xxh3-64 of each part of `content`; the parts lie one after the other from its start."""
    found, start = [], 0
    for size in part_bytes:
        found.append(xxhash.xxh3_64_intdigest(content[start : start + size]))
        start += size
    return tuple(found)


@dataclass(frozen=True)
class RecordLayout:
    """Sizes of a slab and of what it may hold: one checkpoint, or an extent of KV pages.

    `segment_bytes` is the size of each segment of a checkpoint, in the order they lie. `kv_page_bytes` is the
    size of one KV page of the host pool; 0 means that the store takes no extents. A slab is as large as a
    checkpoint needs, or as one page does where that is more.

    `storable(payload)` says of a checkpoint's bytes whether they may go to the disk, or from memory to a reader;
    None takes all. It is asked on the store's threads, once for each way.

    Raises:
        ValueError: no segment, more than 256, one without bytes, or a negative page size.
    """

    segment_bytes: tuple[int, ...]
    kv_page_bytes: int = 0
    storable: Callable[[Any], bool] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.segment_bytes) <= MAX_SEGMENTS:
            raise ValueError(f"a record has 1 to {MAX_SEGMENTS} segments, not {len(self.segment_bytes)}")
        if min(self.segment_bytes) <= 0:
            raise ValueError("every segment of a record needs at least one byte")
        if self.kv_page_bytes < 0:
            raise ValueError(f"a KV page cannot have {self.kv_page_bytes} bytes")

    @cached_property
    def segment_offsets(self) -> tuple[int, ...]:
        """Offset of each segment within the payload of a checkpoint, bytes."""
        offsets, end = [], 0
        for size in self.segment_bytes:
            offsets.append(end)
            end += size
        return tuple(offsets)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of a checkpoint."""
        return sum(self.segment_bytes)

    @cached_property
    def room_bytes(self) -> int:
        """What a slab can hold behind its header; whole pages of 4096."""
        return pages(max(self.payload_bytes, self.kv_page_bytes))

    @cached_property
    def pages_per_extent(self) -> int:
        """The most KV pages that one slab takes: 0 without KV, else at least 1."""
        if self.kv_page_bytes == 0:
            return 0
        return min(self.room_bytes // self.kv_page_bytes, MAX_PAGES_PER_EXTENT)

    @cached_property
    def header_bytes(self) -> int:
        sums_only = SUM_BYTES * len(self.segment_bytes)
        sums_and_names = (SUM_BYTES + KEY_BYTES) * self.pages_per_extent
        return pages(FIXED_HEADER_BYTES + max(sums_only, sums_and_names) + SUM_BYTES)

    @cached_property
    def slab_bytes(self) -> int:
        return self.header_bytes + self.room_bytes

    def slab_count(self, size_bytes: int) -> int:
        """Return how many slabs fit into a file of at most `size_bytes`."""
        return max(0, size_bytes - SUPERBLOCK_BYTES) // self.slab_bytes

    def file_bytes(self, slab_count: int) -> int:
        return self.slab_offset(slab_count)

    def slab_offset(self, slab: int) -> int:
        """Return where `slab` starts in the file, bytes."""
        return SUPERBLOCK_BYTES + slab * self.slab_bytes

    def part_bytes(self, kind: RecordKind, n_pages: int) -> tuple[int, ...]:
        """Return the sizes of what is summed one by one: segments of a checkpoint, pages of an extent."""
        return self.segment_bytes if kind is RecordKind.CHECKPOINT else (self.kv_page_bytes,) * n_pages

    def may_store(self, kind: RecordKind, payload: Any) -> bool:
        """Return whether a record may be stored: of checkpoints `storable` decides."""
        return kind is not RecordKind.CHECKPOINT or self.storable is None or self.storable(payload)

    def content_bytes(self, kind: RecordKind, n_pages: int) -> int:
        """Return the bytes of a record without header and padding."""
        return self.payload_bytes if kind is RecordKind.CHECKPOINT else self.kv_page_bytes * n_pages

    def transfer_bytes(self, kind: RecordKind, n_pages: int) -> int:
        """Return what is written and read for a record: its header and as many whole pages as it fills."""
        return self.header_bytes + pages(self.content_bytes(kind, n_pages))


@dataclass(frozen=True)
class Fingerprint:
    """Identity of everything that must match before stored bytes may be used: text and its sha256."""

    canonical_json: bytes

    @classmethod
    def of(cls, identity: Mapping[str, Any], layout: RecordLayout) -> Fingerprint:
        """Build it from the caller's facts (model, weights, dtypes, ranks ...), the layout and the format.

        Raises:
            TypeError, ValueError: `identity` holds something that JSON cannot write exactly.
        """
        facts = {
            "format": FORMAT_VERSION,
            "identity": identity,
            "kv_page_bytes": layout.kv_page_bytes,
            "segment_bytes": layout.segment_bytes,
        }
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return cls(text.encode())

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.canonical_json).digest()

    @property
    def directory_name(self) -> str:
        """First 16 hexadecimal digits: the folder of all stores with this fingerprint."""
        return self.digest.hex()[:16]
