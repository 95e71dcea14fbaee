"""The torch reference: the store's record format, error bounds, SGLang's own int8, flags, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.face import NO_SUCH_SLOT
from kernels.reference import TorchKernels
from kernels.table import PoolTable
from sglang_histate.config import CheckpointDtype

from .pools import POISON, Shape, empty, filled, shapes

REFERENCE = TorchKernels("the oracle")
ENCODINGS = pytest.mark.parametrize("encoding", list(CheckpointDtype))
SMALL = Shape(layers=3, slots=4, temporal=(2, 5, 6), conv=(7, 3))


def packed(pool: PoolTable, slots, encoding, **options):
    records = torch.full((len(slots), pool.form(encoding).record_bytes), POISON, dtype=torch.uint8)
    return records, REFERENCE.pack(pool, slots, records, encoding, **options)


def state_layout(pool: PoolTable, encoding: CheckpointDtype):
    module = pytest.importorskip("sglang_histate.adapter.state_layout")
    return module.StateLayout.from_pool(range(pool.layers), pool.temporal, pool.conv, encoding)


@given(data=st.data())
@settings(max_examples=40)
def test_records_are_those_of_the_store(data) -> None:
    """What `pack` writes is what `StateLayout` reads, part by part, and the flag is its verdict."""
    encoding = data.draw(st.sampled_from(list(CheckpointDtype)))
    shape = data.draw(shapes(encoding))
    pool = filled(shape, data.draw(st.integers(0, 99)))
    place = data.draw(st.integers(-2, pool.temporal[0, 0].numel() - 1))
    if place >= 0:
        pool.temporal[-1, 0].view(-1)[place] = data.draw(st.sampled_from([torch.nan, torch.inf, 3.3e38]))
    layout = state_layout(pool, encoding)
    slots = list(range(shape.slots))
    records, flags = packed(pool, slots, encoding)
    assert (
        layout.record_layout().payload_bytes >= records.shape[1] == layout.record_segment_bytes * shape.layers
    )
    for slot, record in enumerate(records.numpy()):
        assert bool(flags[slot]) == (not layout.storable(record))
        if flags[slot]:
            continue
        for layer, views in enumerate(layout.record_views(record)):
            parts = layout.codec.encode(pool.temporal[layer, slot][None])
            for part, view in zip(parts, views.temporal, strict=True):
                assert torch.equal(part[0], view)
            assert torch.equal(views.conv, pool.conv[layer, slot])


@ENCODINGS
def test_padding_is_zero_and_nothing_else_is_touched(encoding) -> None:
    pool = filled(SMALL, 1)
    form = pool.form(encoding)
    records = torch.full((2, form.record_bytes + 32), POISON, dtype=torch.uint8)
    REFERENCE.pack(pool, [1, 3], records, encoding)
    assert (records[:, form.record_bytes :] == POISON).all()
    used = np.zeros(form.record_bytes, dtype=bool)
    sizes = [*(part.size_bytes for part in form.codec.parts), form.conv_bytes]
    for layer in range(pool.layers):
        for offset, size in zip(form.part_offsets, sizes, strict=True):
            start = layer * form.segment_bytes + offset
            assert start % 16 == 0
            used[start : start + size] = True
    assert (records[:, : form.record_bytes][:, ~torch.from_numpy(used)] == 0).all()


def test_the_error_of_each_encoding_is_within_its_bound() -> None:
    pool = filled(Shape(layers=2, slots=2, temporal=(2, 128, 128), conv=(5, 3)), 2, top=30.0)
    state = pool.temporal[:, 1].double()
    bounds = {
        CheckpointDtype.NATIVE: torch.zeros_like(state),
        CheckpointDtype.BF16: 2.0**-8 * state.abs(),
        CheckpointDtype.INT8: (state.abs().amax(dim=-2, keepdim=True) / 254 * (1 + 2.0**-14)).expand_as(
            state
        ),
    }
    for encoding, bound in bounds.items():
        records, _ = packed(pool, [1], encoding)
        back = PoolTable(torch.zeros_like(pool.temporal), torch.zeros_like(pool.conv))
        REFERENCE.unpack(records, [0], back, None, encoding)
        assert ((back.temporal[:, 0].double() - state).abs() <= bound).all()
        assert torch.equal(back.conv[:, 0], pool.conv[:, 1])


@given(seed=st.integers(0, 1 << 20), top=st.integers(-12, 20))
@settings(max_examples=25)
def test_int8_is_what_sglangs_checkpoint_store_holds(seed, top) -> None:
    """The same store, asked through its own slots. It differs by design for channels below 1e-8, whose scale it clamps."""
    upstream = pytest.importorskip("sglang.srt.mem_cache.mamba_checkpoint_pool").Int8CheckpointStore
    shape = Shape(layers=2, slots=3, temporal=(2, 16, 8), conv=(3, 3))
    pool = filled(shape, seed, top=2.0**top)
    pool.temporal[0, 1, 0, :, 2] = 0.0
    pool.temporal[1, 1, 1, :, 5] *= 1e-30
    theirs = upstream(
        num_layers=2,
        num_slots=4,
        num_heads=2,
        head_v_dim=16,
        head_k_dim=8,
        device="cpu",
        scale_dtype=torch.float32,
    )
    theirs.store_from_pool(pool.temporal, torch.tensor([2, 1]), torch.tensor([0, 3]))
    records, flags = packed(pool, [2, 1], CheckpointDtype.INT8)
    assert flags.tolist() == [0, 0]
    form = pool.form(CheckpointDtype.INT8)
    back = PoolTable(torch.zeros_like(pool.temporal), torch.zeros_like(pool.conv))
    REFERENCE.unpack(records, [2, 1], back, None, CheckpointDtype.INT8)
    loaded = torch.zeros_like(pool.temporal)
    theirs.copy_to_pool(loaded, torch.tensor([0, 3]), torch.tensor([2, 1]))
    for index, (slot, stored) in enumerate(((2, 0), (1, 3))):
        for layer in range(2):
            start = layer * form.segment_bytes
            scales = (
                records[index, start + form.part_offsets[1] :][: 2 * 8 * 4].view(torch.float32).view(2, 8)
            )
            quantized = records[index, start:][: 2 * 16 * 8].view(torch.int8).view(2, 16, 8)
            amax = pool.temporal[layer, slot].abs().amax(dim=-2)
            usual = amax >= 1e-8
            assert torch.equal(scales[usual], theirs.scale[layer, stored].squeeze(-2)[usual])
            everywhere = usual.unsqueeze(-2).expand_as(quantized)
            assert torch.equal(quantized[everywhere], theirs.qdata[layer, stored][everywhere])
            assert torch.equal(back.temporal[layer, slot][everywhere], loaded[layer, slot][everywhere])
            # The others: zero is zero for both, what is tiny keeps its own scale here.
            ours, tiny = back.temporal[layer, slot], pool.temporal[layer, slot]
            assert ((ours - tiny).abs() <= amax.unsqueeze(-2) / 254 * (1 + 2.0**-14) + 2.0**-126).all()
            assert (scales[amax == 0] == 0).all()


@ENCODINGS
def test_slots_in_a_tensor_and_flags_of_ones_own(encoding) -> None:
    pool = filled(SMALL, 3)
    records, _ = packed(pool, [2, 0], encoding)
    flags = torch.full((2,), 9, dtype=torch.int32)
    again = torch.zeros_like(records)
    assert (
        REFERENCE.pack(pool, torch.tensor([2, 0], dtype=torch.int32), again, encoding, flags=flags) is flags
    )
    assert torch.equal(again, records) and flags.tolist() == [0, 0]


def test_a_slot_that_only_the_device_knows_to_be_wrong_is_flagged() -> None:
    pool = filled(SMALL, 4)
    form = pool.form(CheckpointDtype.NATIVE)
    flags = torch.zeros(3, dtype=torch.int32)
    records = torch.zeros((3, form.record_bytes), dtype=torch.uint8)
    REFERENCE._pack(pool, form, torch.tensor([1, 4, -1]), records, flags, 0)
    assert flags.tolist() == [0, NO_SUCH_SLOT, NO_SUCH_SLOT]


@ENCODINGS
def test_one_record_goes_to_many_slots_and_groups_of_layers_make_the_whole(encoding) -> None:
    pool = filled(SMALL, 5)
    records, _ = packed(pool, [1], encoding)
    whole, by_layer = (PoolTable(torch.zeros_like(pool.temporal), torch.zeros_like(pool.conv)) for _ in "ab")
    REFERENCE.unpack(records, [0, 2, 3], whole, None, encoding)
    for layer in (2, 0, 1):
        REFERENCE.unpack(records, [0, 2, 3], by_layer, range(layer, layer + 1), encoding)
    assert torch.equal(whole.temporal, by_layer.temporal) and torch.equal(whole.conv, by_layer.conv)
    assert torch.equal(whole.temporal[:, 0], whole.temporal[:, 3])
    assert (whole.temporal[:, 1] == 0).all() and (whole.conv[:, 1] == 0).all()


def test_empty_requests_do_nothing() -> None:
    pool = filled(SMALL, 6)
    nothing = torch.empty((0, pool.form(CheckpointDtype.NATIVE).record_bytes), dtype=torch.uint8)
    assert REFERENCE.pack(pool, [], nothing, CheckpointDtype.NATIVE).shape == (0,)
    REFERENCE.unpack(nothing, [], pool, None, CheckpointDtype.NATIVE)


def test_requests_that_cannot_be_met_are_refused() -> None:
    pool = filled(SMALL, 7)
    native = CheckpointDtype.NATIVE
    records, _ = packed(pool, [0, 1], native)
    size = records.shape[1]
    pack, unpack = REFERENCE.pack, REFERENCE.unpack
    for text, call in {
        "2 slots cannot be packed into 1": lambda: pack(pool, [0, 1], records[:1], native),
        "too small": lambda: pack(pool, [0, 1], records[:, :-1], native),
        "16 bytes": lambda: pack(pool, [0], torch.zeros(size + 8, dtype=torch.uint8)[8:][None], native),
        "uint8": lambda: pack(pool, [0, 1], records.to(torch.int8), native),
        "not all in a pool of 4": lambda: pack(pool, [0, 4], records, native),
        "are not all in": lambda: pack(pool, [0, -1], records, native),
        "slots are integers": lambda: pack(pool, torch.tensor([0.0, 1.0]), records, native),
        "flags are int32": lambda: pack(
            pool, [0, 1], records, native, flags=torch.zeros(2, dtype=torch.int64)
        ),
        "no group": lambda: unpack(records, [0, 1], pool, range(2, 4), native),
        "is no group": lambda: unpack(records, [0, 1], pool, range(1, 1), native),
        "cannot get two": lambda: unpack(records, [1, 1], pool, None, native),
        "`sources` must say": lambda: unpack(records, [0, 1, 2], pool, None, native),
        "3 sources": lambda: unpack(records, [0, 1], pool, None, native, sources=[0, 0, 0]),
        "not all among 2": lambda: unpack(records, [0, 1], pool, None, native, sources=[0, 2]),
    }.items():
        with pytest.raises(ValueError, match=text):
            call()


def test_pools_that_are_none_are_refused() -> None:
    temporal, conv = torch.zeros(2, 3, 1, 4, 4), torch.zeros(2, 3, 5, 3)
    for text, make in {
        "a pool is temporal": lambda: PoolTable(temporal[0], conv),
        "a pool is": lambda: PoolTable(temporal, conv[:, :2]),
        "states are torch.float64": lambda: PoolTable(temporal.double(), conv),
        "windows are torch.uint8": lambda: PoolTable(temporal, conv.to(torch.uint8)),
        "not contiguous in states": lambda: PoolTable(temporal.transpose(3, 4)[..., ::2], conv),
        "not contiguous in windows": lambda: PoolTable(temporal, conv.transpose(2, 3)),
        "states are on cpu, windows on meta": lambda: PoolTable(temporal, conv.to("meta")),
        "encodes float32": lambda: PoolTable(temporal.half(), conv).form(CheckpointDtype.INT8),
    }.items():
        with pytest.raises(ValueError, match=text):
            make()


def test_views_of_one_pool_of_bytes_will_do() -> None:
    shape = Shape(layers=2, slots=3, temporal=(1, 4, 4), conv=(3, 3), gap=20, shift=4)
    pool = filled(shape, 8)
    records, flags = packed(pool, [2], CheckpointDtype.INT8)
    back, memory = empty(shape)
    REFERENCE.unpack(records, [1], back, None, CheckpointDtype.INT8)
    assert flags.tolist() == [0] and all((each[:4] == POISON).all() for each in memory[:1])
