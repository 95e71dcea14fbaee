"""Which bytes each thread reads and writes, enumerated by the index arithmetic of the kernels themselves.

Nothing is allocated: pools may be larger than 4 GiB. Each byte of what is written must be written exactly once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.native import Pool
from sglang_histate.copy.record_form import aligned

NATIVE, BF16, INT8 = range(3)
TEMPORAL, CONV, RECORDS = 1 << 44, 2 << 44, 3 << 44  # of three pieces of address space that belong to nobody
KIND_BYTES = (4, 2, 2)


@dataclass(frozen=True)
class Case:
    """A pool that does not exist, and what is asked of it. Strides in bytes."""

    pool: Pool
    encoding: int
    slots: list[int]
    sources: list[int]
    records: int
    layers: range
    most_blocks: int
    record_gap: int

    @property
    def numbers(self) -> int:
        return self.pool.heads * self.pool.rows * self.pool.columns

    @property
    def temporal_bytes(self) -> int:
        return self.numbers * KIND_BYTES[self.pool.temporal_kind]

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(offset, bytes) of the parts in a segment, the window last."""
        scales = [self.pool.heads * self.pool.columns * 4] if self.encoding == INT8 else []
        encoded = (self.temporal_bytes, self.numbers * 2, self.numbers)[min(self.encoding, INT8)]
        found, offset = [], 0
        for size in (encoded, *scales, self.pool.conv_bytes):
            found.append((offset, size))
            offset += aligned(size)
        return found

    @property
    def segment_bytes(self) -> int:
        offset, size = self.parts[-1]
        return offset + aligned(size)

    @property
    def record_stride(self) -> int:
        return self.pool.layers * self.segment_bytes + self.record_gap

    def of_slot(self, layer: int, slot: int) -> list[tuple[int, int]]:
        """(address, bytes) of a layer's state and window."""
        pool = self.pool
        return [
            (
                TEMPORAL + layer * pool.temporal_layer_stride + slot * pool.temporal_slot_stride,
                self.temporal_bytes,
            ),
            (CONV + layer * pool.conv_layer_stride + slot * pool.conv_slot_stride, pool.conv_bytes),
        ]

    def of_record(self, layer: int, record: int, *, padded: bool) -> list[tuple[int, int]]:
        start = RECORDS + record * self.record_stride + layer * self.segment_bytes
        return [(start, self.segment_bytes)] if padded else [(start + at, size) for at, size in self.parts]


@st.composite
def cases(draw, one_record_each: bool) -> Case:
    encoding = draw(st.sampled_from([NATIVE, BF16, INT8]))
    shape = draw(
        st.one_of(
            st.tuples(st.integers(1, 3), st.integers(1, 33), st.integers(1, 70)),
            st.just((2, 128, 128)),
            st.just((1, 128, 192)),
        )
    )
    kind = draw(st.integers(0, 2)) if encoding == NATIVE else 0
    conv_kind, conv_numbers = draw(st.integers(0, 2)), draw(st.one_of(st.integers(1, 99), st.just(5000)))
    layers, slots = draw(st.integers(1, 3)), draw(st.sampled_from([1, 5, 3000]))
    row, window = shape[0] * shape[1] * shape[2] * KIND_BYTES[kind], conv_numbers * KIND_BYTES[conv_kind]
    gap = draw(st.sampled_from([0, 16, 4, 2 << 20]))  # the last: more than 4 GiB between layers of 3000 slots
    slot_stride, conv_stride = row + gap, window + gap
    pool = Pool(
        *(TEMPORAL, CONV, layers, slots, *shape),
        *(slot_stride * slots, slot_stride, conv_stride * slots, conv_stride, window, kind, conv_kind),
    )
    wanted = draw(
        st.lists(st.integers(0, slots - 1), min_size=1, max_size=min(4, slots), unique=not one_record_each)
    )
    records = len(wanted) if one_record_each else draw(st.integers(1, 4))
    sources = [i if one_record_each else draw(st.integers(0, records - 1)) for i in range(len(wanted))]
    first = draw(st.integers(0, layers - 1))
    return Case(
        pool=pool,
        encoding=encoding,
        slots=wanted,
        sources=sources,
        records=records,
        layers=range(first, draw(st.integers(first + 1, layers))),
        most_blocks=draw(st.integers(0, 4)),
        record_gap=draw(st.sampled_from([0, 16, 1 << 33])),
    )


