"""The bytes of a slab file: superblock, slab headers, and where the segments of a record lie.

Owns the format (version 1), nothing else: no file, no buffer, no index. All integers are little-endian.

    file         superblock (4096 B) | slab 0 | slab 1 | ... ; slab i starts at 4096 + i * slab_bytes
    slab         header (header_bytes) | segments, contiguous | zero or stale bytes up to slab_bytes

    superblock   offset  size  field
                      0     8  magic "HISTATE" and a zero byte
                      8     4  format version, 1
                     12     4  segment count of every record
                     16    32  fingerprint, sha256 of its canonical JSON
                     48     8  slab_bytes
                     56     8  slab_count
                     64     8  payload_bytes
                     72     8  epoch: +1 each time the store is opened; the upper bits of every generation
                     80     4  header_bytes
                     84     4  length of the whole fingerprint JSON
                     88     n  fingerprint JSON, cut to 4000 bytes
                   4088     8  xxh3-64 of bytes 0 to 4087

    slab header  offset  size  field
                      0     8  magic "HISLAB" and two zero bytes
                      8     4  format version, 1
                     12     4  segment count
                     16     8  generation: epoch * 2^40 + number of the write in that epoch
                     24    32  key
                     56     8  at_token
                     64     8  payload_bytes
                     72     8  captured_at, microseconds since 1970
                     80    16  first half of the fingerprint
                     96   8*n  xxh3-64 of each segment
        header_bytes - 8     8  xxh3-64 of everything before it

`header_bytes` is the smallest multiple of 4096 that holds all of it; one page is enough for 499 segments.
The sums find torn, short and misplaced writes and flipped bits; they are no defence against a person who
can write the file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash

FORMAT_VERSION = 1
PAGE_BYTES = 4096
SUPERBLOCK_BYTES = PAGE_BYTES
KEY_BYTES = 32
MAX_SEGMENTS = 256

_SUPERBLOCK_MAGIC = b"HISTATE\0"
_SLAB_MAGIC = b"HISLAB\0\0"
_SUPERBLOCK = struct.Struct("<8sII32sQQQQII")
_HEADER = struct.Struct("<8sIIQ32sQQQ16s")
_SUM = struct.Struct("<Q")
_JSON_ROOM_BYTES = SUPERBLOCK_BYTES - _SUPERBLOCK.size - _SUM.size
_WRITES_PER_EPOCH_BITS = 40


def pages(size_bytes: int) -> int:
    """Return `size_bytes` rounded up to whole pages, in bytes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def generation(epoch: int, write_number: int) -> int:
    """Return the generation of one write; later writes and later epochs are always larger."""
    return (epoch << _WRITES_PER_EPOCH_BITS) + write_number


@dataclass(frozen=True)
class RecordLayout:
    """Sizes and offsets of one record. `segment_bytes` is the size of each segment, in the order they lie.

    Raises:
        ValueError: no segment, more than 256, or one without bytes.
    """

    segment_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.segment_bytes) <= MAX_SEGMENTS:
            raise ValueError(f"a record has 1 to {MAX_SEGMENTS} segments, not {len(self.segment_bytes)}")
        if min(self.segment_bytes) <= 0:
            raise ValueError("every segment of a record needs at least one byte")

    @cached_property
    def segment_offsets(self) -> tuple[int, ...]:
        """Offset of each segment within the payload, bytes."""
        offsets, end = [], 0
        for size in self.segment_bytes:
            offsets.append(end)
            end += size
        return tuple(offsets)

    @cached_property
    def payload_bytes(self) -> int:
        return sum(self.segment_bytes)

    @cached_property
    def header_bytes(self) -> int:
        return pages(_HEADER.size + _SUM.size * (len(self.segment_bytes) + 1))

    @cached_property
    def slab_bytes(self) -> int:
        return self.header_bytes + pages(self.payload_bytes)

    def slab_count(self, size_bytes: int) -> int:
        """Return how many slabs fit into a file of at most `size_bytes`."""
        return max(0, size_bytes - SUPERBLOCK_BYTES) // self.slab_bytes

    def file_bytes(self, slab_count: int) -> int:
        return self.slab_offset(slab_count)

    def slab_offset(self, slab: int) -> int:
        """Return where `slab` starts in the file, bytes."""
        return SUPERBLOCK_BYTES + slab * self.slab_bytes

    def segment_sums(self, payload: memoryview) -> tuple[int, ...]:
        """Return the xxh3-64 of each segment of `payload`."""
        return tuple(
            xxhash.xxh3_64_intdigest(payload[offset : offset + size])
            for offset, size in zip(self.segment_offsets, self.segment_bytes, strict=True)
        )


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
        facts = {"format": FORMAT_VERSION, "identity": identity, "segment_bytes": layout.segment_bytes}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return cls(text.encode())

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.canonical_json).digest()

    @property
    def directory_name(self) -> str:
        """First 16 hexadecimal digits: the folder of all stores with this fingerprint."""
        return self.digest.hex()[:16]


