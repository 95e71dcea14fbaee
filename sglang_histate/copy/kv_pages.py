"""Copy plans of KV: pages of the host arena, rows of tokens on the device, and extents on their way to or from the SSD.

A page of the arena holds ``[layer][K, V][token]`` in the pool's own dtype, so what one layer needs of a page is one run
of bytes, for K and for V. An extent is pages one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from sglang_histate.copy.checkpoints import Direction
from sglang_histate.copy.plan import CopyPlan, Offsets
from sglang_histate.copy.rows import DeviceRows
from sglang_histate.copy.transfer import Space, Transfer


class KvPlans:
    """Plans for pages of `page_size` tokens that begin every `page_bytes` in the arena.

    `layers`: the rows of K and of V of each layer, in the order in which they lie in a page.
    """

    def __init__(self, layers: Sequence[Sequence[DeviceRows]], page_size: int, page_bytes: int) -> None:
        self.page_size = page_size
        self.page_bytes = page_bytes
        self._layers: list[list[tuple[DeviceRows, int]]] = []
        offset = 0
        for of_layer in layers:
            self._layers.append([])
            for rows in of_layer:
                self._layers[-1].append((rows, offset))
                offset += rows.row_bytes * page_size
        assert offset <= page_bytes

    def transfers(
        self, host: Space, pages: Offsets, tokens: Offsets, layer: int, direction: Direction
    ) -> list[Transfer]:
        """Return the ways of one layer's K and V. `tokens` ``[pages * page_size]``: rows on the device."""
        found = []
        for rows, offset in self._layers[layer]:
            starts = pages * self.page_bytes + offset
            if rows.packed:
                # A page of tokens is one run on the device too, as its allocator works in pages.
                plan = CopyPlan.blocks(
                    rows.offsets(tokens[:: self.page_size]), starts, rows.row_bytes * self.page_size
                )
            else:
                inside = np.arange(self.page_size, dtype=np.int64) * rows.row_bytes
                plan = CopyPlan.blocks(
                    rows.offsets(tokens), (starts[:, None] + inside).ravel(), rows.row_bytes
                )
            if direction is Direction.TO_HOST:
                found.append(Transfer(plan, rows.space, host))
            else:
                found.append(Transfer(plan.reversed(), host, rows.space))
        return found


def extent_plan(pages: Sequence[int], places: Sequence[int], page_bytes: int) -> CopyPlan:
    """Return the way of the arena's `pages` into an extent's `places`, both counted in pages."""
    return CopyPlan.blocks(
        np.array(pages, dtype=np.int64) * page_bytes,
        np.array(places, dtype=np.int64) * page_bytes,
        page_bytes,
    )


def extent_space(kv_pages: npt.NDArray[np.uint8]) -> Space:
    """Return a record's pages ``[pages, page bytes]``, which lie one after the other, as a space."""
    return Space("an extent", torch.from_numpy(kv_pages.reshape(-1)))