def touches(trace) -> tuple[np.ndarray, np.ndarray]:
    """Return what was read and what was written, rows of (address, bytes)."""
    count = trace.histate_take_touches(None, 0)
    rows = np.zeros((count, 3), dtype=np.int64)
    pointer = rows.ctypes.data_as(ctypes.c_void_p)
    assert trace.histate_take_touches(pointer, ctypes.c_int64(count)) == count
    return rows[rows[:, 0] == 0][:, 1:], rows[rows[:, 0] == 1][:, 1:]


def merged(pieces: np.ndarray, *, once: bool) -> list[tuple[int, int]]:
    """Return (address, bytes) of the stretches that `pieces` make up. `once`: no byte is in two pieces."""
    if not len(pieces):
        return []
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    starts, ends = pieces[:, 0], pieces[:, 0] + pieces[:, 1]
    reached = np.maximum.accumulate(ends)
    if once:
        twice = np.flatnonzero(starts[1:] < reached[:-1])
        assert not len(twice), f"byte {starts[1:][twice[0]]:#x} is touched twice"
    breaks = np.flatnonzero(starts[1:] > reached[:-1]) + 1
    edges = np.concatenate([[0], breaks, [len(pieces)]])
    return [(int(starts[a]), int(reached[b - 1] - starts[a])) for a, b in pairwise(edges)]


