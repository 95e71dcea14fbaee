"""Reads the checkpoints in a store file without the server: key -> what was written last under that key."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import xxhash

from sglang_histate.store.blocks import SlabHeader, Superblock
from sglang_histate.store.kinds import RecordKind
from sglang_histate.store.layout import SUPERBLOCK_BYTES


@dataclass(frozen=True)
class Stored:
    at_token: int
    generation: int
    payload: bytes


def prefix_keys(tokens: list[int], page_size: int = 64) -> dict[int, bytes]:
    """Return position -> key of every page boundary of a prompt without salt: a chain of sha256 over its pages."""
    keys, prior = {}, b""
    for end in range(page_size, len(tokens) + 1, page_size):
        prior = sha256(prior + array("I", tokens[end - page_size : end]).tobytes()).digest()
        keys[end] = prior
    return keys


def slab_files(ssd_dir: Path) -> list[Path]:
    """Return the slab files below an SSD directory, one per rank, by name."""
    return sorted(ssd_dir.glob("*/*/slabs.dat"))


def read_slabs(file: Path, after_generation: int = 0) -> dict[bytes, Stored]:
    """Return every whole checkpoint in `file` that is younger than `after_generation`, the youngest of each key.

    Emptying the store does not erase slabs, so generations tell the runs apart. Every segment sum is checked.
    """
    found: dict[bytes, Stored] = {}
    with file.open("rb") as content:
        block = Superblock.parse(content.read(SUPERBLOCK_BYTES))
        assert block is not None, f"{file} has no superblock"
        for _ in range(block.slab_count):
            image = content.read(block.slab_bytes)
            header = SlabHeader.parse(image[: block.header_bytes])
            if header is None or header.generation <= after_generation:
                continue
            if header.kind is not RecordKind.CHECKPOINT:
                continue
            payload = image[block.header_bytes : block.header_bytes + header.content_bytes]
            older = found.get(header.key)
            if older is None or older.generation < header.generation:
                found[header.key] = Stored(header.at_token, header.generation, payload)
            _check_sums(header, payload, block)
    return found


def read_names(file: Path) -> tuple[set[bytes], set[bytes]]:
    """Return the keys of the checkpoints in `file` and the hashes of all KV pages; payloads are not read."""
    checkpoints: set[bytes] = set()
    pages: set[bytes] = set()
    with file.open("rb") as content:
        block = Superblock.parse(content.read(SUPERBLOCK_BYTES))
        assert block is not None, f"{file} has no superblock"
        for slab in range(block.slab_count):
            content.seek(SUPERBLOCK_BYTES + slab * block.slab_bytes)
            header = SlabHeader.parse(content.read(block.header_bytes))
            if header is not None:
                (checkpoints if header.kind is RecordKind.CHECKPOINT else pages).update(
                    header.page_keys or (header.key,)
                )
    return checkpoints, pages


def last_generation(file: Path) -> int:
    """Return the youngest generation in `file`, 0 if there is none."""
    return max((stored.generation for stored in read_slabs(file).values()), default=0)


def _check_sums(header: SlabHeader, payload: bytes, block: Superblock) -> None:
    assert len(header.part_sums) == block.segment_count
    sizes = _segment_sizes(block)
    offset = 0
    for size, expected in zip(sizes, header.part_sums, strict=True):
        assert xxhash.xxh3_64_intdigest(payload[offset : offset + size]) == expected
        offset += size
    assert offset == len(payload)


def _segment_sizes(block: Superblock) -> list[int]:
    return json.loads(block.fingerprint_json)["segment_bytes"]
