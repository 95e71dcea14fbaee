"""Copy plans of checkpoints: rows of the device's pool, and objects that lie in pieces of host memory.

An object holds one checkpoint: a record, which is one run of bytes, or a slot of the host arena, which is pages
wherever they are. Its byte b is byte ``b % page_bytes`` of page ``b // page_bytes``; a record is one large page. Where a
checkpoint has to be cut depends on the layout and the size of a page alone, so it is worked out once, and a plan is
only a few additions over arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np

from sglang_histate.copy.plan import CopyPlan, Offsets, PlanError
from sglang_histate.copy.rows import DeviceRows
from sglang_histate.copy.transfer import Space, Transfer

GROUP_LAYERS = 3
"""Layers in one call to the driver. A whole record in one would keep small copies of others waiting for a millisecond;
a call for each layer would cost three times the CPU time."""


class Direction(Enum):
    TO_HOST = "to the host"
    TO_DEVICE = "to the device"


@dataclass(frozen=True, eq=False)
class PoolPart:
    """One tensor of one layer: its rows on the device, and where it begins in an object."""

    rows: DeviceRows
    offset: int


def layer_groups(layers: int, size: int = GROUP_LAYERS) -> list[range]:
    """Return `layers` layers in order, `size` in a group, the rest in the last one."""
    return [range(start, min(start + size, layers)) for start in range(0, layers, size)]


class CheckpointPlans:
    """Plans for checkpoints of one layout in objects of pages of `page_bytes`.

    Raises:
        PlanError: two parts overlap in an object, or one begins off `alignment`.
    """

    def __init__(self, layers: Sequence[Sequence[PoolPart]], page_bytes: int, alignment: int = 16) -> None:
        assert page_bytes > 0
        parts = [(layer, part) for layer, of_layer in enumerate(layers) for part in of_layer]
        spans = sorted((part.offset, part.offset + part.rows.row_bytes) for _, part in parts)
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise PlanError(f"a checkpoint's parts overlap at byte {start}")
        for _, part in parts:
            if part.offset % alignment:
                raise PlanError(f"a checkpoint's part begins at byte {part.offset}, not on {alignment} bytes")
        # Parts of one storage become one plan: kernels and drivers take them together.
        self._spaces: list[Space] = []
        of_storage: dict[int, int] = {}
        pieces: list[tuple[int, ...]] = []
        for layer, part in parts:
            rows = part.rows
            storage = of_storage.setdefault(rows.space.address, len(self._spaces))
            if storage == len(self._spaces):
                self._spaces.append(rows.space)
            at, end = part.offset, part.offset + rows.row_bytes
            while at < end:
                stop = min(end, (at // page_bytes + 1) * page_bytes)
                page, inside = divmod(at, page_bytes)
                pieces.append(
                    (storage, layer, page, inside, rows.base + at - part.offset, rows.stride, stop - at)
                )
                at = stop
        table = np.array(sorted(pieces), dtype=np.int64).reshape(-1, 7)
        self._tables = [
            _Table(*np.ascontiguousarray(table[table[:, 0] == storage, 1:].T))
            for storage in range(len(self._spaces))
        ]

    def transfers(
        self, host: Space, starts: Offsets, rows: Offsets, layers: range, direction: Direction
    ) -> list[Transfer]:
        """Return the ways of `layers` of n checkpoints, one transfer for each storage of the device.

        `starts` ``[n, pages]``: where each object's pages begin in `host`, bytes. `rows` ``[n]``: rows on the device.
        """
        assert len(starts) == len(rows) and layers.step == 1
        found = []
        for space, table in zip(self._spaces, self._tables, strict=True):
            cut = slice(*np.searchsorted(table.layers, (layers.start, layers.stop)))
            pages = table.pages[cut]
            if len(pages) == 0:
                continue
            if int(pages.max()) >= starts.shape[1]:
                raise PlanError(
                    f"a checkpoint of {int(pages.max()) + 1} pages in an object of {starts.shape[1]}"
                )
            host_side = (starts[:, pages] + table.inside[cut]).ravel()
            device_side = (table.bases[cut] + rows[:, None] * table.strides[cut]).ravel()
            sizes = np.tile(table.sizes[cut], len(rows))
            if direction is Direction.TO_HOST:
                found.append(Transfer(CopyPlan(device_side, host_side, sizes), space, host))
            else:
                found.append(Transfer(CopyPlan(host_side, device_side, sizes), host, space))
        return found


@dataclass(frozen=True, eq=False)
class _Table:
    """Pieces in the order of layers: page of the object and place in it, place on the device but for the row, bytes."""

    layers: Offsets
    pages: Offsets
    inside: Offsets
    bases: Offsets
    strides: Offsets
    sizes: Offsets
