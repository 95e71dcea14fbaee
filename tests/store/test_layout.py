"""The bytes of format version 3. These tests must never change: a change of format is a new version."""

from __future__ import annotations

import dataclasses

import pytest
import xxhash

from sglang_histate.store.blocks import SlabHeader, Superblock
from sglang_histate.store.kinds import RecordKind
from sglang_histate.store.layout import (
    MAX_PAGES_PER_EXTENT,
    NO_PARENT,
    Fingerprint,
    RecordLayout,
    generation,
    sums,
)

HASH = "00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f 10 11 12 13 14 15 16 17 18 19 1a 1b 1c 1d 1e 1f"
ZEROS = "00 " * 32


def _header() -> SlabHeader:
    return SlabHeader(
        kind=RecordKind.CHECKPOINT,
        generation=generation(epoch=3, write_number=7),
        key=bytes(range(32)),
        at_token=4096,
        content_bytes=9396,
        captured_at_us=1_700_000_000_000_000,
        fingerprint_half=bytes(range(0xF0, 0x100)),
        part_sums=(1, 0x0102030405060708),
    )


def _extent_header() -> SlabHeader:
    return dataclasses.replace(
        _header(),
        kind=RecordKind.KV,
        content_bytes=9000,
        part_sums=(5, 6, 7),
        parent=bytes(range(64, 96)),
        page_keys=(b"\xaa" * 32, b"\xbb" * 32, bytes(range(32))),
        namespace=bytes(range(0x60, 0x70)),
    )


def _sealed(golden: str) -> bytes:
    body = bytes.fromhex(golden).ljust(4088, b"\0")
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def test_golden_header_of_a_checkpoint():
    packed = _header().pack(4096)
    assert (
        packed
        == _sealed(
            "48 49 53 4c 41 42 00 00"  # magic
            "03 00 00 00  01 00 00 00"  # version, kind
            "02 00 00 00  00 00 00 00"  # segments
            "07 00 00 00 00 03 00 00"  # generation 3 * 2^40 + 7
            f"{HASH} {ZEROS}"  # key, no parent
            "00 10 00 00 00 00 00 00"  # at_token
            "b4 24 00 00 00 00 00 00"  # content bytes
            "00 40 1e 18 24 0a 06 00"  # captured at
            "f0 f1 f2 f3 f4 f5 f6 f7 f8 f9 fa fb fc fd fe ff"  # fingerprint
            f"{ZEROS[:48]}"  # no namespace
            "01 00 00 00 00 00 00 00  08 07 06 05 04 03 02 01"  # sums
        )
    )
    parsed = SlabHeader.parse(packed)
    assert parsed == _header() and parsed.n_pages == 0 and parsed.parent == NO_PARENT


def test_golden_header_of_an_extent():
    packed = _extent_header().pack(4096)
    assert packed == _sealed(
        "48 49 53 4c 41 42 00 00"
        "03 00 00 00  02 00 00 00"  # version, kind
        "03 00 00 00  00 00 00 00"  # pages
        "07 00 00 00 00 03 00 00"
        f"{HASH}"
        "40 41 42 43 44 45 46 47 48 49 4a 4b 4c 4d 4e 4f"
        "50 51 52 53 54 55 56 57 58 59 5a 5b 5c 5d 5e 5f"  # parent
        "00 10 00 00 00 00 00 00"
        "28 23 00 00 00 00 00 00"
        "00 40 1e 18 24 0a 06 00"
        "f0 f1 f2 f3 f4 f5 f6 f7 f8 f9 fa fb fc fd fe ff"
        "60 61 62 63 64 65 66 67 68 69 6a 6b 6c 6d 6e 6f"  # namespace
        "05 00 00 00 00 00 00 00  06 00 00 00 00 00 00 00  07 00 00 00 00 00 00 00"
        f"{'aa ' * 32} {'bb ' * 32} {HASH}"  # pages
    )
    parsed = SlabHeader.parse(packed)
    assert parsed == _extent_header() and parsed.n_pages == 3


def test_golden_superblock():
    layout = RecordLayout((5000, 300, 4096), kv_page_bytes=3000)
    fingerprint = Fingerprint.of({"model": "m"}, layout)
    assert fingerprint.canonical_json == (
        b'{"format":3,"identity":{"model":"m"},"kv_page_bytes":3000,"segment_bytes":[5000,300,4096]}'
    )
    packed = Superblock.of(layout, 5, fingerprint, epoch=9, oldest_valid=258, clean=True).pack()
    text = fingerprint.canonical_json
    first = (
        b"HISTATE\0"
        + bytes.fromhex("03000000 03000000")
        + fingerprint.digest
        + bytes.fromhex("0040000000000000 0500000000000000 b424000000000000 0900000000000000")
        + bytes.fromhex("00100000")
        + len(text).to_bytes(4, "little")
        + bytes.fromhex("b80b000000000000")
        + bytes.fromhex("0201000000000000 01000000 00000000 01000000")
    ).ljust(504, b"\0")
    rest = text.ljust(4096 - 512, b"\0")
    assert packed == first + xxhash.xxh3_64_intdigest(first + rest).to_bytes(8, "little") + rest
    parsed = Superblock.parse(packed)
    assert parsed is not None and parsed.epoch == 9 and parsed.fingerprint_json == text
    assert parsed.kv_page_bytes == 3000 and parsed.oldest_valid == 258 and parsed.clean