def stretches(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same for what was expected, where nothing may overlap but equal pieces."""
    return merged(np.array(sorted(set(pieces)), dtype=np.int64).reshape(-1, 2), once=True)


def run_pack(trace, case: Case) -> int:
    slots = (ctypes.c_int64 * len(case.slots))(*case.slots)
    return trace.histate_pack(
        *(ctypes.byref(case.pool), slots, 0, len(case.slots), RECORDS, case.record_stride),
        *(None, case.encoding, case.most_blocks, None),
    )


def run_unpack(trace, case: Case) -> int:
    slots = (ctypes.c_int64 * len(case.slots))(*case.slots)
    sources = (ctypes.c_int64 * len(case.sources))(*case.sources)
    return trace.histate_unpack(
        *(ctypes.byref(case.pool), slots, 0, sources, len(case.slots), RECORDS, case.record_stride),
        *(case.records, case.layers.start, case.layers.stop, case.encoding, case.most_blocks, None),
    )


@given(case=cases(one_record_each=True))
@settings(max_examples=80)
def test_pack_writes_each_byte_of_the_records_once_and_reads_the_slots(trace, case: Case) -> None:
    touches(trace)
    assert run_pack(trace, case) == 0
    read, written = touches(trace)
    layers = range(case.pool.layers)
    assert merged(written, once=True) == stretches(
        [
            piece
            for i in range(case.records)
            for layer in layers
            for piece in case.of_record(layer, i, padded=True)
        ]
    )
    twice_is_fine = case.encoding == INT8 or len(set(case.slots)) < len(case.slots)
    assert merged(read, once=not twice_is_fine) == stretches(
        [piece for slot in case.slots for layer in layers for piece in case.of_slot(layer, slot)]
    )


@given(case=cases(one_record_each=False))
@settings(max_examples=80)
def test_unpack_writes_each_byte_of_the_slots_once_and_reads_only_its_layers(trace, case: Case) -> None:
    touches(trace)
    assert run_unpack(trace, case) == 0
    read, written = touches(trace)
    assert merged(written, once=True) == stretches(
        [piece for slot in case.slots for layer in case.layers for piece in case.of_slot(layer, slot)]
    )
    used = {source for source in case.sources}
    allowed = stretches(
        [p for i in used for layer in case.layers for p in case.of_record(layer, i, padded=True)]
    )
    needed = [p for i in used for layer in case.layers for p in case.of_record(layer, i, padded=False)]
    got = merged(read, once=case.encoding != INT8)  # scales are read for each number
    inside = [
        (start, size)
        for start, size in got
        if any(a <= start and start + size <= a + length for a, length in allowed)
    ]
    assert inside == got
    for start, size in needed:
        assert any(a <= start and start + size <= a + length for a, length in got)


def test_the_tile_is_read_once(trace) -> None:
    pool = Pool(TEMPORAL, CONV, 1, 1, 2, 128, 128, 0, 0, 0, 0, 96, 0, 1)
    case = Case(pool, INT8, [0], [0], 1, range(1), 0, 0)
    touches(trace)
    assert run_pack(trace, case) == 0
    read, _ = touches(trace)
    assert merged(read, once=True) == stretches(case.of_slot(0, 0))


def test_offsets_beyond_4_gib(trace) -> None:
    """The last slot of the last layer of a pool of 100 GB, and a record behind 8 GiB of others."""
    row, window, slots = 32 * 128 * 128 * 4, 8192 * 3 * 2, 2048
    pool = Pool(
        TEMPORAL, CONV, 24, slots, 32, 128, 128, row * slots, row, window * slots, window, window, 0, 1
    )
    for encoding in (NATIVE, BF16, INT8):
        case = Case(pool, encoding, [slots - 1], [200], 201, range(23, 24), 0, 0)
        touches(trace)
        assert run_unpack(trace, case) == 0
        read, written = touches(trace)
        assert merged(written, once=True) == stretches(case.of_slot(23, slots - 1))
        assert case.of_slot(23, slots - 1)[0][0] - TEMPORAL > 1 << 36
        assert merged(read, once=False) == stretches(case.of_record(23, 200, padded=True))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"slots": [5]}, "no such slot"),
        ({"slots": [-1]}, "no such slot"),
        ({"encoding": 3}, "only float32"),
        ({"record_gap": 8}, "16 bytes"),
        ({"record_gap": -16}, "smaller than their segments"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_touched(trace, change, text) -> None:
    pool = Pool(TEMPORAL, CONV, 2, 5, 1, 4, 4, 5 * 64, 64, 5 * 32, 32, 32, 0, 1)
    case = Case(
        **{
            "pool": pool,
            "encoding": NATIVE,
            "slots": [1],
            "sources": [0],
            "records": 1,
            "layers": range(2),
            "most_blocks": 0,
            "record_gap": 0,
        }
        | change
    )
    touches(trace)
    for code in (run_pack(trace, case), run_unpack(trace, case)):
        assert code < 0 and text in trace.histate_text_of(code).decode()
    assert all(not len(rows) for rows in touches(trace))


def test_layers_records_and_dtypes_that_do_not_exist_are_refused(trace) -> None:
    pool = Pool(TEMPORAL, CONV, 2, 5, 1, 4, 4, 5 * 64, 64, 5 * 32, 32, 32, 0, 1)
    half = Pool(TEMPORAL, CONV, 2, 5, 1, 4, 4, 5 * 32, 32, 5 * 32, 32, 32, 1, 1)
    huge = Pool(TEMPORAL, CONV, 1, 1, 1, 1 << 16, 1 << 15, 0, 0, 0, 0, 32, 0, 1)
    odd = Pool(TEMPORAL + 2, CONV, 2, 5, 1, 4, 4, 5 * 64, 64, 5 * 32, 32, 32, 0, 1)
    for case, text in (
        (Case(pool, NATIVE, [1], [0], 1, range(1, 3), 0, 0), "no such layers"),
        (Case(pool, NATIVE, [1], [0], 1, range(1, 1), 0, 0), "no such layers"),
        (Case(pool, NATIVE, [1], [1], 1, range(2), 0, 0), "no such record"),
        (Case(half, BF16, [1], [0], 1, range(2), 0, 0), "only float32"),
        (Case(huge, NATIVE, [0], [0], 1, range(1), 0, 0), "2^31"),
        (Case(odd, INT8, [1], [0], 1, range(2), 0, 0), "4 bytes"),
    ):
        code = run_unpack(trace, case)
        assert code < 0 and text in trace.histate_text_of(code).decode(), text
