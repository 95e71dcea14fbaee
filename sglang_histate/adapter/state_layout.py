"""How one checkpoint's tensors lie in a record: layer by layer, temporal state then convolution window.

A checkpoint of L linear layers is L segments. Each segment is the layer's temporal state ``[HV, V, K]`` followed by
its convolution window ``[dim, W-1]``, both in the pool's own dtype and element order, each padded to 16 bytes.
Layer-major order lets capture fill a record while the forward pass runs, and lets a read be consumed layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from sglang_histate.store.layout import RecordLayout

_ALIGNMENT_BYTES = 16


class LayerViews(NamedTuple):
    """Writable tensors over one layer's bytes of a record."""

    temporal: torch.Tensor
    conv: torch.Tensor


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True)
class StateLayout:
    """Shapes and dtypes of one rank's recurrent state. `layer_ids` are global layer ids in pool order."""

    layer_ids: tuple[int, ...]
    temporal_shape: tuple[int, ...]
    temporal_dtype: torch.dtype
    conv_shape: tuple[int, ...]
    conv_dtype: torch.dtype

    @classmethod
    def from_pool(cls, layer_ids: Sequence[int], temporal: torch.Tensor, conv: torch.Tensor) -> StateLayout:
        """Read the layout off the pool's tensors: temporal ``[L, slots, HV, V, K]``, conv ``[L, slots, dim, W-1]``."""
        assert temporal.shape[0] == conv.shape[0] == len(layer_ids)
        return cls(
            layer_ids=tuple(layer_ids),
            temporal_shape=tuple(temporal.shape[2:]),
            temporal_dtype=temporal.dtype,
            conv_shape=tuple(conv.shape[2:]),
            conv_dtype=conv.dtype,
        )

    @property
    def temporal_bytes(self) -> int:
        return prod(self.temporal_shape) * self.temporal_dtype.itemsize

    @property
    def conv_bytes(self) -> int:
        return prod(self.conv_shape) * self.conv_dtype.itemsize

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of state proper, without padding: what a checkpoint costs in the interval policy."""
        return len(self.layer_ids) * (self.temporal_bytes + self.conv_bytes)

    @property
    def segment_bytes(self) -> int:
        return _aligned(self.temporal_bytes) + _aligned(self.conv_bytes)

    @property
    def conv_offset(self) -> int:
        """Where a segment's convolution window begins."""
        return _aligned(self.temporal_bytes)

    def record_layout(self, kv_page_bytes: int = 0) -> RecordLayout:
        """Return the SSD's layout for these checkpoints, and for KV pages of that size (0: for none)."""
        return RecordLayout((self.segment_bytes,) * len(self.layer_ids), kv_page_bytes)

    def views(self, payload: Any) -> list[LayerViews]:
        """Return tensors that share memory with a record's `payload` (uint8, at least the layout's payload bytes)."""
        flat = torch.from_numpy(payload)
        layers = []
        for index in range(len(self.layer_ids)):
            start = index * self.segment_bytes
            conv_start = start + self.conv_offset
            temporal = flat[start : start + self.temporal_bytes].view(self.temporal_dtype)
            conv = flat[conv_start : conv_start + self.conv_bytes].view(self.conv_dtype)
            layers.append(LayerViews(temporal.view(self.temporal_shape), conv.view(self.conv_shape)))
        return layers

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for two stores to hold the same kind of record, as JSON values."""
        return {
            "layer_ids": list(self.layer_ids),
            "temporal_shape": list(self.temporal_shape),
            "temporal_dtype": str(self.temporal_dtype),
            "conv_shape": list(self.conv_shape),
            "conv_dtype": str(self.conv_dtype),
        }
