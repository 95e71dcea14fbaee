"""The bytes of a slab file: superblock and slab headers.

Owns the format (version 2), nothing else: no file, no buffer, no index. All integers are little-endian.

    file         superblock (4096 B) | slab 0 | slab 1 | ... ; slab i starts at 4096 + i * slab_bytes
    slab         header (header_bytes) | parts, contiguous | zero or stale bytes up to slab_bytes
    parts        the segments of a checkpoint, or the KV pages of an extent, first page first

    superblock   offset  size  field
                      0     8  magic "HISTATE" and a zero byte
                      8     4  format version, 2
                     12     4  segment count of every checkpoint
                     16    32  fingerprint, sha256 of its canonical JSON
                     48     8  slab_bytes
                     56     8  slab_count
                     64     8  payload_bytes of every checkpoint
                     72     8  epoch: +1 each time the store is opened; the upper bits of every generation
                     80     4  header_bytes
                     84     4  length of the whole fingerprint JSON
                     88     8  bytes of a KV page, 0 without extents
                     96     n  fingerprint JSON, cut to 3992 bytes
                   4088     8  xxh3-64 of bytes 0 to 4087

    slab header  offset  size  field
                      0     8  magic "HISLAB" and two zero bytes
                      8     4  format version, 2
                     12     4  kind: 1 a checkpoint, 2 a KV extent
                     16     4  part count: segments of a checkpoint, pages of an extent
                     20     4  zero
                     24     8  generation: epoch * 2^40 + number of the write in that epoch
                     32    32  key: hash of the last page
                     64    32  parent: hash of the page before an extent's first one, zero if there is none
                     96     8  at_token: position of the record's end in its sequence, tokens
                    104     8  content bytes: the sum of the parts
                    112     8  captured_at, microseconds since 1970
                    120    16  first half of the fingerprint
                    136   8*n  xxh3-64 of each part
        header_bytes - 8     8  xxh3-64 of everything before it

`header_bytes` is the smallest multiple of 4096 that holds all of it for either kind; 4096 are enough for 494
parts. The sums find torn, short and misplaced writes and flipped bits; they are no defence against a person
who can write the file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from .kinds import RecordKind
from .layout import (
    FIXED_HEADER_BYTES,
    FORMAT_VERSION,
    NO_PARENT,
    PAGE_BYTES,
    SUM_BYTES,
    SUPERBLOCK_BYTES,
    Fingerprint,
    RecordLayout,
)

_SUPERBLOCK_MAGIC = b"HISTATE\0"
_SLAB_MAGIC = b"HISLAB\0\0"
_SUPERBLOCK = struct.Struct("<8sII32sQQQQIIQ")
_HEADER = struct.Struct("<8sIII4xQ32s32sQQQ16s")
_SUM = struct.Struct("<Q")
_JSON_ROOM_BYTES = SUPERBLOCK_BYTES - _SUPERBLOCK.size - _SUM.size
_CODES = {RecordKind.CHECKPOINT: 1, RecordKind.KV: 2}
_KINDS = {code: kind for kind, code in _CODES.items()}
assert _HEADER.size == FIXED_HEADER_BYTES and _SUM.size == SUM_BYTES


@dataclass(frozen=True)
class Superblock:
    fingerprint_sha256: bytes
    segment_count: int
    slab_bytes: int
    slab_count: int
    payload_bytes: int
    epoch: int
    header_bytes: int
    kv_page_bytes: int
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
            kv_page_bytes=layout.kv_page_bytes,
            fingerprint_json_bytes=len(text),
            fingerprint_json=text[:_JSON_ROOM_BYTES],
        )

    def pack(self) -> bytes:
        fixed = _SUPERBLOCK.pack(
            _SUPERBLOCK_MAGIC, FORMAT_VERSION, self.segment_count, self.fingerprint_sha256, self.slab_bytes,
            self.slab_count, self.payload_bytes, self.epoch, self.header_bytes, self.fingerprint_json_bytes,
            self.kv_page_bytes,
        )  # fmt: skip
        return _seal(fixed + self.fingerprint_json, SUPERBLOCK_BYTES)

    @classmethod
    def parse(cls, block: bytes) -> Superblock | None:
        """Return the superblock in `block`, or None if it is not a whole one of this format version."""
        if not _is_sealed(block) or block[:8] != _SUPERBLOCK_MAGIC:
            return None
        (
            _, version, segments, digest, slab, count, payload, epoch, header, text, kv_page,
        ) = _SUPERBLOCK.unpack_from(block)  # fmt: skip
        if version != FORMAT_VERSION:
            return None
        stored = block[_SUPERBLOCK.size : _SUPERBLOCK.size + min(text, _JSON_ROOM_BYTES)]
        return cls(digest, segments, slab, count, payload, epoch, header, kv_page, text, stored)


@dataclass(frozen=True)
class SlabHeader:
    """What a slab says about the record in it. The parts are segments of a checkpoint or pages of an extent."""

    kind: RecordKind
    generation: int
    key: bytes
    at_token: int
    content_bytes: int
    captured_at_us: int
    fingerprint_half: bytes  # first 16 bytes of the sha256
    part_sums: tuple[int, ...]
    parent: bytes = NO_PARENT

    @property
    def n_pages(self) -> int:
        """KV pages in the slab; 0 for a checkpoint."""
        return len(self.part_sums) if self.kind is RecordKind.KV else 0

    def pack(self, header_bytes: int) -> bytes:
        fixed = _HEADER.pack(
            _SLAB_MAGIC, FORMAT_VERSION, _CODES[self.kind], len(self.part_sums), self.generation, self.key,
            self.parent, self.at_token, self.content_bytes, self.captured_at_us, self.fingerprint_half,
        )  # fmt: skip
        return _seal(fixed + _pack_sums(self.part_sums), header_bytes)

    @classmethod
    def parse(cls, header: bytes) -> SlabHeader | None:
        """Return the header, or None if magic, version, kind, part count or checksum do not fit."""
        if not _is_sealed(header) or header[:8] != _SLAB_MAGIC:
            return None
        (
            _, version, code, parts, number, key, parent, at_token, content, captured, half,
        ) = _HEADER.unpack_from(header)  # fmt: skip
        if version != FORMAT_VERSION or _HEADER.size + _SUM.size * (parts + 1) > len(header):
            return None
        if code not in _KINDS:
            return None
        found = struct.unpack_from(f"<{parts}Q", header, _HEADER.size)
        return cls(_KINDS[code], number, key, at_token, content, captured, half, found, parent)


def _pack_sums(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def _seal(content: bytes, size_bytes: int) -> bytes:
    body = content.ljust(size_bytes - _SUM.size, b"\0")
    assert len(body) == size_bytes - _SUM.size, "content is larger than its block"
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def _is_sealed(block: bytes) -> bool:
    body, tail = block[: -_SUM.size], block[-_SUM.size :]
    return len(block) % PAGE_BYTES == 0 and tail == _SUM.pack(xxhash.xxh3_64_intdigest(body))
