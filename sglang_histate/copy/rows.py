"""A tensor of the device's pool as rows of bytes, for copy plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_histate.copy.plan import Offsets
from sglang_histate.copy.transfer import Space, flat_bytes


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Row i is `row_bytes` at ``base + i * stride`` of `space`, the storage. Rows may be far apart."""

    space: Space
    base: int
    stride: int
    row_bytes: int

    @classmethod
    def of(cls, layer: torch.Tensor, name: str) -> DeviceRows:
        """Read the rows off a tensor ``[rows, ...]`` whose rows are contiguous inside."""
        row = layer[0]
        assert row.is_contiguous(), f"rows of {tuple(layer.shape)} with strides {layer.stride()}"
        size = layer.element_size()
        return cls(
            Space(name, flat_bytes(layer)),
            int(layer.storage_offset()) * size,
            layer.stride(0) * size,
            row.numel() * size,
        )

    @property
    def packed(self) -> bool:
        """True if neighbouring rows are neighbours in memory."""
        return self.stride == self.row_bytes

    def offsets(self, rows: Offsets) -> Offsets:
        return self.base + rows * self.stride


def as_rows(indices: torch.Tensor) -> Offsets:
    """Return a tensor of indices as int64 numbers on the host."""
    return indices.cpu().numpy().astype(np.int64, copy=False)
