"""The state face of the host arena: a slot is one checkpoint on scattered pages.

The pages of a slot, read one after the other, hold an image (`StateLayout`): layer by layer, temporal state then
convolution window, as the device has them. So a native record is copied in as it is, any other one decoded layer by
layer, and layers are loaded by reading only the pages they lie on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo

from sglang_histate.adapter.arena_face import ArenaFace, SharedArena
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.copy import CopyPlan, Space, Transfer
from sglang_histate.copy.checkpoints import CheckpointPlans, Direction, PoolPart, layer_groups
from sglang_histate.copy.plan import Offsets
from sglang_histate.copy.rows import DeviceRows, as_rows
from sglang_histate.pool import Kind
from sglang_histate.pool.arena import PageError


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
        self._plans = CheckpointPlans(
            pool_parts(info.temporal, info.conv[0], state.segment_bytes, state.conv_offset),
            shared.arena.page_bytes,
        )
        self._groups = {group.start: group for group in layer_groups(self.layer_num)}

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
        plan = CopyPlan.from_pages(self._held(slot), self.arena.page_bytes, start, len(image), 0)
        source = Space("a record", torch.from_numpy(image))
        self.shared.host_engine.submit([Transfer(plan.reversed(), source, self.shared.space)])

    def read(self, slot: int) -> Any:
        """Return a copy of the slot's image."""
        image = np.empty(self.size_per_token, dtype=np.uint8)
        self.read_into(slot, image)
        return image

    def read_into(self, slot: int, image: Any) -> None:
        """Copy the slot's image to `image` (uint8, as large)."""
        plan = CopyPlan.from_pages(self._held(slot), self.arena.page_bytes, 0, self.size_per_token, 0)
        target = Space("an image", torch.from_numpy(image))
        self.shared.host_engine.submit([Transfer(plan, self.shared.space, target)])

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        for group in self._groups.values():
            self._submit(host_indices, device_indices, group, Direction.TO_HOST)

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
        """Layers are asked for in order: the first one of a group brings the others of it along."""
        group = self._groups.get(layer_id)
        if group is not None:
            self._submit(host_indices, device_indices, group, Direction.TO_DEVICE)

    def _submit(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layers: range,
        direction: Direction,
    ) -> None:
        starts = self._starts(as_rows(host_indices).tolist())
        self.shared.engine.submit(
            self._plans.transfers(self.shared.space, starts, as_rows(device_indices), layers, direction)
        )

    def _starts(self, slots: list[int]) -> Offsets:
        """Return where the pages of each slot begin in the arena, bytes ``[slots, pages]``."""
        pages = np.array([self._held(slot) for slot in slots], dtype=np.int64)
        return pages.reshape(len(slots), self.pages_per_slot) * self.arena.page_bytes

    def _held(self, slot: int) -> list[int]:
        pages = self._pages.get(slot)
        if pages is None:
            raise PageError(f"host state slot {slot} is not in use")
        return pages


def pool_parts(
    temporal: torch.Tensor, conv: torch.Tensor, segment_bytes: int, conv_offset: int
) -> list[list[PoolPart]]:
    """Return where each layer's state and window lie, on the device and in segments one after the other."""
    return [
        [
            PoolPart(DeviceRows.of(temporal[layer], "the device's states"), layer * segment_bytes),
            PoolPart(DeviceRows.of(conv[layer], "the device's windows"), layer * segment_bytes + conv_offset),
        ]
        for layer in range(len(temporal))
    ]
