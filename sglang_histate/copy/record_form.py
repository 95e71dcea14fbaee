"""Where the parts of a state lie in a record: one segment per layer, in it the parts of the encoded temporal state, then the
convolution window, each on 16 bytes.

The store's view of a record (`adapter/state_layout.py`), the kernels' table and the images of the host arena, which are
records in the native encoding, all go by this. `kernels/csrc/index.cuh` has the same arithmetic for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sglang_histate.copy.encoding import TemporalCodec

ALIGNMENT_BYTES = 16


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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
    def conv_offset(self) -> int:
        """Where the convolution window begins in a segment."""
        return self.part_offsets[-1]

    @property
    def segment_bytes(self) -> int:
        return self.conv_offset + aligned(self.conv_bytes)

    @property
    def record_bytes(self) -> int:
        return self.layers * self.segment_bytes
