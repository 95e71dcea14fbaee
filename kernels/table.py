"""What a kernel is told about memory: the pool's tensors, and where the parts of a state lie in a record.

A record has one segment per layer: the parts of the encoded temporal state, then the convolution window. Each part
begins on 16 bytes; the bytes between parts are zero in a record that `pack` wrote. `csrc/index.cuh` has the same
arithmetic for the device, and `sglang_histate/adapter/state_layout.py` describes the same records for the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy.encoding import TemporalCodec, codec_for

ALIGNMENT_BYTES = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, eq=False)
class PoolTable:
    """The recurrent states of one rank: `temporal` ``[L, slots, HV, V, K]``, `conv` ``[L, slots, dim, W-1]``.

    Layers and slots may have any strides, so views of one pool of bytes will do; one layer of one slot is contiguous.
    """

    temporal: torch.Tensor
    conv: torch.Tensor

    def __post_init__(self) -> None:
        temporal, conv = self.temporal, self.conv
        if temporal.dim() != 5 or conv.dim() < 3 or temporal.shape[:2] != conv.shape[:2]:
            raise ValueError(
                f"a pool is temporal [L, slots, HV, V, K] and conv [L, slots, dim, W-1], not "
                f"{tuple(temporal.shape)} and {tuple(conv.shape)}"
            )
        if temporal.device != conv.device:
            raise ValueError(f"states are on {temporal.device}, windows on {conv.device}")
        for name, tensor in (("states", temporal), ("windows", conv)):
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{name} are {tensor.dtype}: float32, bfloat16 and float16 are supported")
            if not tensor[0, 0].is_contiguous():
                raise ValueError(f"one layer of one slot is not contiguous in {name}")

    @property
    def device(self) -> torch.device:
        return self.temporal.device

    @property
    def layers(self) -> int:
        return self.temporal.shape[0]

    @property
    def slots(self) -> int:
        return self.temporal.shape[1]

    def form(self, encoding: CheckpointDtype) -> RecordForm:
        """Return where a state's parts lie in a record of that encoding.

        Raises:
            ValueError: the states' dtype has no such encoding.
        """
        codec = codec_for(encoding, tuple(self.temporal.shape[2:]), self.temporal.dtype)
        window_bytes = prod(self.conv.shape[2:]) * self.conv.dtype.itemsize
        return RecordForm(self.layers, codec, window_bytes)


@dataclass(frozen=True, eq=False)
class RecordForm:
    """Offsets in a record of `layers` segments, in bytes."""

    layers: int
    codec: TemporalCodec
    conv_bytes: int

    @cached_property
    def part_offsets(self) -> tuple[int, ...]:
        """Where the parts of the temporal state begin in a segment; the last one is the window's."""
        offsets = [0]
        for part in self.codec.parts:
            offsets.append(offsets[-1] + aligned(part.size_bytes))
        return tuple(offsets)

    @property
    def segment_bytes(self) -> int:
        return self.part_offsets[-1] + aligned(self.conv_bytes)

    @property
    def record_bytes(self) -> int:
        return self.layers * self.segment_bytes
