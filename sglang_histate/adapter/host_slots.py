"""Slots of the host state pool: where a checkpoint lands on its way from the SSD to the device."""

from __future__ import annotations

from typing import Any

import torch

from sglang_histate.adapter.mamba_component import HiStateMambaComponent
from sglang_histate.adapter.state_layout import StateLayout


class HostSlots:
    """A thin face of HiCache's `MambaPoolHost`: temporal ``[slots, L, 1, HV, V, K]``, conv ``[slots, L, 1, dim, W-1]``."""

    def __init__(self, component: HiStateMambaComponent, layout: StateLayout) -> None:
        pool: Any = component._mamba_pool_host
        self._component = component
        self._layout = layout
        self._temporal: torch.Tensor = pool.temporal_buffer
        self._conv: torch.Tensor = pool.conv_buffer[0]
        assert tuple(self._temporal.shape[1:]) == (len(layout.layer_ids), 1, *layout.temporal_shape)
        assert tuple(self._conv.shape[1:]) == (len(layout.layer_ids), 1, *layout.conv_shape)

    @property
    def total(self) -> int:
        """Slots of the pool, free or not."""
        return int(self._temporal.shape[0])

    def alloc(self) -> torch.Tensor | None:
        """Return one free slot (an index tensor of length 1), evicting the least recently used state if needed."""
        return self._component.alloc_prefetch_staging(1)

    def free(self, slot: torch.Tensor) -> None:
        self._component.free_host_slot(slot)

    def drop_loaded(self, node_id: Any) -> None:
        """Free a node's host state if it is on the device too."""
        self._component.drop_loaded_host_state(node_id)

    def fill(self, slot: torch.Tensor, payload: Any) -> None:
        """Copy a record's payload into `slot`. Safe on any thread while the slot is held."""
        index = int(slot[0])
        for layer, views in enumerate(self._layout.views(payload)):
            self._temporal[index, layer, 0].copy_(views.temporal)
            self._conv[index, layer, 0].copy_(views.conv)
