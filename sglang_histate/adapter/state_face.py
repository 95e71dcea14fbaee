"""The state face of the host arena: a slot is one checkpoint on scattered pages.

The pages of a slot, read one after the other, hold an image (`StateLayout`): layer by layer, temporal state then
convolution window, as the device has them. So a native record is copied in as it is, any other one decoded layer by
layer, and a layer is loaded by reading only the pages it lies on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo

from sglang_histate.adapter.arena_face import ArenaFace, SharedArena
from sglang_histate.adapter.device_rows import DeviceRows, as_rows
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.pool import Kind
from sglang_histate.pool.arena import PageError
from sglang_histate.pool.plan import CopyPlan
from sglang_histate.pool.run_plan import run_plan


class StateFace(ArenaFace):
    """Slots are small integers, in tensors as HiCache hands them out. Raises PageError for a slot nobody holds."""

    kind = Kind.STATE

    def __init__(
        self, shared: SharedArena, info: MambaStateBufferInfo, state: StateLayout, *, layout: str
    ) -> None:
        self.pages_per_slot = shared.arena.pages_for(state.image_bytes)
        slots = shared.arena.total_pages // self.pages_per_slot
        super().__init__(
            shared,
            label="states",
            page_size=1,
            size=slots,
            size_per_token=state.image_bytes,
            layer_num=len(state.layer_ids),
            dtype=state.temporal_dtype,
            layout=layout,
        )
        self._free = list(range(slots - 1, -1, -1))  # the next one last
        self._pages: dict[int, list[int]] = {}
        # (rows on the device, offset in the image) of both parts, layer by layer.
        temporal, conv = info.temporal, info.conv[0]
        self._parts = [
            [
                (DeviceRows.of(temporal[layer]), layer * state.segment_bytes),
                (DeviceRows.of(conv[layer]), layer * state.segment_bytes + state.conv_offset),
            ]
            for layer in range(self.layer_num)
        ]

    @property
    def logical_size(self) -> int:
        """What states hold or could have now. SGLang's metrics take what is missing from it as used."""
        return self.held + self.available_size()

    def available_size(self) -> int:
        return self.arena.free_pages // self.pages_per_slot

    def alloc(self, need_size: int) -> torch.Tensor | None:
        with self.lock:
            pages = self.shared.take(need_size * self.pages_per_slot, self.kind)
            if pages is None:
                return None
            slots = [self._free.pop() for _ in range(need_size)]
            for i, slot in enumerate(slots):
                self._pages[slot] = pages[i * self.pages_per_slot : (i + 1) * self.pages_per_slot]
            return torch.tensor(slots, dtype=torch.int64)

    def free(self, indices: torch.Tensor) -> int:
        with self.lock:
            for slot in as_rows(indices).tolist():
                self.arena.free(self._held(slot), self.kind)
                del self._pages[slot]
                self._free.append(slot)
        return len(indices)

    def clear(self) -> None:
        with self.lock:
            self._pages.clear()
            self._free = list(range(self.size - 1, -1, -1))
            self.arena.clear(self.kind)

    @property
    def held(self) -> int:
        """Slots in use."""
        return len(self._pages)

    def fill(self, slot: int, image: Any, start: int = 0) -> None:
        """Copy an image or some bytes of one (uint8) to `start` in the slot. Safe on any thread while the slot is held."""
        plan = self._range(self._held(slot), start, len(image)).reversed()
        run_plan(plan, torch.from_numpy(image), self.shared.memory)

    def read(self, slot: int) -> Any:
        """Return a copy of the slot's image."""
        image = np.empty(self.size_per_token, dtype=np.uint8)
        run_plan(
            self._range(self._held(slot), 0, self.size_per_token),
            self.shared.memory,
            torch.from_numpy(image),
        )
        return image

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        for layer in range(self.layer_num):
            for rows, plan in self._plans(layer, host_indices, device_indices):
                run_plan(plan.reversed(), rows.flat, self.shared.memory)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        for rows, plan in self._plans(layer_id, host_indices, device_indices):
            run_plan(plan, self.shared.memory, rows.flat)

    def _plans(
        self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> list[tuple[DeviceRows, CopyPlan]]:
        """Return one layer's ways from the arena to the device, slot by slot."""
        plans = []
        for slot, row in zip(as_rows(host_indices).tolist(), as_rows(device_indices), strict=True):
            pages = self._held(slot)
            for rows, offset in self._parts[layer]:
                target = int(rows.offsets(row))
                plans.append((rows, self._range(pages, offset, rows.row_bytes, target)))
        return plans

    def _range(self, pages: list[int], start: int, size_bytes: int, target: int = 0) -> CopyPlan:
        return CopyPlan.from_pages(pages, self.arena.page_bytes, start, size_bytes, target)

    def _held(self, slot: int) -> list[int]:
        pages = self._pages.get(slot)
        if pages is None:
            raise PageError(f"host state slot {slot} is not in use")
        return pages
