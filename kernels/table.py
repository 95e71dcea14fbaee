"""What a kernel is told about memory: the pool's tensors. Where the parts of a state lie in a record is in `copy.record_form`;
the bytes between parts are zero in a record that `pack` wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from sglang_histate.config import CheckpointDtype
from sglang_histate.copy.encoding import codec_for
from sglang_histate.copy.record_form import ALIGNMENT_BYTES, RecordForm

__all__ = ["ALIGNMENT_BYTES", "DTYPES", "PoolTable", "RecordForm"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
