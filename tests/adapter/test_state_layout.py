"""Where the tensors of one checkpoint lie in a record."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_histate.adapter.state_layout import StateLayout
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


@given(layouts())
def test_views_cover_their_own_bytes_and_no_others(layout) -> None:
    record = RecordPool(layout.record_layout(), 1).acquire()
    assert record is not None and len(record.payload) == len(layout.layer_ids) * layout.segment_bytes
    owner = np.full(len(record.payload), -1)
    for index, views in enumerate(layout.views(record.payload)):
        assert views.temporal.shape == layout.temporal_shape and views.temporal.dtype == layout.temporal_dtype
        assert views.conv.shape == layout.conv_shape and views.conv.dtype == layout.conv_dtype
        for part, view in enumerate(views):
            assert view.is_contiguous()
            start = view.data_ptr() - record.payload.ctypes.data
            assert start % 16 == 0
            end = start + view.numel() * view.element_size()
            assert (owner[start:end] == -1).all()
            owner[start:end] = 2 * index + part
    assert (owner >= 0).sum() == layout.checkpoint_bytes
    assert sum(layout.record_layout().segment_bytes) == len(record.payload)


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
    }
    with pytest.raises(AssertionError):
        StateLayout.from_pool([1], temporal, conv)


def test_the_checkpoint_of_qwen35_9b_has_the_size_the_design_counts_with() -> None:
    """24 linear layers, 32 value heads of 128 x 128 in float32, a window of 3 over 8192 channels in bfloat16."""
    layout = StateLayout(tuple(range(24)), (32, 128, 128), torch.float32, (8192, 3), torch.bfloat16)
    assert layout.checkpoint_bytes == 51_511_296
