"""The bytes of format version 1. These tests must never change: a change of format is a new version."""

from __future__ import annotations

import pytest
import xxhash

from sglang_histate.store.layout import Fingerprint, RecordLayout, SlabHeader, Superblock, generation


def _header() -> SlabHeader:
    return SlabHeader(
        generation=generation(epoch=3, write_number=7),
        key=bytes(range(32)),
        at_token=4096,
        payload_bytes=9396,
        captured_at_us=1_700_000_000_000_000,
        fingerprint_half=bytes(range(0xF0, 0x100)),
        segment_sums=(1, 0x0102030405060708),
    )


def test_golden_slab_header():
    packed = _header().pack(4096)
    golden = (
        "48 49 53 4c 41 42 00 00"  # magic
        "01 00 00 00  02 00 00 00"  # version, segments
        "07 00 00 00 00 03 00 00"  # generation 3 * 2^40 + 7
        "00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f"
        "10 11 12 13 14 15 16 17 18 19 1a 1b 1c 1d 1e 1f"  # key
        "00 10 00 00 00 00 00 00"  # at_token
        "b4 24 00 00 00 00 00 00"  # payload bytes
        "00 40 1e 18 24 0a 06 00"  # captured at
        "f0 f1 f2 f3 f4 f5 f6 f7 f8 f9 fa fb fc fd fe ff"  # fingerprint
        "01 00 00 00 00 00 00 00  08 07 06 05 04 03 02 01"  # sums
    )
    body = bytes.fromhex(golden).ljust(4088, b"\0")
    assert packed == body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    assert SlabHeader.parse(packed) == _header()


def test_golden_superblock():
    layout = RecordLayout((5000, 300, 4096))
    fingerprint = Fingerprint.of({"model": "m"}, layout)
    assert (
        fingerprint.canonical_json == b'{"format":1,"identity":{"model":"m"},"segment_bytes":[5000,300,4096]}'
    )
    packed = Superblock.of(layout, 5, fingerprint, epoch=9).pack()
    text = fingerprint.canonical_json
    golden = (
        b"HISTATE\0"
        + bytes.fromhex("01000000 03000000")
        + fingerprint.digest
        + bytes.fromhex("0040000000000000 0500000000000000 b424000000000000 0900000000000000")
        + bytes.fromhex("00100000")
        + len(text).to_bytes(4, "little")
        + text
    ).ljust(4088, b"\0")
    assert packed == golden + xxhash.xxh3_64_intdigest(golden).to_bytes(8, "little")
    parsed = Superblock.parse(packed)
    assert parsed is not None and parsed.epoch == 9 and parsed.fingerprint_json == text


def test_long_fingerprint_is_cut_but_its_digest_is_whole():
    layout = RecordLayout((64,))
    fingerprint = Fingerprint.of({"notes": "x" * 9000}, layout)
    parsed = Superblock.parse(Superblock.of(layout, 2, fingerprint, 1).pack())
    assert parsed is not None
    assert parsed.fingerprint_json == fingerprint.canonical_json[:4000]
    assert parsed.fingerprint_json_bytes == len(fingerprint.canonical_json)
    assert parsed.fingerprint_sha256 == fingerprint.digest


def test_any_flipped_bit_of_a_header_is_noticed():
    packed = bytearray(_header().pack(4096))
    for position in [*range(0, 130), 2000, 4087, 4088, 4095]:
        packed[position] ^= 1
        assert SlabHeader.parse(bytes(packed)) is None, position
        packed[position] ^= 1
    assert SlabHeader.parse(bytes(packed)) is not None
    assert SlabHeader.parse(bytes(4096)) is None
    assert Superblock.parse(bytes(4096)) is None


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


@pytest.mark.parametrize("sizes", [(), (1,) * 257, (4, 0)])
def test_bad_layouts_are_refused(sizes: tuple[int, ...]):
    with pytest.raises(ValueError):
        RecordLayout(sizes)


def test_each_fact_of_the_fingerprint_counts():
    layout = RecordLayout((64, 64))
    base = {"model": "m", "dtype": "float32", "tp": 2}
    prints = {Fingerprint.of(base, layout).digest, Fingerprint.of(base, RecordLayout((128,))).digest}
    for name in base:
        prints.add(Fingerprint.of(base | {name: "other"}, layout).digest)
    assert len(prints) == 5
    assert Fingerprint.of(dict(reversed(base.items())), layout).digest in prints
