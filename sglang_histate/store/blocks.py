"""The bytes of a slab file: superblock and slab headers.

Owns the format (version 3), nothing else: no file, no buffer, no index. All integers are little-endian.

    file         superblock (4096 B) | slab 0 | slab 1 | ... ; slab i starts at 4096 + i * slab_bytes
    slab         header (header_bytes) | parts, contiguous | zero or stale bytes up to slab_bytes
    parts        the segments of a checkpoint, or the KV pages of an extent, first page first

    superblock   offset  size  field
                      0     8  magic "HISTATE" and a zero byte
                      8     4  format version, 3
                     12     4  segment count of every checkpoint
                     16    32  fingerprint, sha256 of its canonical JSON
                     48     8  slab_bytes
                     56     8  slab_count
                     64     8  payload_bytes of every checkpoint
                     72     8  epoch: +1 each time the store is opened; the upper bits of every generation
                     80     4  header_bytes
                     84     4  length of the whole fingerprint JSON
                     88     8  bytes of a KV page, 0 without extents
                     96     8  oldest valid generation: what was written before it counts for nothing
                    104     4  1 after a shutdown in order, 0 while the store is open
                    108     4  position of this file's directory in --histate-ssd-dir, from 0
                    112     4  how many directories there are
                    504     8  xxh3-64 of all other bytes
                    512     n  fingerprint JSON, cut to 3584 bytes

    slab header  offset  size  field
                      0     8  magic "HISLAB" and two zero bytes
                      8     4  format version, 3
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
                    136    16  namespace: who may use the record, zero if there is none
                    152   8*n  xxh3-64 of each part
              152 + 8*n  32*n  of an extent: the hash of each page; the last one is the key
        header_bytes - 8     8  xxh3-64 of everything before it

All that changes in the superblock of a store lies in its first 512 bytes, which no device tears: a crash while
it is written leaves the old one or the new one.

`header_bytes` is the smallest multiple of 4096 that holds all of it for either kind; 4096 are enough for 492
segments and for 98 pages. The sums find torn, short and misplaced writes and flipped bits; they are no defence against a person
who can write the file.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from .kinds import RecordKind
from .layout import (
    FIXED_HEADER_BYTES,
    FORMAT_VERSION,
    KEY_BYTES,
    NO_NAMESPACE,
    NO_PARENT,
    PAGE_BYTES,
    SUM_BYTES,
    SUPERBLOCK_BYTES,
    Fingerprint,
    RecordLayout,
)

_SUPERBLOCK_MAGIC = b"HISTATE\0"
_SLAB_MAGIC = b"HISLAB\0\0"
_SUPERBLOCK = struct.Struct("<8sII32sQQQQIIQQIII")
_HEADER = struct.Struct("<8sIII4xQ32s32sQQQ16s16s")
_SUM = struct.Struct("<Q")
_SECTOR_BYTES = 512
_JSON_ROOM_BYTES = SUPERBLOCK_BYTES - _SECTOR_BYTES
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
    oldest_valid: int = 0  # generation
    clean: bool = False
    root: int = 0
    n_roots: int = 1

    @classmethod
    def of(
        cls,
        layout: RecordLayout,
        slab_count: int,
        fingerprint: Fingerprint,
        epoch: int,
        *,
        oldest_valid: int = 0,
        clean: bool = False,
        root: int = 0,
        n_roots: int = 1,
    ) -> Superblock:
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
            oldest_valid=oldest_valid,
            clean=clean,
            root=root,
            n_roots=n_roots,
        )

    def is_of(self, layout: RecordLayout, fingerprint: Fingerprint) -> bool:
        """Return whether it belongs to a store of this identity and layout, of whatever size and number of roots."""
        return (
            dataclasses.replace(
                Superblock.of(layout, self.slab_count, fingerprint, self.epoch),
                oldest_valid=self.oldest_valid,
                clean=self.clean,
                root=self.root,
                n_roots=self.n_roots,
            )
            == self
        )

    def pack(self) -> bytes:
        fixed = _SUPERBLOCK.pack(
            _SUPERBLOCK_MAGIC, FORMAT_VERSION, self.segment_count, self.fingerprint_sha256, self.slab_bytes,
            self.slab_count, self.payload_bytes, self.epoch, self.header_bytes, self.fingerprint_json_bytes,
            self.kv_page_bytes, self.oldest_valid, int(self.clean),
            self.root, self.n_roots,
        )  # fmt: skip
        first = fixed.ljust(_SECTOR_BYTES - _SUM.size, b"\0")
        rest = self.fingerprint_json.ljust(_JSON_ROOM_BYTES, b"\0")
        return first + _SUM.pack(xxhash.xxh3_64_intdigest(first + rest)) + rest

    @classmethod
    def parse(cls, block: bytes) -> Superblock | None:
        """Return the superblock in `block`, or None if it is not a whole one of this format version."""
        first, rest = block[: _SECTOR_BYTES - _SUM.size], block[_SECTOR_BYTES:]
        stored_sum = block[_SECTOR_BYTES - _SUM.size : _SECTOR_BYTES]
        if len(block) != SUPERBLOCK_BYTES or block[:8] != _SUPERBLOCK_MAGIC:
            return None
        if stored_sum != _SUM.pack(xxhash.xxh3_64_intdigest(first + rest)):
            return None
        (
            _, version, segments, digest, slab, count, payload, epoch, header, text, kv_page, oldest, clean,
            root, n_roots,
        ) = _SUPERBLOCK.unpack_from(block)  # fmt: skip
        if version != FORMAT_VERSION:
            return None
        stored = rest[: min(text, _JSON_ROOM_BYTES)]
        return cls(
            digest, segments, slab, count, payload, epoch, header, kv_page, text, stored, oldest, clean == 1,
            root, n_roots,
        )  # fmt: skip


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
    page_keys: tuple[bytes, ...] = ()  # of an extent, the last is `key`
    namespace: bytes = NO_NAMESPACE

    @property
    def n_pages(self) -> int:
        """KV pages in the slab; 0 for a checkpoint."""
        return len(self.part_sums) if self.kind is RecordKind.KV else 0

    def pack(self, header_bytes: int) -> bytes:
        fixed = _HEADER.pack(
            _SLAB_MAGIC, FORMAT_VERSION, _CODES[self.kind], len(self.part_sums), self.generation, self.key,
            self.parent, self.at_token, self.content_bytes, self.captured_at_us, self.fingerprint_half,
            self.namespace,
        )  # fmt: skip
        return _seal(fixed + _pack_sums(self.part_sums) + b"".join(self.page_keys), header_bytes)

    @classmethod
    def parse(cls, header: bytes) -> SlabHeader | None:
        """Return the header, or None if magic, version, kind, part count, page hashes or checksum do not fit."""
        if header[:8] != _SLAB_MAGIC or not _is_sealed(header):
            return None
        (
            _, version, code, parts, number, key, parent, at_token, content, captured, half, namespace,
        ) = _HEADER.unpack_from(header)  # fmt: skip
        kind = _KINDS.get(code)
        n_keys = parts if kind is RecordKind.KV else 0
        keys_at = _HEADER.size + _SUM.size * parts
        end = keys_at + KEY_BYTES * n_keys
        if version != FORMAT_VERSION or kind is None or end + _SUM.size > len(header):
            return None
        found = struct.unpack_from(f"<{parts}Q", header, _HEADER.size)
        page_keys = struct.unpack_from(f"{KEY_BYTES}s" * n_keys, header, keys_at)
        if kind is RecordKind.KV and (not page_keys or page_keys[-1] != key):
            return None
        return cls(kind, number, key, at_token, content, captured, half, found, parent, page_keys, namespace)


def superblock_version(block: bytes) -> int | None:
    """Return the format version that block 0 claims, None if it is no superblock at all. Nothing is verified."""
    magic, version = struct.unpack_from("<8sI", block.ljust(12, b"\0"))
    return version if magic == _SUPERBLOCK_MAGIC else None


def version_of(header: bytes) -> int | None:
    """Return the format version that a slab header claims, None if a slab never had one. Nothing is verified."""
    magic, version = struct.unpack_from("<8sI", header)
    return version if magic == _SLAB_MAGIC else None


def _pack_sums(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def _seal(content: bytes, size_bytes: int) -> bytes:
    body = content.ljust(size_bytes - _SUM.size, b"\0")
    assert len(body) == size_bytes - _SUM.size, "content is larger than its block"
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def _is_sealed(block: bytes) -> bool:
    body, tail = block[: -_SUM.size], block[-_SUM.size :]
    return len(block) % PAGE_BYTES == 0 and tail == _SUM.pack(xxhash.xxh3_64_intdigest(body))