@dataclass(frozen=True)
class Superblock:
    fingerprint_sha256: bytes
    segment_count: int
    slab_bytes: int
    slab_count: int
    payload_bytes: int
    epoch: int
    header_bytes: int
    fingerprint_json_bytes: int
    fingerprint_json: bytes  # cut to the room there is

    @classmethod
    def of(cls, layout: RecordLayout, slab_count: int, fingerprint: Fingerprint, epoch: int) -> Superblock:
        text = fingerprint.canonical_json
        return cls(
            fingerprint_sha256=fingerprint.digest,
            segment_count=len(layout.segment_bytes),
            slab_bytes=layout.slab_bytes,
            slab_count=slab_count,
            payload_bytes=layout.payload_bytes,
            epoch=epoch,
            header_bytes=layout.header_bytes,
            fingerprint_json_bytes=len(text),
            fingerprint_json=text[:_JSON_ROOM_BYTES],
        )

    def pack(self) -> bytes:
        fixed = _SUPERBLOCK.pack(
            _SUPERBLOCK_MAGIC, FORMAT_VERSION, self.segment_count, self.fingerprint_sha256, self.slab_bytes,
            self.slab_count, self.payload_bytes, self.epoch, self.header_bytes, self.fingerprint_json_bytes,
        )  # fmt: skip
        return _seal(fixed + self.fingerprint_json, SUPERBLOCK_BYTES)

    @classmethod
    def parse(cls, block: bytes) -> Superblock | None:
        """Return the superblock in `block`, or None if it is not a whole one of this format version."""
        if not _is_sealed(block) or block[:8] != _SUPERBLOCK_MAGIC:
            return None
        _, version, segments, digest, slab, count, payload, epoch, header, text = _SUPERBLOCK.unpack_from(
            block
        )
        if version != FORMAT_VERSION:
            return None
        stored = block[_SUPERBLOCK.size : _SUPERBLOCK.size + min(text, _JSON_ROOM_BYTES)]
        return cls(digest, segments, slab, count, payload, epoch, header, text, stored)


@dataclass(frozen=True)
class SlabHeader:
    generation: int
    key: bytes
    at_token: int
    payload_bytes: int
    captured_at_us: int
    fingerprint_half: bytes  # first 16 bytes of the sha256
    segment_sums: tuple[int, ...]

    def pack(self, header_bytes: int) -> bytes:
        fixed = _HEADER.pack(
            _SLAB_MAGIC, FORMAT_VERSION, len(self.segment_sums), self.generation, self.key,
            self.at_token, self.payload_bytes, self.captured_at_us, self.fingerprint_half,
        )  # fmt: skip
        return _seal(fixed + _pack_sums(self.segment_sums), header_bytes)

    @classmethod
    def parse(cls, header: bytes) -> SlabHeader | None:
        """Return the header, or None if magic, version, segment count or checksum do not fit."""
        if not _is_sealed(header) or header[:8] != _SLAB_MAGIC:
            return None
        _, version, segments, number, key, at_token, payload, captured, half = _HEADER.unpack_from(header)
        if version != FORMAT_VERSION or _HEADER.size + _SUM.size * (segments + 1) > len(header):
            return None
        sums = struct.unpack_from(f"<{segments}Q", header, _HEADER.size)
        return cls(number, key, at_token, payload, captured, half, sums)


def _pack_sums(sums: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(sums)}Q", *sums)


def _seal(content: bytes, size_bytes: int) -> bytes:
    body = content.ljust(size_bytes - _SUM.size, b"\0")
    assert len(body) == size_bytes - _SUM.size, "content is larger than its block"
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def _is_sealed(block: bytes) -> bool:
    body, tail = block[: -_SUM.size], block[-_SUM.size :]
    return len(block) % PAGE_BYTES == 0 and tail == _SUM.pack(xxhash.xxh3_64_intdigest(body))
