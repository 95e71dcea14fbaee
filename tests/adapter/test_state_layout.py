"""Where the tensors of one checkpoint lie in a record."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.config import CheckpointDtype
from sglang_histate.store.records import RecordPool

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def layouts(draw) -> StateLayout:
    size = st.integers(1, 5)
    return StateLayout(
        layer_ids=tuple(sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=5)))),
        temporal_shape=tuple(draw(st.tuples(size, size, size))),
        temporal_dtype=draw(st.sampled_from(DTYPES)),
        conv_shape=tuple(draw(st.tuples(size, size))),
        conv_dtype=draw(st.sampled_from(DTYPES)),
    )


@st.composite
def encoded_layouts(draw) -> StateLayout:
    native = draw(layouts())
    return dataclasses.replace(
        native, temporal_dtype=torch.float32, encoding=draw(st.sampled_from(CheckpointDtype))
    )


def covered(memory: np.ndarray, layers: list[list[torch.Tensor]]) -> int:
    """Return how many bytes of `memory` the tensors take; each begins on 16 bytes, none lie on each other."""
    owner = np.full(len(memory), False)
    for tensor in [tensor for layer in layers for tensor in layer]:
        assert tensor.is_contiguous()
        start = tensor.data_ptr() - memory.ctypes.data
        assert start % 16 == 0
        end = start + tensor.numel() * tensor.element_size()
        assert end <= len(memory) and not owner[start:end].any()
        owner[start:end] = True
    return int(owner.sum())


@given(layouts())
def test_views_of_an_image_cover_their_own_bytes_and_no_others(layout) -> None:
    image = np.zeros(layout.image_bytes + 16, dtype=np.uint8)[: layout.image_bytes]
    image = image if image.ctypes.data % 16 == 0 else np.zeros(layout.image_bytes + 16, np.uint8)[8:-8]
    views = layout.views(image)
    assert len(views) == len(layout.layer_ids)
    for temporal, conv in views:
        assert temporal.shape == layout.temporal_shape and temporal.dtype == layout.temporal_dtype
        assert conv.shape == layout.conv_shape and conv.dtype == layout.conv_dtype
    assert covered(image, [list(layer) for layer in views]) == layout.checkpoint_bytes


@given(encoded_layouts())
def test_views_of_a_record_cover_their_own_bytes_and_no_others(layout) -> None:
    record = RecordPool(layout.record_layout(), 1).acquire()
    assert record is not None and len(record.payload) == len(layout.layer_ids) * layout.record_segment_bytes
    views = layout.record_views(record.payload)
    for temporal, conv in views:
        assert [(tuple(part.shape), part.dtype) for part in temporal] == list(layout.codec.parts)
        assert conv.shape == layout.conv_shape and conv.dtype == layout.conv_dtype
    assert covered(record.payload, [[*temporal, conv] for temporal, conv in views]) == layout.stored_bytes
    assert sum(layout.record_layout().segment_bytes) == len(record.payload)


@given(layouts())
def test_a_native_record_is_an_image(layout) -> None:
    assert layout.record_layout().payload_bytes == layout.image_bytes
    record = RecordPool(layout.record_layout(), 1).acquire()
    assert record is not None
    for image, encoded in zip(layout.views(record.payload), layout.record_views(record.payload), strict=True):
        assert [image.temporal.data_ptr()] == [part.data_ptr() for part in encoded.temporal]
        assert image.conv.data_ptr() == encoded.conv.data_ptr()


@pytest.mark.parametrize("encoding", list(CheckpointDtype))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_makes_a_record_unfit(encoding, bad) -> None:
    layout = StateLayout((0, 1), (1, 2, 3), torch.float32, (2, 3), torch.bfloat16, encoding)
    record = RecordPool(layout.record_layout(), 1).acquire()
    assert record is not None
    record.payload[:] = 0
    assert layout.storable(record.payload)
    for views in layout.record_views(record.payload):
        views.conv[1, 2] = bad
        assert not layout.storable(record.payload)
        views.conv[1, 2] = 0
        state = torch.zeros(1, 1, 2, 3)
        state[0, 0, 1, 2] = bad
        for place, part in zip(views.temporal, layout.codec.encode(state), strict=True):
            place.copy_(part[0])
        assert not layout.storable(record.payload)
        for place in views.temporal:
            place.zero_()
        assert layout.storable(record.payload)


def test_writing_a_view_changes_the_record() -> None:
    layout = StateLayout((4,), (1, 2, 2), torch.float32, (2, 3), torch.bfloat16)
    record = RecordPool(layout.record_layout(), 1).acquire()
    assert record is not None
    layout.views(record.payload)[0].temporal.fill_(1.0)
    assert record.payload[:16].view(np.float32).tolist() == [1.0] * 4


def test_from_pool_and_identity() -> None:
    temporal, conv = torch.zeros(2, 9, 4, 3, 5, dtype=torch.bfloat16), torch.zeros(2, 9, 7, 3)
    layout = StateLayout.from_pool([1, 5], temporal, conv)
    assert layout.layer_ids == (1, 5) and layout.temporal_shape == (4, 3, 5) and layout.conv_shape == (7, 3)
    assert layout.temporal_bytes == 4 * 3 * 5 * 2 and layout.conv_bytes == 7 * 3 * 4
    assert layout.checkpoint_bytes == 2 * (120 + 84)
    assert layout.identity() == {
        "layer_ids": [1, 5],
        "temporal_shape": [4, 3, 5],
        "temporal_dtype": "torch.bfloat16",
        "conv_shape": [7, 3],
        "conv_dtype": "torch.float32",
        "encoding": "native",
    }
    with pytest.raises(AssertionError):
        StateLayout.from_pool([1], temporal, conv)


def test_the_checkpoint_of_qwen35_9b_has_the_size_the_design_counts_with() -> None:
    """24 linear layers, 32 value heads of 128 x 128 in float32, a window of 3 over 8192 channels in bfloat16."""
    layout = StateLayout(tuple(range(24)), (32, 128, 128), torch.float32, (8192, 3), torch.bfloat16)
    assert layout.checkpoint_bytes == layout.stored_bytes == 51_511_296


@pytest.mark.parametrize(
    ("encoding", "stored", "slab"),
    [("native", 51_511_296, 51_515_392), ("bf16", 26_345_472, 26_349_568), ("int8", 14_155_776, 14_159_872)],
)
def test_a_slab_is_as_large_as_the_encoding_needs(encoding, stored, slab) -> None:
    layout = StateLayout(
        tuple(range(24)), (32, 128, 128), torch.float32, (8192, 3), torch.bfloat16, CheckpointDtype(encoding)
    )
    assert layout.stored_bytes == stored and layout.record_layout().slab_bytes == slab
    assert layout.image_bytes == layout.checkpoint_bytes == 51_511_296