def test_long_fingerprint_is_cut_but_its_digest_is_whole():
    layout = RecordLayout((64,))
    fingerprint = Fingerprint.of({"notes": "x" * 9000}, layout)
    parsed = Superblock.parse(Superblock.of(layout, 2, fingerprint, 1).pack())
    assert parsed is not None
    assert parsed.fingerprint_json == fingerprint.canonical_json[:3584]
    assert parsed.fingerprint_json_bytes == len(fingerprint.canonical_json)
    assert parsed.fingerprint_sha256 == fingerprint.digest


@pytest.mark.parametrize("header", [_header(), _extent_header()])
def test_any_flipped_bit_of_a_header_is_noticed(header: SlabHeader):
    packed = bytearray(header.pack(4096))
    for position in [*range(0, 300), 2000, 4087, 4088, 4095]:
        packed[position] ^= 1
        assert SlabHeader.parse(bytes(packed)) is None, position
        packed[position] ^= 1
    assert SlabHeader.parse(bytes(packed)) is not None
    assert SlabHeader.parse(bytes(4096)) is None
    assert Superblock.parse(bytes(4096)) is None


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (8, 2),  # the version before this one
        (12, 0),
        (12, 3),  # a kind of a later version
        (16, 200),
        (17, 2),  # more parts than the header has room for
    ],
)
def test_sealed_headers_that_make_no_sense(position: int, value: int):
    body = bytearray(_header().pack(4096)[:4088])
    body[position] = value
    sealed = bytes(body) + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    assert (SlabHeader.parse(sealed) is None) == ((position, value) != (16, 200))


@pytest.mark.parametrize("segments", [1, 48, 256])
def test_layout_sizes(segments: int):
    layout = RecordLayout(tuple(range(1, segments + 1)))
    assert layout.header_bytes == 4096
    assert layout.payload_bytes == segments * (segments + 1) // 2
    assert layout.slab_bytes % 4096 == 0 and 0 <= layout.slab_bytes - 4096 - layout.payload_bytes < 4096
    assert layout.segment_offsets[0] == 0
    assert layout.segment_offsets[-1] + segments == layout.payload_bytes
    assert layout.slab_count(4095) == 0
    assert layout.file_bytes(layout.slab_count(10**7)) <= 10**7
    assert layout.pages_per_extent == 0


@pytest.mark.parametrize(
    ("payload", "page", "n_pages", "header", "slab"),
    [
        (51_511_296, 2 << 20, 24, 4096, 4096 + 51_511_296),  # Qwen3.5-9B, 64 tokens per page
        (51_511_296, 32768, 1572, 65536, 65536 + 51_511_296),  # and 1 token per page
        (9396, 3072, 4, 4096, 4096 + 12288),  # the padding of a checkpoint is room for a page
        (5000, 20000, 1, 4096, 4096 + 20480),  # a page that is larger than a checkpoint
        (1 << 20, 64, MAX_PAGES_PER_EXTENT, 167936, 167936 + (1 << 20)),
    ],
)
def test_how_many_pages_a_slab_takes(payload: int, page: int, n_pages: int, header: int, slab: int):
    layout = RecordLayout((payload,), kv_page_bytes=page)
    assert layout.pages_per_extent == n_pages
    assert (layout.header_bytes, layout.slab_bytes) == (header, slab)
    assert layout.transfer_bytes(RecordKind.CHECKPOINT, 0) <= slab
    full = layout.transfer_bytes(RecordKind.KV, n_pages)
    assert full <= slab and full % 4096 == 0
    one = layout.transfer_bytes(RecordKind.KV, 1)
    assert one % 4096 == 0 and 0 <= one - header - page < 4096
    assert layout.part_bytes(RecordKind.KV, 3) == (page,) * 3
    assert layout.content_bytes(RecordKind.KV, 3) == 3 * page
    assert layout.content_bytes(RecordKind.CHECKPOINT, 0) == payload


def test_each_part_has_its_own_sum():
    content = bytes(range(10)) + b"\0"
    found = sums(memoryview(content), (4, 6))
    assert found == (xxhash.xxh3_64_intdigest(content[:4]), xxhash.xxh3_64_intdigest(content[4:10]))


@pytest.mark.parametrize(("sizes", "page"), [((), 0), ((1,) * 257, 0), ((4, 0), 0), ((4,), -1)])
def test_bad_layouts_are_refused(sizes: tuple[int, ...], page: int):
    with pytest.raises(ValueError):
        RecordLayout(sizes, kv_page_bytes=page)


def test_each_fact_of_the_fingerprint_counts():
    layout = RecordLayout((64, 64))
    base = {"model": "m", "dtype": "float32", "tp": 2}
    prints = {Fingerprint.of(base, layout).digest, Fingerprint.of(base, RecordLayout((128,))).digest}
    prints.add(Fingerprint.of(base, RecordLayout((64, 64), kv_page_bytes=64)).digest)
    for name in base:
        prints.add(Fingerprint.of(base | {name: "other"}, layout).digest)
    assert len(prints) == 6
    assert Fingerprint.of(dict(reversed(base.items())), layout).digest in prints
