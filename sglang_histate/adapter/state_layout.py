"""How one checkpoint's tensors lie in host memory: as an *image*, and as a *record* in the encoding of the SSD.

A checkpoint of L linear layers is L segments. A segment of an image is the layer's temporal state ``[HV, V, K]``
followed by its convolution window ``[dim, W-1]``, both in the pool's own dtype and element order: what a slot of the host
arena holds. A segment of a record has the parts of the encoded temporal state (`copy.encoding`) in place of the state;
in the native encoding the two are the same bytes. Everything begins on 16 bytes. Layer-major order lets capture fill a
record while the forward pass runs, and lets a read be consumed layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy import Move, Part, TemporalCodec, codec_for
from sglang_histate.copy.encoding import all_finite
from sglang_histate.copy.record_form import RecordForm
from sglang_histate.store.layout import RecordLayout


class LayerViews(NamedTuple):
    """Writable tensors over one layer's segment of an image."""

    temporal: torch.Tensor
    conv: torch.Tensor


class RecordViews(NamedTuple):
    """Writable tensors over one layer's segment of a record: the parts of the encoded state, and the window."""

    temporal: tuple[torch.Tensor, ...]
    conv: torch.Tensor


@dataclass(frozen=True)
class StateLayout:
    """Shapes and dtypes of one rank's recurrent state. `layer_ids` are global layer ids in pool order."""

    layer_ids: tuple[int, ...]
    temporal_shape: tuple[int, ...]
    temporal_dtype: torch.dtype
    conv_shape: tuple[int, ...]
    conv_dtype: torch.dtype
    encoding: CheckpointDtype = CheckpointDtype.NATIVE

    @classmethod
    def from_pool(
        cls,
        layer_ids: Sequence[int],
        temporal: torch.Tensor,
        conv: torch.Tensor,
        encoding: CheckpointDtype = CheckpointDtype.NATIVE,
    ) -> StateLayout:
        """Read the layout off the pool's tensors: temporal ``[L, slots, HV, V, K]``, conv ``[L, slots, dim, W-1]``."""
        assert temporal.shape[0] == conv.shape[0] == len(layer_ids)
        return cls(
            layer_ids=tuple(layer_ids),
            temporal_shape=tuple(temporal.shape[2:]),
            temporal_dtype=temporal.dtype,
            conv_shape=tuple(conv.shape[2:]),
            conv_dtype=conv.dtype,
            encoding=encoding,
        )

    @property
    def temporal_bytes(self) -> int:
        return prod(self.temporal_shape) * self.temporal_dtype.itemsize

    @property
    def conv_bytes(self) -> int:
        return prod(self.conv_shape) * self.conv_dtype.itemsize

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of state proper, without padding, on device and host."""
        return len(self.layer_ids) * (self.temporal_bytes + self.conv_bytes)

    # The image.

    @cached_property
    def _image(self) -> RecordForm:
        native = codec_for(CheckpointDtype.NATIVE, self.temporal_shape, self.temporal_dtype)
        return RecordForm(len(self.layer_ids), native, self.conv_bytes)

    @property
    def segment_bytes(self) -> int:
        """Of one layer of an image."""
        return self._image.segment_bytes

    @property
    def conv_offset(self) -> int:
        """Where the convolution window begins in a segment of an image."""
        return self._image.conv_offset

    @property
    def image_bytes(self) -> int:
        """What a slot of the host arena takes for a checkpoint."""
        return self._image.record_bytes

    def views(self, image: Any) -> list[LayerViews]:
        """Return tensors that share memory with an `image` (uint8, of any whole number of segments), layer by layer."""
        flat = torch.from_numpy(image)
        state, window = self._image.codec.parts[0], Part(self.conv_shape, self.conv_dtype)
        return [
            LayerViews(_view(flat, start, state), _view(flat, start + self.conv_offset, window))
            for start in range(0, len(flat) - self.segment_bytes + 1, self.segment_bytes)
        ]

    # The record.

    @cached_property
    def codec(self) -> TemporalCodec:
        """The encoding of one layer's temporal state."""
        return codec_for(self.encoding, self.temporal_shape, self.temporal_dtype)

    @property
    def stored_bytes(self) -> int:
        """Bytes of an encoded checkpoint without padding: what one costs on the SSD."""
        return len(self.layer_ids) * (self.codec.size_bytes + self.conv_bytes)

    @cached_property
    def _record(self) -> RecordForm:
        return RecordForm(len(self.layer_ids), self.codec, self.conv_bytes)

    @property
    def record_segment_bytes(self) -> int:
        """Of one layer of a record."""
        return self._record.segment_bytes

    @property
    def record_conv_offset(self) -> int:
        """Where the convolution window begins in a segment of a record."""
        return self._record.conv_offset

    def record_layout(self, kv_page_bytes: int = 0) -> RecordLayout:
        """Return the SSD's layout for these checkpoints, and for KV pages of that size (0: for none)."""
        segments = (self.record_segment_bytes,) * len(self.layer_ids)
        return RecordLayout(segments, kv_page_bytes, storable=self.storable)

    def record_views(self, payload: Any) -> list[RecordViews]:
        """Return tensors that share memory with a record's `payload` (uint8, at least the layout's payload bytes)."""
        flat = torch.from_numpy(payload)
        window = Part(self.conv_shape, self.conv_dtype)
        *part_offsets, conv_offset = self._record.part_offsets
        layers = []
        for index in range(len(self.layer_ids)):
            start = index * self.record_segment_bytes
            parts = zip(self.codec.parts, part_offsets, strict=True)
            temporal = tuple(_view(flat, start + offset, part) for part, offset in parts)
            layers.append(RecordViews(temporal, _view(flat, start + conv_offset, window)))
        return layers

    def encoded(self, temporal: torch.Tensor, conv: torch.Tensor, places: RecordViews) -> list[Move]:
        """Encode one layer's state ``[1, HV, V, K]``, and return the moves of it and its window ``[dim, W-1]`` to a record."""
        parts = zip(self.codec.encode(temporal), places.temporal, strict=True)
        return [*(Move(part[0], place) for part, place in parts), Move(conv, places.conv)]

    def storable(self, payload: Any) -> bool:
        """Return whether every number of a record is finite: others are never stored. Some milliseconds; any thread."""
        return all(
            self.codec.finite(layer.temporal) and all_finite(layer.conv)
            for layer in self.record_views(payload)
        )

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for two stores to hold the same kind of record, as JSON values."""
        return {
            "layer_ids": list(self.layer_ids),
            "temporal_shape": list(self.temporal_shape),
            "temporal_dtype": str(self.temporal_dtype),
            "conv_shape": list(self.conv_shape),
            "conv_dtype": str(self.conv_dtype),
            "encoding": self.encoding.value,
        }


def _view(flat: torch.Tensor, start: int, part: Part) -> torch.Tensor:
    return flat[start : start + part.size_bytes].view(part.dtype).view(part.shape)
